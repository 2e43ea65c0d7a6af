package registry

import (
	"fmt"
	"strings"
	"time"
)

// EventKind is the kind of an event. Append only.
type EventKind string

const (
	// Events of the table of instances.
	EventRegistered   EventKind = "registered"
	EventUpdated      EventKind = "updated"
	EventDeregistered EventKind = "deregistered"
	EventActivated    EventKind = "activated" // the instance is now the active one of its plugin and role
	EventHealthy      EventKind = "healthy"
	EventUnhealthy    EventKind = "unhealthy"

	// Events of plugin tasks.
	EventTaskHealthy   EventKind = "task healthy"
	EventTaskUnhealthy EventKind = "task unhealthy"
	EventRestartAsked  EventKind = "restart asked"
	// the plugin has been unhealthy for restart_after, and its task serves mounts; Detail names them
	EventRestartWithheld EventKind = "restart withheld"
	EventTaskRegistered  EventKind = "task registered"   // all roles of the task are registered
	EventTaskRemoved     EventKind = "task deregistered" // all roles of the task are removed

	// Events of volumes.
	EventVolumeCreated    EventKind = "volume created"
	EventVolumeRegistered EventKind = "volume registered"
	// creation ended and the volume cannot be used; Detail holds the reason
	EventVolumeUncertain    EventKind = "volume uncertain"
	EventVolumeDeleted      EventKind = "volume deleted"      // by its plugin
	EventVolumeDeregistered EventKind = "volume deregistered" // its record was removed; the plugin keeps the volume
	// the plugin refused the deletion; the volume is unchanged
	EventVolumeKept EventKind = "volume kept"
	// the controller has expanded the volume, or the node alone is to expand it; Detail holds the size
	EventVolumeExpanded  EventKind = "volume expanded"
	EventVolumeUpdated   EventKind = "volume updated"       // Detail names the fields of the volume file
	EventVolumeModified  EventKind = "volume modified"      // Detail names the mutable parameters
	EventNodeExpanded    EventKind = "expanded on its node" // users of the volume see the new size
	EventVolumeUnhealthy EventKind = "volume unhealthy"     // the plugin reports it in Role; Detail is its message
	// the plugin reports in Role that the volume is healthy again
	EventVolumeHealthy EventKind = "volume healthy"
	EventOwnership     EventKind = "volume ownership" // of its files; Detail says what was set
	// Events of the storage that a plugin reaches from this node.
	EventStorageUnhealthy EventKind = "storage unhealthy" // Detail is the plugin's message
	EventStorageHealthy   EventKind = "storage healthy"
	// Events of snapshots: Volume is the snapshot's source, empty for a group snapshot. Detail names the snapshot.
	EventSnapshotTaken   EventKind = "snapshot taken"
	EventSnapshotReady   EventKind = "snapshot ready" // volumes can be created from it
	EventSnapshotFailed  EventKind = "snapshot failed"
	EventSnapshotDeleted EventKind = "snapshot deleted"
	EventSnapshotKept    EventKind = "snapshot kept" // the plugin refused the deletion
	// its record was removed; the plugin keeps the snapshot
	EventSnapshotDeregistered EventKind = "snapshot deregistered"

	EventClaimed     EventKind = "claimed"
	EventReleased    EventKind = "released"
	EventAttached    EventKind = "attached"
	EventDetached    EventKind = "detached"
	EventStaged      EventKind = "staged"
	EventUnstaged    EventKind = "unstaged"
	EventPublished   EventKind = "published"
	EventUnpublished EventKind = "unpublished"
	EventMountLost   EventKind = "mount lost"  // a confirmed mount is gone, dead or hangs; Detail holds which
	EventMountBack   EventKind = "mount back"  // a lost mount works again
	EventStepFailed  EventKind = "step failed" // Cause is the RPC, Detail the driver's message
	EventReconciled  EventKind = "reconciled"  // Detail holds the finding and the repair

	EventFormed   EventKind = "cluster formed" // all expected nodes have registered; Detail names them
	EventMissed   EventKind = "events missed"  // this node missed events of others and has loaded all records anew
	EventExecutor EventKind = "executor"       // another node now makes the plugin's controller calls; Detail names it

	// Events of the nodes of a cluster. Node is the node in question. Detail says who caused the event, and why.
	EventNodeSuspect      EventKind = "node suspect" // etcd has not heard from it for lease_ttl; its claims stay
	EventNodeBack         EventKind = "node back"    // etcd has heard from it again
	EventNodeReady        EventKind = "node ready"   // it takes claims again
	EventNodeDraining     EventKind = "node draining"
	EventNodeOutOfService EventKind = "node out of service"
	EventNodeFenced       EventKind = "node fenced"
	EventNodeForgotten    EventKind = "node forgotten"
	EventFenceFailed      EventKind = "fence failed" // of the node; it is tried again
	// The claims of the alloc were released while this node was lost. The host stops the tasks of the alloc, then calls
	// ReleaseAlloc. Until that call the alloc is releasing, even if its volumes are released.
	EventVolumesLost EventKind = "volumes lost"

	EventForced    EventKind = "release forced" // of the alloc or volume; Detail holds by whom
	EventAbandoned EventKind = "abandoned"      // calls were skipped; Detail holds which, by whom and why

	// EventResync is never stored. It reports that a watcher's cursor is too old and carries the current Snapshot.
	EventResync EventKind = "resync"
	// EventBookmark is never stored. It reports that a watcher has processed every event up to Seq.
	EventBookmark EventKind = "bookmark"
)

