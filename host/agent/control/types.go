package control

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/registry"
)

// Self describes an agent.
type Self struct {
	Version  string     `json:"version"`
	PID      int        `json:"pid"`
	Node     agent.Node `json:"node"`
	StateDir string     `json:"state_dir"`
	RunDir   string     `json:"run_dir"`
	Drivers  string     `json:"drivers"`
}

// Submission is a job or volume file with the values of its variables.
type Submission = agent.Source

// VolumeSubmission is a volume file, or a spec instead of it.
type VolumeSubmission struct {
	Submission
	Spec *host.VolumeSpec `json:"spec,omitempty"`
}

// Job is a job and its allocs.
type Job struct {
	ID        string           `json:"id"`
	Namespace string           `json:"namespace"`
	Type      string           `json:"type"`
	Status    agent.AllocState `json:"status"` // state of its most significant alloc
	Version   uint64           `json:"version"`
	Stopped   bool             `json:"stopped"`
	Submitted time.Time        `json:"submitted"`
	Warnings  []string         `json:"warnings,omitempty"`
	Waits     string           `json:"waits,omitempty"`  // why no alloc is placed, if the job is pending
	Reason    string           `json:"reason,omitempty"` // of its newest alloc that has one
	Groups    []Group          `json:"groups"`
	Allocs    []Alloc          `json:"allocs,omitempty"`
	Roll      *Roll            `json:"roll,omitempty"` // the last roll of its plugins
}

// Group is a group of a job with the number of its allocs by state.
type Group struct {
	Name    string                   `json:"name"`
	Count   int                      `json:"count"`
	Plugins []host.PluginID          `json:"plugins,omitempty"`
	Volumes []string                 `json:"volumes,omitempty"`
	Allocs  map[agent.AllocState]int `json:"allocs,omitempty"` // number by state
}

// Counts formats the number of allocs in each state, as in "1 pending, 2 running".
func (g Group) Counts() string {
	var parts []string
	for state, n := range g.Allocs {
		parts = append(parts, fmt.Sprintf("%d %s", n, state))
	}
	slices.Sort(parts)
	return strings.Join(parts, ", ")
}

// Alloc is a placement of a group.
type Alloc struct {
	ID        string           `json:"id"`
	Job       string           `json:"job"`
	Group     string           `json:"group"`
	Index     uint64           `json:"index"`
	Version   uint64           `json:"version"`            // version of the job when the alloc was placed
	Replaced  bool             `json:"replaced,omitempty"` // by a newer version of the job; set only in a job's list
	Namespace string           `json:"namespace"`
	State     agent.AllocState `json:"state"`
	Reason    string           `json:"reason,omitempty"`
	Waiting   []registry.Wait  `json:"waiting,omitempty"` // like Reason, but for each volume
	// Notices about the alloc's waits and volumes are only in the answer for one alloc.
	Notices []Notice      `json:"notices,omitempty"`
	Next    time.Time     `json:"next,omitzero"` // when the agent asks the shim again to prepare or release the volumes
	Created time.Time     `json:"created"`
	Ended   time.Time     `json:"ended,omitzero"`
	Tasks   []Task        `json:"tasks"`
	Volumes []AllocVolume `json:"volumes,omitempty"`
	Notes   []agent.Note  `json:"notes,omitempty"`
}

// Task is a task of an alloc.
type Task struct {
	Name     host.TaskName   `json:"name"`
	Driver   string          `json:"driver"`
	Plugin   host.PluginID   `json:"plugin,omitempty"`
	State    agent.TaskState `json:"state"`
	Failed   bool            `json:"failed,omitempty"`
	Attempt  uint64          `json:"attempt"`
	Restarts int             `json:"restarts"`
	PID      int             `json:"pid,omitempty"`
	ExitCode *int            `json:"exit_code,omitempty"` // of the last attempt that ended
	Signal   int             `json:"signal,omitempty"`
	Since    time.Time       `json:"since,omitzero"`
	Reason   string          `json:"reason,omitempty"`
	Notes    []string        `json:"driver_notes,omitempty"`
}

// Ran reports whether an attempt of the task is known to have run and ended.
func (t Task) Ran() bool { return t.Signal != 0 || t.ExitCode != nil && *t.ExitCode >= 0 }

