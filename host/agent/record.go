package agent

import (
	"encoding/json"
	"maps"
	"slices"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent/taskdriver"
)

// Source is the text of a job and the values of its variables, as they were submitted.
type Source struct {
	Name      string            `json:"name"`
	Text      []byte            `json:"text"`
	Variables map[string]string `json:"variables,omitempty"`
	Files     []host.Source     `json:"variable_files,omitempty"`
}

// JobRecord is a job as the agent keeps it.
type JobRecord struct {
	Job       hooks.Job `json:"job"`
	Source    Source    `json:"source"`
	Version   uint64    `json:"version"` // of submissions, from 1
	Submitted time.Time `json:"submitted"`
	Stopped   bool      `json:"stopped,omitempty"`
	Fresh     uint64    `json:"fresh,omitempty"`     // the first version whose complete batch allocs are not run again
	Warnings  []string  `json:"warnings,omitempty"`  // what of it is not acted on
	TakeDown  bool      `json:"take_down,omitempty"` // stopped in order with all others that say so, then forgotten
}

// AllocState is where an alloc is in its life.
type AllocState string

const (
	AllocPending   AllocState = "pending"   // its volumes are being prepared, or its tasks are about to start
	AllocRunning   AllocState = "running"   // its tasks have been started
	AllocStopping  AllocState = "stopping"  // its tasks are being stopped
	AllocReleasing AllocState = "releasing" // its tasks have ended, its volumes are being given back
	AllocComplete  AllocState = "complete"  // all its tasks have ended well
	AllocFailed    AllocState = "failed"    // a task has failed for good, or the alloc cannot run at all
	AllocStopped   AllocState = "stopped"   // somebody asked for its end
)

// Ended says whether nothing of the alloc is left: no task, no volume.
func (s AllocState) Ended() bool {
	return s == AllocComplete || s == AllocFailed || s == AllocStopped
}

// AllocRecord is one placement of a group.
type AllocRecord struct {
	ID         host.AllocID                  `json:"id"`
	Job        string                        `json:"job"`
	JobName    string                        `json:"job_name"`
	JobType    string                        `json:"job_type"`
	JobMeta    map[string]string             `json:"job_meta,omitempty"`
	Namespace  string                        `json:"namespace"`
	TextDigest string                        `json:"text_digest"` // of the job's text
	Group      hooks.Group                   `json:"group"`
	Digest     string                        `json:"digest"` // of all that would make another alloc of it
	Version    uint64                        `json:"version"`
	Index      uint64                        `json:"index"`
	Stop       bool                          `json:"stop,omitempty"` // it is to end
	State      AllocState                    `json:"state"`
	Reason     string                        `json:"reason,omitempty"` // for people: what it waits for, or why it ended so
	Failed     string                        `json:"failed,omitempty"` // why it will end as failed
	Next       time.Time                     `json:"next,omitzero"`    // when the shim is asked for its volumes again
	Plans      map[string]hooks.Plan         `json:"plans,omitempty"`  // as prepared, by task
	Boot       string                        `json:"boot,omitempty"`   // under which they were
	Created    time.Time                     `json:"created"`
	Ended      time.Time                     `json:"ended,omitzero"`
	Tasks      map[host.TaskName]*TaskRecord `json:"tasks"`
	Notes      []Note                        `json:"notes,omitempty"`  // the newest last
	Pruned     bool                          `json:"pruned,omitempty"` // its directory is removed, and the record is its summary
	Rev        uint64                        `json:"rev"`              // counts changes of this record
}

// TaskState is where a task is in its life.
type TaskState string

const (
	TaskPending  TaskState = "pending"  // not started yet
	TaskStarting TaskState = "starting" // an attempt is about to run, or runs and is not noted yet
	TaskRunning  TaskState = "running"
	TaskWaiting  TaskState = "waiting" // for its next attempt
	TaskDead     TaskState = "dead"    // it will not be started again
)

// TaskRecord is one task of an alloc.
type TaskRecord struct {
	State   TaskState          `json:"state"`
	Attempt uint64             `json:"attempt"` // the last one that was begun; 0: none
	Failed  bool               `json:"failed,omitempty"`
	Handle  *taskdriver.Handle `json:"handle,omitempty"` // of the last attempt that ran
	Started host.BootTime      `json:"started,omitzero"`
	Since   time.Time          `json:"since,omitzero"` // when State became so
	Exit    *taskdriver.Exit   `json:"exit,omitempty"` // of the last attempt that ended
	Tally   Tally              `json:"tally"`
	Next    time.Time          `json:"next,omitzero"`    // when the next attempt is due
	Reason  string             `json:"reason,omitempty"` // for people
}

