package agent

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// Source is the submitted text of a job and the values of its variables.
type Source struct {
	Name      string            `json:"name"`
	Dir       string            `json:"dir,omitempty"` // absolute; relative paths in file() start here
	Text      []byte            `json:"text"`
	Variables map[string]string `json:"variables,omitempty"`
	Files     []host.Source     `json:"variable_files,omitempty"`
}

// JobRecord is a submitted job.
type JobRecord struct {
	Job       hooks.Job `json:"job"`
	Source    Source    `json:"source"`
	Version   uint64    `json:"version"` // counts submissions, from 1
	Submitted time.Time `json:"submitted"`
	Stopped   bool      `json:"stopped,omitempty"`
	RunOnce   uint64    `json:"run_once,omitempty"` // batch allocs that completed since this version do not run again
	Warnings  []string  `json:"warnings,omitempty"` // unsupported attributes
	Discard   bool      `json:"discard,omitempty"`  // all such jobs are stopped together, by rank, and then removed

	Next   *JobRecord        `json:"next,omitempty"`   // the version that takes over once its plugins are healthy
	Roll   *Roll             `json:"roll,omitempty"`   // the last one
	Rolled map[string]uint64 `json:"rolled,omitempty"` // by group: how often its plugins were rolled without a change

	// digests caches digests of groups, by rolledGroup. All copies of the record share the cache. nil: no cache.
	digests *sync.Map
}

// AllocState is the state of an alloc.
type AllocState string

const (
	AllocPending   AllocState = "pending"   // its volumes are being prepared, or its tasks are about to start
	AllocRunning   AllocState = "running"   // its tasks were started
	AllocStopping  AllocState = "stopping"  // its tasks are being stopped
	AllocReleasing AllocState = "releasing" // its tasks have ended; its volumes are being released
	AllocComplete  AllocState = "complete"  // all its tasks succeeded
	AllocFailed    AllocState = "failed"    // a task failed finally, or the alloc cannot run at all
	AllocStopped   AllocState = "stopped"   // stopped on request
)

// Ended reports whether the alloc has neither tasks nor volumes any more.
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
	Namespace  registry.Namespace            `json:"namespace"`
	TextDigest string                        `json:"text_digest"` // of the job text
	Group      hooks.Group                   `json:"group"`
	Digest     string                        `json:"digest"` // changes if and only if the alloc must be replaced
	Version    uint64                        `json:"version"`
	Index      uint64                        `json:"index"`
	Stop       bool                          `json:"stop,omitempty"` // the alloc must end
	State      AllocState                    `json:"state"`
	Reason     string                        `json:"reason,omitempty"` // what it waits for, or why it ended
	Failed     string                        `json:"failed,omitempty"` // why it ends as failed
	Next       time.Time                     `json:"next,omitzero"`    // next attempt to prepare or release its volumes
	Plans      map[string]hooks.Plan         `json:"plans,omitempty"`  // by task
	Boot       string                        `json:"boot,omitempty"`   // boot ID at which Plans were made
	Created    time.Time                     `json:"created"`
	Ended      time.Time                     `json:"ended,omitzero"`
	Tasks      map[host.TaskName]*TaskRecord `json:"tasks"`
	Notes      []Note                        `json:"notes,omitempty"`  // newest last
	Pruned     bool                          `json:"pruned,omitempty"` // its directory was removed
	Rev        uint64                        `json:"rev"`              // counts changes of this record
}

// TaskState is the state of a task.
type TaskState string

const (
	TaskPending  TaskState = "pending"  // not started yet
	TaskStarting TaskState = "starting" // an attempt is about to run, or runs and is not recorded yet
	TaskRunning  TaskState = "running"
	TaskWaiting  TaskState = "waiting" // for its next attempt
	TaskDead     TaskState = "dead"    // will not be started again
)

// TaskRecord is one task of an alloc.
type TaskRecord struct {
	State    TaskState          `json:"state"`
	Attempt  uint64             `json:"attempt"` // number of the last one; 0: none
	Failed   bool               `json:"failed,omitempty"`
	Handle   *taskdriver.Handle `json:"handle,omitempty"` // of the last attempt that ran
	Started  host.BootTime      `json:"started,omitzero"` // in TaskStarting only the boot
	Since    time.Time          `json:"since,omitzero"`   // start of State
	Exit     *taskdriver.Exit   `json:"exit,omitempty"`   // of the last attempt that ended
	Restarts Restarts           `json:"restarts"`
	Next     time.Time          `json:"next,omitzero"` // when the next attempt is due
	Reason   string             `json:"reason,omitempty"`
}

