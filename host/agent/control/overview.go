package control

import (
	"context"
	"fmt"

	"holdfast/host"
	"holdfast/host/agent"
)

// Overview is the state of an agent, for people.
type Overview struct {
	Self    Self
	Shim    Shim
	Plugins []Plugin
	Volumes []Volume // with notices about their waits
	Jobs    []Job    // with their allocs
	Swaps   []host.SwapReport
	// Missing says why Plugins, Volumes, and what allocs wait for may be incomplete. nil: they are complete.
	Missing error
}

// Overview describes the agent. It calls no plugin, and does not wait for a shim that does not serve.
func (s *Server) Overview(ctx context.Context) Overview {
	o := Overview{Self: s.self, Shim: Shim{ShimState: s.host.ShimState()}, Swaps: s.host.Swaps()}
	all := s.agent.Allocs()
	for _, j := range s.agent.Jobs() {
		o.Jobs = append(o.Jobs, s.jobView(j, all))
	}
	if !o.Shim.Serving {
		o.Missing = fmt.Errorf("the shim is not serving: %s", o.Shim.Reason)
		return o
	}
	if o.Shim, o.Missing = s.shim(ctx); o.Missing == nil {
		o.Plugins, o.Missing = s.listPlugins(ctx, host.PluginQuery{})
	}
	volumes := &volumeLister{Lister: s.host}
	if o.Missing == nil {
		o.Volumes, o.Missing = s.explainedVolumes(ctx, volumes, o.Plugins)
	}
	if o.Missing != nil {
		o.Missing = fmt.Errorf("no answer from the shim: %w", o.Missing)
		return o
	}
	var allocs [][]Alloc
	for _, j := range o.Jobs {
		allocs = append(allocs, j.Allocs)
	}
	s.setReasonsFrom(ctx, volumes, allocs...)
	return o
}

// explainedVolumes lists all volumes, with notices about their waits.
func (s *Server) explainedVolumes(ctx context.Context, from agent.Lister, plugins []Plugin) ([]Volume, error) {
	list, _, err := from.Volumes(ctx, host.VolumeQuery{})
	if err != nil {
		return nil, err
	}
	e, jobs := s.explainer(), s.pluginJobs()
	for i, p := range plugins {
		e.plugins[host.PluginID(p.ID)] = &plugins[i]
	}
	for i, v := range list {
		e.volumes[v.VolumeName()] = &list[i]
		if e.plugins[v.Plugin] == nil {
			e.plugins[v.Plugin] = &Plugin{ID: string(v.Plugin), Jobs: jobs[v.Plugin]}
		}
	}
	var out []Volume
	for _, v := range list {
		view := e.volumeView(v)
		view.Notices = append(e.explainWaits(ctx, v.Waiting), view.Notices...)
		out = append(out, view)
	}
	return out, nil
}
