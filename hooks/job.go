package hooks

import (
	"encoding/json"

	"holdfast/registry"
)

// Sealed is Holdfast's part of a job, encoded by the shim that parsed it. A host stores and returns it unread, so a new
// stanza field needs no new host.
type Sealed []byte

// Job is a parsed job, as an orchestrator needs it to run the job. Rest holds, as a JSON object, what Holdfast does not
// read. In it, blocks are lists of objects under their type, with their labels under "labels". References that are
// known at run time only (${NOMAD_ALLOC_ID}, ${node.unique.id}, ${CSI_ENDPOINT}) stay verbatim; Expand resolves them.
type Job struct {
	ID        string             `json:"id"`
	Namespace registry.Namespace `json:"namespace"`
	Type      string             `json:"type"` // "service", "batch", "system", "sysbatch"
	Groups    []Group            `json:"groups"`
	Rest      json.RawMessage    `json:"rest,omitempty"`
	Digest    string             `json:"digest"` // SHA-256 of the text that it was parsed from, hex
}

// Group is a set of tasks placed together, Count times.
type Group struct {
	Name    string          `json:"name"`
	Count   int             `json:"count"`
	Tasks   []Task          `json:"tasks"`
	Volumes []string        `json:"volumes,omitempty"` // names of the volumes asked for, for people and for ordering
	Sealed  Sealed          `json:"sealed,omitempty"`  // empty: the group uses no volumes
	Rest    json.RawMessage `json:"rest,omitempty"`
}

// Task is one program of a group.
type Task struct {
	Name       registry.TaskName `json:"name"`
	Driver     string            `json:"driver"`
	Plugin     registry.PluginID `json:"plugin,omitempty"`      // the plugin that it runs, if any
	PluginType PluginType        `json:"plugin_type,omitempty"` // of that plugin
	Roll       RollMode          `json:"roll,omitempty"`        // of that plugin; empty: RollBeside
	Sealed     Sealed            `json:"sealed,omitempty"`      // empty: the task runs no plugin
	// the env block, evaluated; run-time references verbatim
	Env    map[string]string `json:"env,omitempty"`
	Config json.RawMessage   `json:"config,omitempty"` // the config block
	Rest   json.RawMessage   `json:"rest,omitempty"`   // everything else
	// Places says where the task (""), its config block ("config") and its template blocks ("template.0") begin in the
	// text. They are for errors, and are not stored.
	Places map[string]registry.Position `json:"-"`
}

// AllocTask describes a task to the shim when an alloc's volumes are prepared or a task starts.
type AllocTask struct {
	Alloc    registry.AllocID  `json:"alloc"`
	Task     registry.TaskName `json:"task"`
	Job      string            `json:"job,omitempty"`
	Digest   string            `json:"digest,omitempty"` // of the job's text
	Attempt  uint64            `json:"attempt"`          // 1 for the first start; never reused within a task
	Isolated bool              `json:"isolated"`         // the task has a file system of its own
	Sealed   Sealed            `json:"sealed"`
}

// AllocGroup describes an alloc to the shim when its volumes are prepared.
type AllocGroup struct {
	Alloc     registry.AllocID   `json:"alloc"`
	Job       string             `json:"job,omitempty"`
	Group     string             `json:"group,omitempty"`
	Namespace registry.Namespace `json:"namespace"`
	Index     uint64             `json:"index"` // of the count, from 0
	Sealed    Sealed             `json:"sealed"`
	Isolated  map[string]bool    `json:"isolated,omitempty"` // by task name: has a file system of its own
}

// Key returns the key of the task.
func (t AllocTask) Key() registry.TaskKey { return registry.TaskKey{Alloc: t.Alloc, Task: t.Task} }