// Event describes one committed change. Seq orders all events.
type Event struct {
	Seq        Seq         `json:"seq"`
	Generation Generation  `json:"generation"`
	Kind       EventKind   `json:"kind"`
	Role       Role        `json:"role,omitempty"`
	Plugin     PluginID    `json:"plugin,omitempty"`
	Node       NodeName    `json:"node,omitempty"` // of a cluster; the event is about this node
	Alloc      AllocID     `json:"alloc,omitempty"`
	Task       TaskName    `json:"task,omitempty"`
	Volume     VolumeName  `json:"volume,omitzero"`
	External   ExternalID  `json:"external_id,omitempty"`
	Request    RequestName `json:"request,omitempty"`
	Cause      Cause       `json:"cause,omitempty"`
	Detail     string      `json:"detail,omitempty"`   // for people, redacted
	At         time.Time   `json:"at,omitzero"`        // wall time, for people
	Instance   *Instance   `json:"instance,omitempty"` // the record after the change; for a removal, the removed record
	Snapshot   *Snapshot   `json:"-"`                  // for EventResync only
}

// Snapshot is the table of instances at one index.
type Snapshot struct {
	Index     Seq
	Instances []Instance // by role, plugin, then rank, newest first
}

func (e Event) String() string { return fmt.Sprintf("%d %s", e.Seq, e.Describe()) }

// Describe returns one line about the event for people, without its number and time.
func (e Event) Describe() string {
	short := func(id AllocID) string { return string(id[:min(8, len(id))]) }
	s := ""
	switch {
	case e.Volume.ID != "":
		s = "volume " + e.Volume.String()
	case e.Plugin != "":
		s = "plugin " + string(e.Plugin)
	case e.Node != "":
		s = "node " + string(e.Node)
	case e.Alloc != "":
		s = "alloc " + short(e.Alloc)
	default:
		s = "node"
	}
	s += " " + strings.TrimPrefix(strings.TrimPrefix(string(e.Kind), "volume "), "node ")
	if e.Role != "" {
		s += " as " + string(e.Role)
	}
	if e.Volume.ID != "" && e.Alloc != "" {
		s += " for alloc " + short(e.Alloc)
	}
	if e.Cause != "" {
		s += ": " + string(e.Cause)
	}
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}
