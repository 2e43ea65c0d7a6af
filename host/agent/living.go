package agent

import (
	"context"
	"fmt"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
)

// Living is what runs of an earlier agent's life, for host.Config. It refuses, or recovers, allocs that the
// ledger does not know, and those whose volumes the shim does not know. Tasks that have ended meanwhile are told as about to be started, until Run says how they ended.
func (a *Agent) Living(ctx context.Context) (host.Workload, error) {
	var out host.Workload
	if err := a.recoverLost(ctx); err != nil {
		return out, err
	}
	if err := a.recoverUnpublished(ctx); err != nil {
		return out, err
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
			running, err := a.runs(ctx, r, t.Name)
			if err != nil {
				return out, fmt.Errorf("task %q of alloc %s: %w", t.Name, r.ID, err)
			}
			living := host.WorkloadTask{AllocTask: r.allocTask(t, rec.Attempt, a.isolated(t.Driver)), Running: running}
			if running {
				living.Started = rec.Started
			}
			out.Tasks = append(out.Tasks, living)
		}
	}
	return out, nil
}

// runs says whether the task's last attempt is alive.
func (a *Agent) runs(ctx context.Context, r *AllocRecord, name host.TaskName) (bool, error) {
	t, rec := r.task(name), r.Tasks[name]
	d := a.drivers[t.Driver]
	if d == nil {
		return false, nil
	}
	var handle taskdriver.Handle
	switch rec.State {
	case TaskRunning:
		handle = *rec.Handle
	case TaskStarting:
		h, found, err := a.config.Find(ctx, a.dirs(r.ID).task(name))
		if err != nil || !found || h.ID != attemptID(r.ID, name, rec.Attempt) {
			return false, err
		}
		handle = h
	default:
		return false, nil
	}
	return d.Adopt(ctx, handle)
}
