package control

import (
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

// Job is a job and its allocs.
type Job struct {
	ID        string    `json:"id"`
	Namespace string    `json:"namespace"`
	Type      string    `json:"type"`
	Status    string    `json:"status"` // of its most significant alloc
	Version   uint64    `json:"version"`
	Stopped   bool      `json:"stopped"`
	Submitted time.Time `json:"submitted"`
	Warnings  []string  `json:"warnings,omitempty"`
	Waits     string    `json:"waits,omitempty"` // why no alloc is placed, if the job is pending
	Groups    []Group   `json:"groups"`
	Allocs    []Alloc   `json:"allocs,omitempty"`
}

// Group is a group of a job with the number of its allocs by state.
type Group struct {
	Name    string         `json:"name"`
	Count   int            `json:"count"`
	Plugins []string       `json:"plugins,omitempty"`
	Volumes []string       `json:"volumes,omitempty"`
	Allocs  map[string]int `json:"allocs,omitempty"` // number by state
}

// Alloc is a placement of a group.
type Alloc struct {
	ID        string `json:"id"`
	Job       string `json:"job"`
	Group     string `json:"group"`
	Index     uint64 `json:"index"`
	Version   uint64 `json:"version"`            // of the job, as it was placed
	Replaced  bool   `json:"replaced,omitempty"` // by a newer version of the job; set only in a job's list
	Namespace string `json:"namespace"`
	State     string `json:"state"`
	Reason    string `json:"reason,omitempty"`
	Waits     string `json:"waits,omitempty"` // what its volumes wait for, in one line

	Waiting []Wait       `json:"waiting,omitempty"` // the same for each volume, with explanations
	Next    time.Time    `json:"next,omitzero"`     // when the agent asks the shim for its volumes again
	Created time.Time    `json:"created"`
	Ended   time.Time    `json:"ended,omitzero"`
	Tasks   []Task       `json:"tasks"`
	Volumes []Use        `json:"volumes,omitempty"`
	Notes   []agent.Note `json:"notes,omitempty"`
}

// Task is a task of an alloc.
type Task struct {
	Name     string    `json:"name"`
	Driver   string    `json:"driver"`
	Plugin   string    `json:"plugin,omitempty"`
	State    string    `json:"state"`
	Failed   bool      `json:"failed,omitempty"`
	Attempt  uint64    `json:"attempt"`
	Restarts int       `json:"restarts"`
	PID      int       `json:"pid,omitempty"`
	ExitCode *int      `json:"exit_code,omitempty"` // of the last attempt that ended
	Signal   int       `json:"signal,omitempty"`
	Since    time.Time `json:"since,omitzero"`
	Reason   string    `json:"reason,omitempty"`
	Notes    []string  `json:"driver_notes,omitempty"`
}

// Use is an alloc's use of a volume. Each mark is "", "sent" or "done".
type Use struct {
	Request   string           `json:"request"`
	Volume    string           `json:"volume"`
	Namespace string           `json:"namespace"`
	Plugin    string           `json:"plugin"`
	External  string           `json:"external_id,omitempty"`
	Access    string           `json:"access_mode"`
	Attached  string           `json:"attach"`
	Staged    string           `json:"stage"`
	Published string           `json:"publish"`
	Target    string           `json:"target,omitempty"`
	Intent    *registry.Intent `json:"intent,omitempty"` // the open or uncertain CSI call
	Trouble   *Trouble         `json:"trouble,omitempty"`
	Growth    *Trouble         `json:"growth,omitempty"` // a pending or uncertain expansion
	Unhealthy []*Trouble       `json:"unhealthy,omitempty"`
}

// Plugin is a plugin with its instances, tasks and jobs.
type Plugin struct {
	ID        string       `json:"id"`
	Provider  string       `json:"provider"`
	Version   string       `json:"version"`
	Roles     []Role       `json:"roles"`
	Instances []Instance   `json:"instances"`
	Tasks     []PluginTask `json:"tasks"`
	Jobs      []Runner     `json:"jobs,omitempty"` // of this agent that run it
}

// Role counts the instances that serve a plugin in a role.
type Role struct {
	Role     string `json:"role"`
	Healthy  int    `json:"healthy"`
	Expected int    `json:"expected"`         // from running tasks and from jobs that are not stopped
	Reason   string `json:"reason,omitempty"` // of the newest failed alloc
}

// Instance is one running task in one role of a plugin.
type Instance struct {
	Role         string            `json:"role"`
	Alloc        string            `json:"alloc"`
	Task         string            `json:"task"`
	Attempt      uint64            `json:"attempt"`
	Active       bool              `json:"active"`
	Health       string            `json:"health"`
	Cause        string            `json:"cause"`
	Detail       string            `json:"detail,omitempty"`
	Since        time.Time         `json:"since,omitzero"`
	NodeID       string            `json:"node_id,omitempty"`
	MaxVolumes   int64             `json:"max_volumes,omitempty"`
	Topology     map[string]string `json:"topology,omitempty"`
	Capabilities []string          `json:"capabilities,omitempty"`
	Endpoint     string            `json:"endpoint"`
}

// PluginTask is a task that runs a plugin, registered or not.
type PluginTask struct {
	Alloc   string                   `json:"alloc"`
	Task    string                   `json:"task"`
	Job     string                   `json:"job"`
	Type    string                   `json:"type"`
	Phase   string                   `json:"phase"`
	Attempt uint64                   `json:"attempt"`
	Restart *registry.RestartRequest `json:"restart,omitempty"` // requested, not done yet
}

// Volume is a volume with its holders and waits.
type Volume struct {
	registry.Volume
	Attached string           `json:"attach"`
	Staged   string           `json:"stage"`
	StagedAt string           `json:"staged_at,omitempty"`
	Holders  []Holder         `json:"holders"`
	Waiting  []Wait           `json:"waiting,omitempty"` // of allocs, of its creation, or of its deletion
	Intent   *registry.Intent `json:"intent,omitempty"`
	Growth   *Trouble         `json:"growth,omitempty"`   // a pending or uncertain expansion
	Unusable *Trouble         `json:"unusable,omitempty"` // why its creation gave no usable volume

	Unhealthy []*Trouble `json:"unhealthy,omitempty"` // reports of its plugin

	// Unmeasured says why Usage is unknown. Both are empty if usage was not requested.
	Usage      []Usage `json:"usage,omitempty"`
	Unmeasured string  `json:"unmeasured,omitempty"`
}

// Usage is the usage of a volume in one unit, "bytes" or "inodes". Plugins may leave out Used and Available.
type Usage struct {
	Unit      string `json:"unit"`
	Total     int64  `json:"total"`
	Used      int64  `json:"used"`
	Available int64  `json:"available"`
}

// Holder is a claim on a volume, and its publish.
type Holder struct {
	Alloc     string    `json:"alloc"`
	Job       string    `json:"job,omitempty"`
	State     string    `json:"state,omitempty"` // of the alloc
	Request   string    `json:"request"`
	Access    string    `json:"access_mode"`
	ReadOnly  bool      `json:"read_only"`
	Published string    `json:"publish"`
	Target    string    `json:"target,omitempty"`
	Since     time.Time `json:"since,omitzero"`
	Trouble   *Trouble  `json:"trouble,omitempty"`
}

// Consultation asks for an inspection, or for the repair plan with the digest. An empty digest means the present plan.
type Consultation struct {
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
}

// Problem is an error as an answer.
type Problem struct {
	Error string `json:"error"`
	Kind  string `json:"kind,omitempty"` // one of package registry's kinds, by its text
}

// Told is a line of the event stream: an event or, as the last line, why the stream ended early.
type Told struct {
	host.Event
	Problem *Problem `json:"problem,omitempty"`
}
