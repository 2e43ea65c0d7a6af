package control

import (
	"cmp"
	"slices"

	"holdfast/host/agent"
)

func (s *Server) jobView(j *agent.JobRecord, all []*agent.AllocRecord) Job {
	out := Job{
		ID: j.Job.ID, Namespace: string(j.Job.Namespace), Type: j.Job.Type, Version: j.Version, Stopped: j.Stopped,
		Submitted: j.Submitted, Warnings: j.Warnings, Status: jobStatus(j, all),
	}
	out.Roll = s.rollView(j)
	if out.Status == agent.AllocPending {
		out.Waits = cmp.Or(s.agent.DescribeDrain(), s.agent.Shortage(), s.agent.DescribePaused(j.Job.ID))
	}
	counts := map[string]map[agent.AllocState]int{}
	_, fills := j.Slots()
	for _, g := range j.Job.Groups {
		v := Group{Name: g.Name, Count: g.Count, Volumes: g.Volumes, Allocs: map[agent.AllocState]int{}}
		for _, t := range g.Tasks {
			if t.Plugin != "" {
				v.Plugins = append(v.Plugins, t.Plugin)
			}
		}
		counts[g.Name] = v.Allocs
		out.Groups = append(out.Groups, v)
	}
	for _, r := range all {
		if r.Job != j.Job.ID {
			continue
		}
		v := allocView(r)
		v.Replaced = !fills(r)
		if v.Reason != "" && !v.Replaced {
			out.Reason = v.Reason
		}
		out.Allocs = append(out.Allocs, v)
		if counts[r.Group.Name] != nil {
			counts[r.Group.Name][r.State]++
		}
	}
	return out
}

// allocView describes an alloc without its plans and its tasks' configuration, which may hold secrets.
func allocView(r *agent.AllocRecord) Alloc {
	out := Alloc{
		ID: string(r.ID), Job: r.Job, Group: r.Group.Name, Index: r.Index, Version: r.Version,
		Namespace: string(r.Namespace), State: r.State, Reason: r.Why(), Next: r.Next, Created: r.Created,
		Ended: r.Ended, Notes: r.Notes,
	}
	for _, t := range r.Group.Tasks {
		rec := r.Tasks[t.Name]
		v := Task{
			Name: t.Name, Driver: t.Driver, Plugin: t.Plugin, State: rec.State, Failed: rec.Failed,
			Attempt: rec.Attempt, Restarts: rec.Restarts.Total, Since: rec.Since, Reason: rec.Reason,
		}
		if rec.Handle != nil {
			v.Notes = rec.Handle.Warnings
			if rec.State == agent.TaskRunning {
				v.PID = rec.Handle.TaskPID
			}
		}
		if rec.Exit != nil {
			v.ExitCode, v.Signal = &rec.Exit.Code, rec.Exit.Signal
		}
		out.Tasks = append(out.Tasks, v)
	}
	return out
}

// jobStatus returns the most significant state of the job's allocs: live states first, then failed, then the rest. It
// leaves out ended allocs of earlier versions that fill no slot. A job that lacks allocs and has no live one is
// pending. A stopped job without allocs is stopped.
func jobStatus(j *agent.JobRecord, all []*agent.AllocRecord) agent.AllocState {
	order := []agent.AllocState{
		agent.AllocStopped, agent.AllocComplete, agent.AllocFailed, agent.AllocReleasing, agent.AllocStopping,
		agent.AllocPending, agent.AllocRunning,
	}
	wanted, fills := j.Slots()
	most, have := -1, 0
	for _, r := range all {
		if r.Job != j.Job.ID {
			continue
		}
		filled := fills(r)
		if filled {
			have++
		}
		if filled || r.Version == j.Version || !r.State.Ended() {
			most = max(most, slices.Index(order, r.State))
		}
	}
	switch {
	case most >= 0 && (have >= wanted || !order[most].Ended()):
		return order[most]
	case j.Stopped:
		return agent.AllocStopped
	}
	return agent.AllocPending
}