// AllocVolume is an alloc's use of a volume.
type AllocVolume struct {
	Request   registry.RequestName `json:"request"`
	Volume    registry.VolumeID    `json:"volume"`
	Namespace registry.Namespace   `json:"namespace"`
	Plugin    host.PluginID        `json:"plugin"`
	External  registry.ExternalID  `json:"external_id,omitempty"`
	Access    registry.AccessMode  `json:"access_mode"`
	Attached  registry.Mark        `json:"attach"`
	Staged    registry.Mark        `json:"stage"`
	Published registry.Mark        `json:"publish"`
	Target    string               `json:"target,omitempty"`
	Intent    *registry.Intent     `json:"intent,omitempty"` // the open or uncertain CSI call
}

// Attachment says that a volume is, or may be, attached to a node.
type Attachment struct {
	Node   registry.NodeName `json:"node"`
	NodeID registry.NodeID   `json:"node_id"` // as the plugin names it
	State  registry.Mark     `json:"state"`
	// DetachingBy is the operator who asked for the detach; empty if none did.
	DetachingBy    string    `json:"detaching_by,omitempty"`
	DetachingSince time.Time `json:"detaching_since,omitzero"`
}

// Volume is a volume with its holders and waits.
type Volume struct {
	registry.Volume
	Attached registry.Mark    `json:"attach"` // mark of the first attachment
	Staged   registry.Mark    `json:"stage"`
	StagedAt string           `json:"staged_at,omitempty"`
	Holders  []Holder         `json:"holders"`
	Waiting  []registry.Wait  `json:"waiting,omitempty"` // waits of allocs, or of the volume's creation or deletion
	Intent   *registry.Intent `json:"intent,omitempty"`
	Notices  []Notice         `json:"notices,omitempty"` // notices about waits are only in the answer for one volume

	Attachments []Attachment `json:"attachments,omitempty"`

	// Unmeasured says why Usage is unknown. Both are empty if usage was not requested.
	Usage      []host.VolumeUsage `json:"usage,omitempty"`
	Unmeasured string             `json:"unmeasured,omitempty"`

	Warnings host.Diagnostics `json:"warnings,omitempty"` // about its file, in the answer to a creation or registration
}

// Mounted reports whether the volume is mounted on this node, so that its usage can be known.
func (v Volume) Mounted() bool {
	return v.Staged == registry.MarkDone ||
		slices.ContainsFunc(v.Holders, func(h Holder) bool { return h.Published == registry.MarkDone })
}

// Holder is a claim on a volume, with its publish.
type Holder struct {
	Alloc     host.AllocID         `json:"alloc"`
	Node      host.NodeName        `json:"node,omitempty"`  // node of the alloc; empty: this node
	Job       string               `json:"job,omitempty"`   // of an alloc of this node
	State     agent.AllocState     `json:"state,omitempty"` // of the alloc
	Request   registry.RequestName `json:"request"`
	Access    registry.AccessMode  `json:"access_mode"`
	ReadOnly  bool                 `json:"read_only"`
	Published registry.Mark        `json:"publish"`
	Target    string               `json:"target,omitempty"`
	Since     time.Time            `json:"since,omitzero"`

	// Engines is set instead of Job if container engines hold the volume.
	Engines    []EngineUse `json:"engines,omitempty"`
	Containers []string    `json:"containers,omitempty"` // IDs; only in the answer for one volume
}

// EngineUse is the mount that an engine has made with one ID.
type EngineUse struct {
	Engine string `json:"engine"` // docker or podman
	ID     string `json:"id"`     // as the engine sent it
	Mounts int    `json:"mounts"`
}

// DoctorRequest asks for an inspection, or for the execution of the repair plan with the digest. An empty digest means
// the current plan.
type DoctorRequest struct {
	Repair bool   `json:"repair"`
	Digest string `json:"digest,omitempty"`
}

// Shim describes the shim. The fields below ShimState are set only while it serves.
type Shim struct {
	host.ShimState
	Version     string   `json:"version,omitempty"`
	Generation  uint64   `json:"generation,omitempty"`
	Index       host.Seq `json:"index,omitempty"`
	Schema      uint32   `json:"schema,omitempty"`
	OpenIntents int      `json:"open_intents"`
	Instances   int      `json:"instances"`
	Allocs      int      `json:"allocs"`
	Protocol    int      `json:"protocol,omitempty"`
	// ClusterProblem says why changes of the records that nodes share have to wait.
	ClusterProblem string `json:"cluster_problem,omitempty"`
}

// errorBody is the answer to a refused request.
type errorBody struct {
	Error string `json:"error"`
	Kind  string `json:"kind,omitempty"` // one of package registry's kinds, by its text
}

// eventLine is a line of the event stream. It is an event or, in the last line, the reason why the stream ended early.
type eventLine struct {
	host.Event
	Error *errorBody `json:"error,omitempty"`
}
