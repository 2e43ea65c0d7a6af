package registry

import (
	"fmt"
	"time"
)

// EventKind says what an event tells. Append only.
type EventKind string

const (
	// Of the table of instances.
	EventRegistered   EventKind = "registered"
	EventUpdated      EventKind = "updated"
	EventDeregistered EventKind = "deregistered"
	EventActivated    EventKind = "activated" // the instance is now the active one of its plugin and role
	EventHealthy      EventKind = "healthy"
	EventUnhealthy    EventKind = "unhealthy"

	// Of plugin tasks.
	EventTaskHealthy    EventKind = "task healthy"
	EventTaskUnhealthy  EventKind = "task unhealthy"
	EventRestartAsked   EventKind = "restart asked"
	EventTaskRegistered EventKind = "task registered"   // all roles of the task are registered
	EventTaskRemoved    EventKind = "task deregistered" // all roles of the task are removed

	// Of volumes.
	EventVolumeCreated    EventKind = "volume created"
	EventVolumeRegistered EventKind = "volume registered"
	// its creation has ended, and it cannot be used; Detail says why
	EventVolumeUncertain    EventKind = "volume uncertain"
	EventVolumeDeleted      EventKind = "volume deleted"      // by its plugin
	EventVolumeDeregistered EventKind = "volume deregistered" // forgotten; its plugin keeps it
	// its deletion was refused for certain: it is as it was before
	EventVolumeKept EventKind = "volume kept"
	// by its controller, or for its node alone to do; Detail says to what
	EventVolumeExpanded  EventKind = "volume expanded"
	EventNodeExpanded    EventKind = "expanded on its node" // who uses it has the room
	EventVolumeUnhealthy EventKind = "volume unhealthy"     // its plugin says so in Role; Detail is its message
	// its plugin says so in Role, and said the opposite before
	EventVolumeHealthy EventKind = "volume healthy"
	EventClaimed       EventKind = "claimed"
	EventReleased      EventKind = "released"
	EventAttached      EventKind = "attached"
	EventDetached      EventKind = "detached"
	EventStaged        EventKind = "staged"
	EventUnstaged      EventKind = "unstaged"
	EventPublished     EventKind = "published"
	EventUnpublished   EventKind = "unpublished"
	EventMountLost     EventKind = "mount lost"  // a confirmed mount is gone, dead or hangs; Detail says which
	EventMountBack     EventKind = "mount back"  // it is well again
	EventStepFailed    EventKind = "step failed" // Cause is the RPC, Detail what the driver said
	EventReconciled    EventKind = "reconciled"  // Detail says what was found and done

	// EventResync is never stored: it tells a watcher that its cursor is too old, and what is true now instead.
	EventResync EventKind = "resync"
	// EventBookmark is never stored: it tells a watcher with a filter that it has seen everything up to Seq.
	EventBookmark EventKind = "bookmark"
)

// Event is one change that became true. Events are totally ordered by Seq.
type Event struct {
	Seq        Seq         `json:"seq"`
	Generation Generation  `json:"generation"`
	Kind       EventKind   `json:"kind"`
	Role       Role        `json:"role,omitempty"`
	Plugin     PluginID    `json:"plugin,omitempty"`
	Alloc      AllocID     `json:"alloc,omitempty"`
	Task       TaskName    `json:"task,omitempty"`
	Volume     VolumeName  `json:"volume,omitzero"`
	External   ExternalID  `json:"external_id,omitempty"`
	Request    RequestName `json:"request,omitempty"`
	Cause      Cause       `json:"cause,omitempty"`
	Detail     string      `json:"detail,omitempty"`   // for people, redacted
	At         time.Time   `json:"at,omitzero"`        // wall time, for people
	Instance   *Instance   `json:"instance,omitempty"` // the record after the change; of a removal the removed one
	Snapshot   *Snapshot   `json:"-"`                  // of EventResync only
}

// Snapshot is the table of instances at one index.
type Snapshot struct {
	Index     Seq
	Instances []Instance // by role, plugin, then rank, newest first
}

func (e Event) String() string {
	s := fmt.Sprintf("%d %s", e.Seq, e.Kind)
	for _, part := range []string{string(e.Role), string(e.Plugin), string(e.Alloc), string(e.Task)} {
		if part != "" {
			s += " " + part
		}
	}
	if e.Volume.ID != "" {
		s += " " + e.Volume.String()
	}
	if e.Cause != "" {
		s += ": " + string(e.Cause)
	}
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}
