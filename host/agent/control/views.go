package control

import (
	"cmp"
	"slices"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/registry"
)

func (s *Server) jobView(j *agent.JobRecord, all []*agent.AllocRecord) Job {
	out := Job{
		ID: j.Job.ID, Namespace: string(j.Job.Namespace), Type: j.Job.Type, Version: j.Version, Stopped: j.Stopped,
		Submitted: j.Submitted,
		Warnings:  j.Warnings, Status: jobStatus(j, all),
	}
	if out.Status == string(agent.AllocPending) {
		out.Waits = s.agent.Shortage()
	}
	states := map[string]map[string]int{}
	_, stands := j.Slots()
	for _, r := range all {
		if r.Job != j.Job.ID {
			continue
		}
		v := allocView(r)
		v.Replaced = !stands(r)
		out.Allocs = append(out.Allocs, v)
		if states[r.Group.Name] == nil {
			states[r.Group.Name] = map[string]int{}
		}
		states[r.Group.Name][string(r.State)]++
	}
	for _, g := range j.Job.Groups {
		v := Group{Name: g.Name, Count: g.Count, Volumes: g.Volumes, Allocs: states[g.Name]}
		for _, t := range g.Tasks {
			if t.Plugin != "" {
				v.Plugins = append(v.Plugins, string(t.Plugin))
			}
		}
		out.Groups = append(out.Groups, v)
	}
	return out
}

func allocView(r *agent.AllocRecord) Alloc {
	out := Alloc{
		ID: string(r.ID), Job: r.Job, Group: r.Group.Name, Index: r.Index, Version: r.Version, Namespace: r.Namespace,
		State:  string(r.State),
		Reason: r.Reason, Next: r.Next, Created: r.Created, Ended: r.Ended, Notes: r.Notes,
	}
	for _, t := range r.Group.Tasks {
		rec := r.Tasks[t.Name]
		v := Task{
			Name: string(t.Name), Driver: t.Driver, Plugin: string(t.Plugin), State: string(rec.State),
			Failed: rec.Failed, Attempt: rec.Attempt,
			Restarts: rec.Restarts.Total, Since: rec.Since, Reason: rec.Reason,
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

func useView(u registry.Use) Use {
	return Use{
		Request: string(u.Request), Volume: string(u.Name.ID), Namespace: string(u.Name.Namespace),
		Plugin:   string(u.Volume.Plugin),
		External: string(u.Volume.External), Access: string(u.Usage.Access), Attached: string(u.Attach),
		Staged:    string(u.Stage),
		Published: string(u.Publish), Target: u.Target.Host, Intent: u.Intent,
	}
}

func volumeView(v host.VolumeStatus, e *explainer) Volume {
	out := Volume{
		Volume: v.Volume, Attached: attached(v), Staged: string(v.Staging.State), StagedAt: v.Staging.Path.Host,
		Holders: []Holder{}, Intent: v.Intent, Growth: growth(v.VolumeName(), v.Expansion),
		Unhealthy: unhealthy(v.VolumeName(), v.Plugin, v.Health), Unusable: unusable(v),
	}
	for _, h := range v.Holders {
		out.Holders = append(out.Holders, e.holder(h))
	}
	slices.SortStableFunc(out.Holders, earlier)
	return out
}

// pluginViews joins instances, tasks and fingerprints by plugin, sorted by ID.
func pluginViews(list host.PluginList, prints []host.PluginFingerprint) []Plugin {
	found := map[host.PluginID]*Plugin{}
	at := func(id host.PluginID) *Plugin {
		if found[id] == nil {
			found[id] = &Plugin{ID: string(id), Roles: []Role{}, Instances: []Instance{}, Tasks: []PluginTask{}}
		}
		return found[id]
	}
	for _, f := range prints {
		p := at(f.Plugin)
		p.Roles = append(p.Roles, Role{Role: string(f.Role), Healthy: f.Healthy, Expected: f.Expected})
	}
	for _, i := range list.Instances {
		p := at(i.Plugin)
		p.Instances = append(p.Instances, instanceView(i, list.Active[i.InstanceKey]))
		if p.Provider == "" || list.Active[i.InstanceKey] {
			p.Provider, p.Version = i.Fingerprint.Provider, i.Fingerprint.Version
		}
	}
	for _, t := range list.Tasks {
		p := at(t.Plugin)
		p.Tasks = append(p.Tasks, PluginTask{
			Alloc: string(t.Alloc), Task: string(t.Task), Job: t.Job, Type: t.Type, Phase: string(t.Phase),
			Attempt: t.Attempt, Restart: t.Restart,
		})
	}
	out := []Plugin{}
	for _, p := range found {
		slices.SortFunc(p.Roles, func(x, y Role) int { return cmp.Compare(x.Role, y.Role) })
		out = append(out, *p)
	}
	slices.SortFunc(out, func(x, y Plugin) int { return cmp.Compare(x.ID, y.ID) })
	return out
}

func instanceView(i host.Instance, active bool) Instance {
	out := Instance{
		Role: string(i.Role), Alloc: string(i.Alloc), Task: string(i.Task), Attempt: i.Attempt, Active: active,
		Health: string(i.Health.State),
		Cause:  string(i.Health.Cause), Detail: i.Health.Detail, Since: i.Health.Since,
		NodeID:     string(i.Fingerprint.NodeID),
		MaxVolumes: i.Fingerprint.MaxVolumes, Topology: i.Fingerprint.Topology, Endpoint: i.Endpoint.Host,
	}
	for _, c := range i.Fingerprint.Capabilities {
		out.Capabilities = append(out.Capabilities, string(c))
	}
	return out
}

// jobStatus returns the most significant state of the allocs: live states first, then failed, then the rest. A job
// that lacks allocs is pending.
func jobStatus(j *agent.JobRecord, all []*agent.AllocRecord) string {
	order := []agent.AllocState{
		agent.AllocStopped, agent.AllocComplete, agent.AllocFailed, agent.AllocReleasing, agent.AllocStopping,
		agent.AllocPending, agent.AllocRunning,
	}
	wanted, stands := j.Slots()
	most, have := -1, 0
	for _, r := range all {
		if r.Job != j.Job.ID {
			continue
		}
		stood := stands(r)
		if stood {
			have++
		}
		if stood || r.Version == j.Version || !r.State.Ended() {
			most = max(most, slices.Index(order, r.State))
		}
	}
	switch {
	case most >= 0 && (have >= wanted || !order[most].Ended()):
		return string(order[most])
	case j.Stopped:
		return string(agent.AllocStopped)
	}
	return string(agent.AllocPending)
}

// attached is how far the volume is attached to a node.
func attached(v registry.VolumeStatus) string {
	if len(v.Attachments) == 0 {
		return ""
	}
	return string(v.Attachments[0].State)
}
