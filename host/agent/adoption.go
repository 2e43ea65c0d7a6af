package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// Workload returns the tasks and allocs of an earlier agent, for host.Config. First it refuses or recovers, as
// configured, allocs that the ledger does not know, and allocs whose volumes the shim does not know. A task that
// has ended since is listed as not running; Run reports its exit later.
func (a *Agent) Workload(ctx context.Context) (host.Workload, error) {
	var out host.Workload
	if err := a.recoverLost(ctx); err != nil {
		return out, err
	}
	if err := a.recoverLostVolumes(ctx); err != nil {
		return out, err
	}
	for _, m := range a.EngineMounts() {
		out.Allocs = append(out.Allocs, m.allocGroup())
	}
	for _, r := range a.Allocs() {
		if r.State.Ended() {
			continue
		}
		if r.UsesVolumes() {
			out.Allocs = append(out.Allocs, r.allocGroup(a.isolated))
		}
		for _, t := range r.Group.Tasks {
			rec := r.Tasks[t.Name]
			if len(t.Sealed) == 0 || rec.State == TaskDead || rec.Attempt == 0 {
				continue
			}
			running, err := a.isRunning(ctx, r, t.Name)
			if err != nil {
				return out, err
			}
			task := host.WorkloadTask{AllocTask: r.allocTask(t, rec.Attempt, a.isolated(t.Driver)), Running: running}
			if running {
				task.Started = rec.Started
			}
			out.Tasks = append(out.Tasks, task)
		}
	}
	return out, nil
}

// isRunning reports whether the task's last attempt is alive. It returns false if this agent has no driver for the
// task.
func (a *Agent) isRunning(ctx context.Context, r *AllocRecord, name host.TaskName) (bool, error) {
	d, rec := a.drivers[r.task(name).Driver], r.Tasks[name]
	if d == nil {
		return false, nil
	}
	h := rec.Handle
	var err error
	switch rec.State {
	case TaskRunning:
	case TaskStarting:
		h, err = a.findStarted(ctx, r.ID, name, rec.Attempt)
	default:
		return false, nil
	}
	running := false
	if err == nil && h != nil {
		running, err = d.Adopt(ctx, *h)
	}
	if err != nil {
		return false, fmt.Errorf("task %q of alloc %s: %w", name, r.ID, err)
	}
	return running, nil
}

// findStarted returns the handle of an attempt that an earlier agent has started, but not recorded as running. It is
// nil if the attempt was not started, or a power cut has removed its traces.
func (a *Agent) findStarted(
	ctx context.Context, id host.AllocID, task host.TaskName, attempt uint64,
) (*taskdriver.Handle, error) {
	h, found, err := a.config.Find(ctx, a.dirs(id).task(task))
	if err != nil || !found || h.ID != attemptID(id, task, attempt) {
		return nil, err
	}
	return &h, nil
}

// allocCopy is the content of alloc.json in an alloc's directory: a copy of its record and job, for an agent that lost
// its ledger.
type allocCopy struct {
	Saved time.Time    `json:"saved"`
	Node  Node         `json:"node"`
	Alloc *AllocRecord `json:"alloc"`
	Job   *JobRecord   `json:"job,omitempty"` // nil: purged
}

// saveCopy saves the copy of a record. The copy is not synced to disk: only running tasks need it, and they do not
// survive a crash of the kernel either. The caller holds a.writing.
func (a *Agent) saveCopy(r *AllocRecord) error { return a.saveCopyOf(r, a.jobs[r.Job]) }

// saveCurrent saves the copy of an alloc's current record.
func (a *Agent) saveCurrent(id host.AllocID) error {
	a.writing.Lock()
	defer a.writing.Unlock()
	return a.saveCopy(a.allocs[id].record)
}

// saveSummary saves the copy of a summary, without the job, in a new directory. The copy tells an agent that lost its
// ledger that the slot is filled.
func (a *Agent) saveSummary(r *AllocRecord) error {
	if err := os.MkdirAll(a.dirs(r.ID).root, 0o700); err != nil {
		return err
	}
	return a.saveCopyOf(r, nil)
}

func (a *Agent) saveCopyOf(r *AllocRecord, job *JobRecord) error {
	return writeCopy(a.dirs(r.ID).copy(), allocCopy{Saved: time.Now().UTC(), Node: a.node, Alloc: r, Job: job})
}

// writeCopy replaces a file as a whole.
func writeCopy(path string, record any) error {
	text, err := json.Marshal(record)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// logCopyError logs an error of writing a copy. The caller continues, because the ledger has the record. It is
// not logged that an alloc has no directory yet, or none any more.
func (a *Agent) logCopyError(id host.AllocID, err error) {
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		a.log.Warn("cannot write a copy of an alloc's record", "alloc", id, "error", err)
	}
}

// readCopy reads and checks the copy of an alloc's record.
func readCopy(path string, id host.AllocID) (*allocCopy, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	c := &allocCopy{}
	if err := json.Unmarshal(text, c); err != nil {
		return nil, registry.Errorf(registry.ErrDamaged, "%s: %w", path, err)
	}
	if c.Alloc == nil || c.Alloc.ID != id || len(c.Alloc.Tasks) != len(c.Alloc.Group.Tasks) {
		return nil, registry.Errorf(registry.ErrDamaged, "%s is not the record of alloc %s", path, id)
	}
	for _, t := range c.Alloc.Group.Tasks {
		if c.Alloc.Tasks[t.Name] == nil {
			return nil, registry.Errorf(registry.ErrDamaged, "%s has no record of task %q", path, t.Name)
		}
	}
	return c, nil
}
