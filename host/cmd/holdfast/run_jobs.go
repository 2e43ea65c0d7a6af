package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"holdfast/hooks"
	"holdfast/host/agent"
	"holdfast/host/agent/taskdriver"
)

// usersAreBatch reports whether the files have groups that run no plugin, all of them in batch jobs.
func (o *foreground) usersAreBatch() bool {
	users := 0
	for _, p := range o.jobs {
		n := countUsers(p.job)
		if n > 0 && !strings.HasSuffix(p.job.Type, "batch") {
			return false
		}
		users += n
	}
	return users > 0
}

// countUsers counts the allocs of the job's groups that run no plugin.
func countUsers(job *hooks.Job) (n int) {
	for _, g := range job.Groups {
		if !slices.ContainsFunc(g.Tasks, func(t hooks.Task) bool { return len(t.Sealed) > 0 }) {
			n += g.Count
		}
	}
	return n
}

// usersEnded reports whether the allocs of all groups that run no plugin have ended for good. An alloc that another one
// will replace does not count.
func usersEnded(jobs []*agent.JobRecord, all []*agent.AllocRecord) bool {
	for _, j := range jobs {
		_, fills := j.Slots()
		ended := 0
		for _, r := range all {
			if len(r.Plugins()) == 0 && r.State.Ended() && fills(r) {
				ended++
			}
		}
		if j.Next != nil || !j.Stopped && ended < countUsers(&j.Job) {
			return false
		}
	}
	return true
}

// ownJobs returns the jobs of the command's files. The agent has others if somebody submits them at its socket.
func (o *foreground) ownJobs() []*agent.JobRecord {
	return slices.DeleteFunc(o.agent.Jobs(), func(j *agent.JobRecord) bool {
		return !slices.ContainsFunc(o.jobs, func(p parsedJob) bool { return p.job.ID == j.Job.ID })
	})
}

// currentAllocs selects the allocs of the command's jobs. It leaves out ended allocs of earlier versions of a job,
// unless they still fill a slot of the job.
func (o *foreground) currentAllocs(all []*agent.AllocRecord) (current []*agent.AllocRecord) {
	for _, j := range o.ownJobs() {
		_, fills := j.Slots()
		for _, r := range all {
			if r.Job == j.Job.ID && (!r.State.Ended() || r.Version >= j.Version || fills(r)) {
				current = append(current, r)
			}
		}
	}
	return current
}

// pluginFailed reports whether a plugin has failed for good.
func (o *foreground) pluginFailed(all []*agent.AllocRecord) bool {
	return slices.ContainsFunc(o.currentAllocs(all),
		func(r *agent.AllocRecord) bool { return len(r.Plugins()) > 0 && r.State == agent.AllocFailed })
}

// failures prints the last output of each failed alloc, and returns the reasons.
func (o *foreground) failures(ctx context.Context) error {
	var errs []error
	for _, r := range o.currentAllocs(o.agent.Allocs()) {
		if r.State == agent.AllocFailed {
			o.printTails(ctx, r)
			errs = append(errs, fmt.Errorf("job %q, group %q: %s", r.Job, r.Group.Name, r.Reason))
		}
	}
	return errors.Join(errs...)
}

// tailLines is the number of lines that are printed of each stream of a failed task.
const tailLines = 20

// printTails prints the last output of the failed tasks of an alloc.
func (o *foreground) printTails(ctx context.Context, r *agent.AllocRecord) {
	for _, t := range r.Group.Tasks {
		if !r.Tasks[t.Name].Failed {
			continue
		}
		for _, stream := range []taskdriver.Stream{taskdriver.Stdout, taskdriver.Stderr} {
			var text strings.Builder
			err := o.agent.Logs(ctx, r.ID, t.Name, agent.LogOptions{Stream: stream, Tail: tailLines}, &text)
			if err != nil {
				o.lines.print("task %s of %s: cannot read its %s: %v", t.Name, r.Job, stream, err)
			}
			for line := range strings.Lines(text.String()) {
				o.lines.print("task %s of %s, %s | %s", t.Name, r.Job, stream, strings.TrimSuffix(line, "\n"))
			}
		}
	}
}
