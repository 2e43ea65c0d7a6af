package control

import (
	"context"
	"slices"
	"time"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/registry"
)

// Wait is what a request of an alloc, or a creation or deletion of a volume, waits for, with an explanation.
type Wait struct {
	registry.Wait
	Job     string           `json:"job,omitempty"`     // of the alloc
	Leaving bool             `json:"leaving,omitempty"` // the alloc releases its volumes
	Holders []Holder         `json:"holders,omitempty"` // of the volume, other than the alloc
	Others  []Other          `json:"others,omitempty"`  // that wait for the volume or for its release
	Open    *registry.Intent `json:"open,omitempty"`    // the running call of the volume, with StepTurn
	Plugin  *Plugin          `json:"plugin,omitempty"`  // of the volume
	Mounted string           `json:"mounted,omitempty"` // left mounted although the plugin answered NOT_FOUND or OK
	Help    Help             `json:"help"`
}

// Other is a wait of another alloc.
type Other struct {
	registry.Wait
	Job string `json:"job,omitempty"`
}

// Runner is a job that runs a plugin.
type Runner struct {
	Job    string `json:"job"`
	Status string `json:"status"`
	Alloc  string `json:"alloc,omitempty"`  // the newest
	Task   string `json:"task,omitempty"`   // that runs the plugin
	Type   string `json:"type,omitempty"`   // of the plugin: its roles
	Reason string `json:"reason,omitempty"` // of the newest alloc
	File   string `json:"file,omitempty"`   // that it was submitted from
}

// Trouble is a condition of a mount, a volume or an expansion, with an explanation.
type Trouble struct {
	Found string    `json:"found"`
	Since time.Time `json:"since,omitzero"`
	Help  Help      `json:"help"`
}

// waits sets what the alloc waits for. The shim's answer is newer than the agent's record.
func (a *Alloc) waits(text string) {
	if a.Waits = text; text != "" && a.Ended.IsZero() {
		a.Reason = a.Waits
	}
}

// reasons sets what the allocs wait for. Without an answer from the shim the agent's records stay.
func (s *Server) reasons(ctx context.Context, allocs []Alloc) {
	if !slices.ContainsFunc(allocs, func(a Alloc) bool {
		return a.State == string(agent.AllocPending) || a.State == string(agent.AllocReleasing)
	}) {
		return
	}
	list, _, err := s.host.Allocs(ctx, "")
	if err != nil {
		return
	}
	waiting := map[string][]registry.Wait{}
	for _, st := range list {
		waiting[string(st.ID)] = st.Waiting
	}
	for i := range allocs {
		allocs[i].waits(s.agent.DescribeWaits(ctx, s.host, waiting[allocs[i].ID]))
	}
}

// explainer explains waits for one request. It caches lookups.
type explainer struct {
	s       *Server
	allocs  map[string]*agent.AllocRecord
	volumes map[host.VolumeName]*host.VolumeStatus
	plugins map[host.PluginID]*Plugin
}

func (s *Server) explainer() *explainer {
	e := &explainer{s, map[string]*agent.AllocRecord{}, map[host.VolumeName]*host.VolumeStatus{},
		map[host.PluginID]*Plugin{}}
	for _, rec := range s.agent.Allocs() {
		e.allocs[string(rec.ID)] = rec
	}
	return e
}

// waits explains waits. Lookups that fail are left out.
func (e *explainer) waits(ctx context.Context, list []registry.Wait) (out []Wait) {
	for _, w := range list {
		out = append(out, e.wait(ctx, w))
	}
	return out
}

func (e *explainer) wait(ctx context.Context, w registry.Wait) Wait {
	out := Wait{Wait: w}
	if rec := e.allocs[string(w.Alloc)]; rec != nil {
		out.Job, out.Leaving = rec.Job, rec.State != agent.AllocPending && rec.State != agent.AllocRunning
		if out.Next.IsZero() && !out.Leaving {
			out.Next = rec.Next
		}
	}
	if v := e.volume(ctx, w.Volume); v != nil {
		out.Plugin = e.plugin(ctx, v.Plugin)
		for _, h := range v.Holders {
			if h.Claim.Alloc != w.Alloc {
				out.Holders = append(out.Holders, e.holder(h))
			}
		}
		for _, other := range v.Waiting {
			if other.Alloc != w.Alloc {
				o := Other{Wait: other}
				if rec := e.allocs[string(other.Alloc)]; rec != nil {
					o.Job = rec.Job
				}
				out.Others = append(out.Others, o)
			}
		}
		slices.SortStableFunc(out.Holders, earlier)
		out.Mounted = leftMounted(w, v)
		if w.Step == registry.StepTurn {
			out.Open = v.Intent
		}
	}
	out.Help = help(out)
	return out
}

