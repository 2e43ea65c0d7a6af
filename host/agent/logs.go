package agent

import (
	"context"
	"io"
	"strings"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

// Find is the one alloc whose id begins so.
func (a *Agent) Find(prefix string) (*AllocRecord, error) {
	var found *AllocRecord
	for _, r := range a.Allocs() {
		switch {
		case string(r.ID) == prefix:
			return r, nil
		case prefix == "" || !strings.HasPrefix(string(r.ID), prefix):
		case found != nil:
			return nil, registry.Invalid("several allocs have ids that begin with %q; give more of it", prefix)
		default:
			found = r
		}
	}
	if found == nil {
		return nil, registry.Errorf(registry.ErrNotFound, "there is no alloc %q (see holdfast alloc status)", prefix)
	}
	return found, nil
}

// Logs copies what a task wrote, all kept attempts of it; if it follows, until the running attempt has ended.
func (a *Agent) Logs(ctx context.Context, id host.AllocID, task host.TaskName, s taskdriver.Stream, follow bool, to io.Writer) error {
	r := a.record(id)
	if r == nil {
		return registry.Errorf(registry.ErrNotFound, "there is no alloc %q", id)
	}
	rec, known := r.Tasks[task]
	if !known {
		return registry.Errorf(registry.ErrNotFound, "alloc %s has no task %q", short(id), task)
	}
	if r.Pruned {
		return registry.Errorf(registry.ErrNotFound,
			"the logs of alloc %s are removed: a job keeps those of the %d allocs that ended last", short(id), keptEnded)
	}
	d := a.drivers[r.task(task).Driver]
	if d == nil || rec.Attempt == 0 {
		return nil
	}
	h := taskdriver.Handle{ID: attemptID(id, task, rec.Attempt), Dir: a.dirs(id).task(task)}
	if rec.Handle != nil {
		h = *rec.Handle
	}
	return d.Logs(ctx, h, s, follow && rec.State == TaskRunning, to)
}