// Note is an event in the life of an alloc, for people.
type Note struct {
	At    time.Time     `json:"at"`
	Job   string        `json:"job"`
	Alloc host.AllocID  `json:"alloc"`
	Place string        `json:"place,omitempty"` // index in a group with count above 1, such as [1]
	Task  host.TaskName `json:"task,omitempty"`
	Text  string        `json:"text"`
	// Failed means that the alloc, or its task, has failed for good.
	Failed bool `json:"failed,omitempty"`
}

// maxNotes bounds the notes of an alloc record.
const maxNotes = 20

// clone returns a copy that can be changed.
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

// summary returns the part of an ended alloc's record that is kept while the job wants its slot: how the alloc ended,
// but not how it ran.
func (r *AllocRecord) summary() *AllocRecord {
	out := *r
	out.Notes, out.Plans, out.JobMeta, out.Pruned = nil, nil, nil, true
	out.Group = hooks.Group{Name: r.Group.Name, Count: r.Group.Count}
	for _, t := range r.Group.Tasks {
		kept := hooks.Task{Name: t.Name, Driver: t.Driver, Plugin: t.Plugin, Sealed: t.Sealed}
		out.Group.Tasks = append(out.Group.Tasks, kept)
	}
	out.Tasks = make(map[host.TaskName]*TaskRecord, len(r.Tasks))
	for name, t := range r.Tasks {
		out.Tasks[name] = &TaskRecord{
			State: t.State, Attempt: t.Attempt, Failed: t.Failed, Since: t.Since, Exit: t.Exit, Restarts: t.Restarts,
			Reason: t.Reason,
		}
	}
	return &out
}

// slot identifies one of the allocs that a job wants.
type slot struct {
	group string
	index uint64
}

func (r *AllocRecord) slot() slot { return slot{r.Group.Name, r.Index} }

// UsesVolumes reports whether the alloc has volumes to prepare and release.
func (r *AllocRecord) UsesVolumes() bool { return len(r.Group.Sealed) > 0 }

// Plugins lists the plugins that the alloc's tasks run.
func (r *AllocRecord) Plugins() []host.PluginID { return pluginsOf(r.Group) }

func pluginsOf(g hooks.Group) (ids []host.PluginID) {
	for _, t := range g.Tasks {
		if len(t.Sealed) > 0 {
			ids = append(ids, t.Plugin)
		}
	}
	return ids
}

// rank is the order in which allocs are stopped, lowest first. Allocs without a plugin come first, because they may use
// volumes. Plugins that use volumes come before the plugins that serve these.
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

// batch reports whether the alloc's tasks are expected to end.
func (r *AllocRecord) batch() bool { return isBatch(r.JobType) }

func isBatch(jobType string) bool { return jobType == "batch" || jobType == "sysbatch" }

func (r *AllocRecord) task(name host.TaskName) hooks.Task {
	i := slices.IndexFunc(r.Group.Tasks, func(t hooks.Task) bool { return t.Name == name })
	return r.Group.Tasks[i]
}

// allocGroup returns the alloc as an argument for host.Host.
func (r *AllocRecord) allocGroup(isolated func(driver string) bool) host.AllocGroup {
	g := host.AllocGroup{
		Alloc: r.ID, Job: r.Job, Group: r.Group.Name, Namespace: orDefault(r.Namespace), Index: r.Index,
		Sealed: r.Group.Sealed, Isolated: map[string]bool{},
	}
	for _, t := range r.Group.Tasks {
		g.Isolated[string(t.Name)] = isolated(t.Driver)
	}
	return g
}

func (r *AllocRecord) allocTask(t hooks.Task, attempt uint64, isolated bool) host.AllocTask {
	return host.AllocTask{
		Alloc: r.ID, Task: t.Name, Job: r.Job, Digest: r.TextDigest, Attempt: attempt, Isolated: isolated,
		Sealed: t.Sealed,
	}
}

// beginRelease records that the volumes are being released.
func (r *AllocRecord) beginRelease() {
	r.State, r.Reason, r.Next = AllocReleasing, "releasing volumes", time.Time{}
}

// beginAttempt records that the next attempt is about to run.
func (r *TaskRecord) beginAttempt() {
	boot, _ := proc.BootID() // empty: after a reboot the attempt counts as one that never ran
	r.State, r.Attempt, r.Handle, r.Next = TaskStarting, r.Attempt+1, nil, time.Time{}
	r.Started = host.BootTime{Boot: boot}
}

func (r *AllocRecord) allTasksDead() bool {
	for _, t := range r.Tasks {
		if t.State != TaskDead {
			return false
		}
	}
	return true
}

func (r *AllocRecord) taskKey(name host.TaskName) host.TaskKey {
	return host.TaskKey{Alloc: r.ID, Task: name}
}