// leftMounted returns the mount that a call left although its answer was NOT_FOUND or OK; else empty.
func leftMounted(w registry.Wait, v *host.VolumeStatus) string {
	if w.Code != "NOT_FOUND" && w.Code != "OK" {
		return ""
	}
	switch w.RPC {
	case registry.NodeUnstageRPC:
		return v.Staging.Path.Host
	case registry.NodeUnpublishRPC:
		for _, h := range v.Holders {
			if h.Claim.Alloc == w.Alloc && h.Claim.Request == w.Request {
				return h.Target.Host
			}
		}
	}
	return ""
}

func (e *explainer) volume(ctx context.Context, name host.VolumeName) *host.VolumeStatus {
	if v, known := e.volumes[name]; known {
		return v
	}
	e.volumes[name] = nil
	if name.ID == "" {
		return nil
	}
	list, _, err := e.s.host.Volumes(ctx, host.VolumeQuery{Name: name})
	for i := range list {
		if err == nil && list[i].VolumeName() == name {
			e.volumes[name] = &list[i]
		}
	}
	return e.volumes[name]
}

// plugin returns a plugin with the jobs that run it.
func (e *explainer) plugin(ctx context.Context, id host.PluginID) *Plugin {
	if p, known := e.plugins[id]; known {
		return p
	}
	p := &Plugin{ID: string(id), Roles: []Role{}, Instances: []Instance{}, Tasks: []PluginTask{}}
	if list, err := e.s.plugins(ctx, host.PluginQuery{Plugin: id}); err == nil {
		for i := range list {
			if list[i].ID == p.ID {
				p = &list[i]
			}
		}
	}
	p.Jobs = e.s.runners(id)
	e.plugins[id] = p
	return p
}

// runners returns the jobs that run the plugin.
func (s *Server) runners(id host.PluginID) (out []Runner) {
	all := s.agent.Allocs()
	for _, j := range s.agent.Jobs() {
		for _, g := range j.Job.Groups {
			for _, t := range g.Tasks {
				if t.Plugin != id {
					continue
				}
				r := Runner{Job: j.Job.ID, Status: jobStatus(j, all), Task: string(t.Name),
					Type: string(t.PluginType), File: j.Source.Name}
				for _, rec := range all { // the newest last
					if rec.Job == r.Job && rec.Group.Name == g.Name {
						r.Alloc, r.Reason = string(rec.ID), rec.Reason
					}
				}
				out = append(out, r)
			}
		}
	}
	return out
}

// earlier orders holders by the time of their claims.
func earlier(x, y Holder) int { return x.Since.Compare(y.Since) }

// holder describes a claim with its alloc.
func (e *explainer) holder(h registry.Holder) Holder {
	out := Holder{
		Alloc: string(h.Claim.Alloc), Request: string(h.Claim.Request), Access: string(h.Claim.Usage.Access),
		ReadOnly:  h.Claim.Usage.ReadOnly,
		Published: string(h.Publish), Target: h.Target.Host, Since: h.Claim.Since,
	}
	if rec := e.allocs[out.Alloc]; rec != nil {
		out.Job, out.State = rec.Job, string(rec.State)
	}
	out.Trouble = e.trouble(h.Trouble, h.Troubled, h.Claim.Name, h.Claim.Volume.Plugin, h.Claim.Alloc)
	return out
}

// trouble explains a mount that does not work; nil if none is known.
func (e *explainer) trouble(found string, since time.Time, name host.VolumeName, plugin host.PluginID,
	alloc host.AllocID) *Trouble {
	if found == "" {
		return nil
	}
	job, file := "", ""
	if rec := e.allocs[string(alloc)]; rec != nil {
		job = rec.Job
	}
	for _, j := range e.s.agent.Jobs() {
		if j.Job.ID == job {
			file = j.Source.Name
		}
	}
	return &Trouble{Found: found, Since: since, Help: mountHelp(name, plugin, job, file)}
}