// Note is something that happened to an alloc, for people.
type Note struct {
	At    time.Time     `json:"at"`
	Job   string        `json:"job"`
	Alloc host.AllocID  `json:"alloc"`
	Place string        `json:"place,omitempty"` // tells the allocs of a group that is placed several times apart: [1]
	Task  host.TaskName `json:"task,omitempty"`
	Text  string        `json:"text"`
}

// maxNotes bounds the notes kept of an alloc.
const maxNotes = 20

// clone shares nothing that is ever changed in place.
func (r *AllocRecord) clone() *AllocRecord {
	out := *r
	out.Notes = slices.Clone(r.Notes)
	out.Plans = maps.Clone(r.Plans)
	out.Tasks = make(map[host.TaskName]*TaskRecord, len(r.Tasks))
	for name, t := range r.Tasks {
		task := *t
		out.Tasks[name] = &task
	}
	return &out
}

// summary is what has to be kept of an ended alloc for as long as its slot is wanted: how it ended, and not how it was run.
func (r *AllocRecord) summary() *AllocRecord {
	out := *r
	out.Notes, out.Plans, out.JobMeta, out.Pruned = nil, nil, nil, true
	out.Group = hooks.Group{Name: r.Group.Name, Count: r.Group.Count}
	for _, t := range r.Group.Tasks {
		out.Group.Tasks = append(out.Group.Tasks, hooks.Task{Name: t.Name, Driver: t.Driver, Plugin: t.Plugin, Sealed: t.Sealed})
	}
	out.Tasks = make(map[host.TaskName]*TaskRecord, len(r.Tasks))
	for name, t := range r.Tasks {
		out.Tasks[name] = &TaskRecord{
			State: t.State, Attempt: t.Attempt, Failed: t.Failed, Since: t.Since, Exit: t.Exit, Tally: t.Tally, Reason: t.Reason,
		}
	}
	return &out
}

// slot is the alloc's place in its job.
func (r *AllocRecord) slot() slot { return slot{r.Group.Name, r.Index} }

// UsesVolumes says whether the alloc has volumes to be prepared and released.
func (r *AllocRecord) UsesVolumes() bool { return len(r.Group.Sealed) > 0 }

// Plugins are the ids of the plugins that the alloc's tasks run.
func (r *AllocRecord) Plugins() []host.PluginID { return pluginsOf(r.Group) }

func pluginsOf(g hooks.Group) (ids []host.PluginID) {
	for _, t := range g.Tasks {
		if len(t.Sealed) > 0 {
			ids = append(ids, t.Plugin)
		}
	}
	return ids
}

// rank orders what is taken down: lower goes first. Whoever runs no plugin may use what plugins serve; a plugin that uses volumes itself
// uses those of another one.
func (r *AllocRecord) rank() int {
	switch {
	case len(r.Plugins()) == 0:
		return 0
	case r.UsesVolumes():
		return 1
	}
	return lastRank
}

const lastRank = 2

// batch says whether the alloc's tasks are meant to end by themselves.
func (r *AllocRecord) batch() bool { return isBatch(r.JobType) }

func isBatch(jobType string) bool { return jobType == "batch" || jobType == "sysbatch" }

func (r *AllocRecord) task(name host.TaskName) hooks.Task {
	i := slices.IndexFunc(r.Group.Tasks, func(t hooks.Task) bool { return t.Name == name })
	return r.Group.Tasks[i]
}

// allocGroup is the alloc as the shim is told it.
func (r *AllocRecord) allocGroup(isolated func(driver string) bool) host.AllocGroup {
	g := host.AllocGroup{
		Alloc: r.ID, Job: r.Job, Group: r.Group.Name, Namespace: namespaceOf(r.Namespace), Index: r.Index, Sealed: r.Group.Sealed,
		Isolated: map[string]bool{},
	}
	for _, t := range r.Group.Tasks {
		g.Isolated[string(t.Name)] = isolated(t.Driver)
	}
	return g
}

func (r *AllocRecord) allocTask(t hooks.Task, attempt uint64, isolated bool) host.AllocTask {
	return host.AllocTask{
		Alloc: r.ID, Task: t.Name, Job: r.Job, Digest: r.TextDigest, Attempt: attempt, Isolated: isolated, Sealed: t.Sealed,
	}
}

func encode(v any) ([]byte, error) { return json.Marshal(v) }