// outcome returns the final state of an alloc whose tasks have ended, and the reason of a failure.
func (r *AllocRecord) outcome() (AllocState, string) {
	if r.Failed != "" {
		return AllocFailed, r.Failed
	}
	complete := true
	for _, t := range r.Group.Tasks {
		rec := r.Tasks[t.Name]
		if rec.Failed {
			return AllocFailed, fmt.Sprintf("task %q: %s", t.Name, rec.Reason)
		}
		complete = complete && rec.Attempt > 0 && rec.Exit != nil && succeeded(*rec.Exit)
	}
	if r.Stop && !(r.batch() && complete) {
		return AllocStopped, ""
	}
	return AllocComplete, ""
}

// succeeded reports whether an attempt has done its work. One that ended for a restart has not, whatever its exit code.
func succeeded(e taskdriver.Exit) bool { return e.Code == 0 && e.Err == "" }

// unended lists the allocs of ranks up to this one that have not ended.
func unended(all []*AllocRecord, rank int) (out []*AllocRecord) {
	for _, r := range all {
		if !r.State.Ended() && r.rank() <= rank {
			out = append(out, r)
		}
	}
	return out
}

// newAllocRecord makes the record of a new alloc for a slot.
func newAllocRecord(j *JobRecord, g hooks.Group, index uint64) *AllocRecord {
	var rest jobRest
	_ = taskdriver.Decode("job", j.Job.Rest, &rest) // checked when the job was submitted
	r := &AllocRecord{
		ID: host.AllocID(uuid.NewString()), Job: j.Job.ID, JobName: cmp.Or(rest.Name, j.Job.ID), JobType: j.Job.Type,
		JobMeta: mergeMeta(rest.Meta), Namespace: orDefault(j.Job.Namespace), TextDigest: j.Job.Digest, Group: g,
		Digest: groupDigest(j, g), Version: j.Version, Index: index, State: AllocPending, Created: time.Now().UTC(),
		Tasks: map[host.TaskName]*TaskRecord{},
	}
	for _, t := range g.Tasks {
		r.Tasks[t.Name] = &TaskRecord{State: TaskPending, Since: r.Created}
	}
	return r
}

func orDefault(n registry.Namespace) registry.Namespace { return cmp.Or(n, registry.DefaultNamespace) }

// rolledGroup names a group and the number of its rolls.
type rolledGroup struct {
	group  string
	rolled uint64
}

// groupDigest returns a digest of everything that an alloc of the group depends on. The group's count is not part of
// it.
func groupDigest(j *JobRecord, g hooks.Group) string {
	key := rolledGroup{g.Name, j.Rolled[g.Name]}
	if j.digests != nil {
		if digest, known := j.digests.Load(key); known {
			return digest.(string)
		}
	}
	digest := digestOf(j.Job.Type, j.Job.Namespace, g, key.rolled)
	if j.digests != nil {
		j.digests.Store(key, digest)
	}
	return digest
}

func digestOf(jobType string, namespace registry.Namespace, g hooks.Group, rolled uint64) string {
	g.Count = 0
	parts := []any{jobType, orDefault(namespace), g}
	if rolled > 0 {
		parts = append(parts, rolled)
	}
	text, err := json.Marshal(parts)
	if err != nil {
		panic(err) // the group was decoded from JSON
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// steadyAfter is the age from which an attempt that follows a failure counts as steady.
const steadyAfter = time.Minute

// Why returns what the alloc waits for, or why it ended. Otherwise it returns why tasks have not started, and how tasks
// have failed that are restarted. Such a failure is forgotten once the next attempt is steady.
func (r *AllocRecord) Why() string {
	if r.Reason != "" {
		return r.Reason
	}
	var texts []string
	for _, t := range r.Group.Tasks {
		rec := r.Tasks[t.Name]
		why := rec.Reason
		failed := rec.Exit != nil && rec.Restarts.Count > 0
		if rec.State == TaskRunning && failed && time.Since(rec.Since) < steadyAfter {
			why = cmp.Or(why, describeExit(*rec.Exit))
		}
		if why == "" || rec.State == TaskDead && !rec.Failed {
			continue
		}
		if rec.Attempt > 1 && (rec.State == TaskStarting || rec.State == TaskRunning) {
			why += fmt.Sprintf("; now attempt %d", rec.Attempt)
		} else if rec.Attempt > 1 {
			why += fmt.Sprintf(" (attempt %d)", rec.Attempt)
		}
		texts = append(texts, fmt.Sprintf("task %s: %s", t.Name, why))
	}
	return strings.Join(texts, "; ")
}

func describeExit(e taskdriver.Exit) string {
	switch {
	case e.Err != "":
		return e.Err
	case e.Signal != 0:
		return fmt.Sprintf("terminated by signal %d", e.Signal)
	}
	return fmt.Sprintf("exit code %d", e.Code)
}
