package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/registry"
)

// explainer makes the notices of one request, and caches its lookups.
type explainer struct {
	s       *Server
	allocs  map[host.AllocID]*agent.AllocRecord
	volumes map[host.VolumeName]*host.VolumeStatus
	plugins map[host.PluginID]*Plugin
}

func (s *Server) explainer() *explainer {
	e := &explainer{s, map[host.AllocID]*agent.AllocRecord{}, map[host.VolumeName]*host.VolumeStatus{},
		map[host.PluginID]*Plugin{}}
	for _, rec := range s.agent.Allocs() {
		e.allocs[rec.ID] = rec
	}
	return e
}

// explainWaits explains waits. Waits for a call come first, then waits for a plugin, a turn and a claim. Waits of one
// kind are sorted by their start. A failed lookup only leaves out details.
func (e *explainer) explainWaits(ctx context.Context, list []registry.Wait) (out []Notice) {
	order := []registry.Step{registry.StepPlugin, registry.StepTurn, registry.StepClaim} // other steps are calls
	for _, w := range slices.SortedStableFunc(slices.Values(list), func(x, y registry.Wait) int {
		return cmp.Or(cmp.Compare(slices.Index(order, x.Step), slices.Index(order, y.Step)), x.Since.Compare(y.Since))
	}) {
		out = append(out, e.explainWait(e.waitOf(ctx, w)))
	}
	return out
}

// waitOf looks up the facts that explain a wait.
func (e *explainer) waitOf(ctx context.Context, w registry.Wait) wait {
	out := wait{Wait: w}
	if rec := e.allocs[w.Alloc]; rec != nil {
		out.job, out.leaving = rec.Job, rec.State != agent.AllocPending && rec.State != agent.AllocRunning
		if out.Next.IsZero() && !out.leaving {
			out.Next = rec.Next
		}
	}
	v := e.volume(ctx, w.Volume)
	if v == nil {
		return out
	}
	out.plugin, out.mounted = e.plugin(ctx, v.Plugin), leftMounted(w, v)
	for _, h := range e.holders(v) {
		if h.Alloc != w.Alloc {
			out.holders = append(out.holders, h)
		}
	}
	for _, other := range v.Waiting {
		if other.Alloc != w.Alloc {
			out.others = append(out.others, other)
		}
	}
	if w.Step == registry.StepTurn {
		out.open = v.Intent
	}
	return out
}

// leftMounted returns the path that is still mounted after a call that the plugin answered with NOT_FOUND or OK. It is
// empty for any other wait.
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

// volume returns a volume, or nil if there is none or the shim does not answer.
func (e *explainer) volume(ctx context.Context, name host.VolumeName) *host.VolumeStatus {
	v, cached := e.volumes[name]
	if !cached {
		v, _ = e.s.volume(ctx, name)
		e.volumes[name] = v
	}
	return v
}

// plugin returns a plugin. It has no tasks if the plugin is not running or the shim does not answer.
func (e *explainer) plugin(ctx context.Context, id host.PluginID) *Plugin {
	if p, known := e.plugins[id]; known {
		return p
	}
	p, _ := e.s.plugin(ctx, id)
	e.plugins[id] = p
	return p
}

// holders lists the claims on a volume, the earliest first.
func (e *explainer) holders(v *host.VolumeStatus) []Holder {
	out := []Holder{}
	for _, h := range v.Holders {
		holder := Holder{
			Alloc: h.Claim.Alloc, Request: h.Claim.Request, Access: h.Claim.Usage.Access,
			ReadOnly: h.Claim.Usage.ReadOnly, Published: h.Publish, Target: h.Target.Host, Since: h.Claim.Since,
		}
		if node := h.Claim.Node; string(node) != e.s.agent.Node().Name {
			holder.Node = node
		}
		if rec := e.allocs[holder.Alloc]; rec != nil {
			holder.Job, holder.State = rec.Job, rec.State
		}
		if m := e.s.agent.EngineMount(v.ID); m != nil && m.Alloc == holder.Alloc {
			for _, id := range slices.Sorted(maps.Keys(m.Holders)) {
				use := m.Holders[id]
				holder.Engines = append(holder.Engines, EngineUse{use.Engine.Name(), id, use.Count})
			}
		}
		out = append(out, holder)
	}
	slices.SortStableFunc(out, func(x, y Holder) int { return x.Since.Compare(y.Since) })
	return out
}

// EngineNames names the engines that hold the volume, as in "docker, podman".
func (h Holder) EngineNames() string {
	var names []string
	for _, use := range h.Engines {
		names = append(names, use.Engine)
	}
	slices.Sort(names)
	return strings.Join(slices.Compact(names), ", ")
}

// withEngines adds the container engines that hold the volume to a conflict error.
func (s *Server) withEngines(name host.VolumeName, err error) error {
	m := s.agent.EngineMount(name.ID)
	if m == nil || name.Namespace != registry.DefaultNamespace || !errors.Is(err, registry.ErrConflict) {
		return err
	}
	return fmt.Errorf("%w; %s", err, m.Describe())
}

// lostNotices returns notices about containers that use the volume although this node has lost it.
func (s *Server) lostNotices(ctx context.Context, name host.VolumeName) (list []Notice) {
	lost, err := s.agent.LostEngineMounts(ctx, s.host)
	for _, l := range lost {
		if err != nil || name != (host.VolumeName{Namespace: registry.DefaultNamespace, ID: l.Volume}) {
			continue
		}
		n := Notice{
			Kind: NoticeTrouble, Summary: fmt.Sprintf("containers use volume %s, which this node has lost", name),
			Meaning: "They may write to the volume while other nodes use it.",
			Next: "Holdfast releases the volume here when they have stopped. Until then it is mounted for no other " +
				"container.",
		}
		n.fact("Reason", l.Reason)
		n.list("Containers", l.Containers)
		n.command("stop them", l.Stop)
		list = append(list, n)
	}
	return list
}

// adviseLost adds to findings the containers that use a volume which this node has lost, and the command that stops
// them. The shim itself reports such a volume only if its claim was released.
func (s *Server) adviseLost(ctx context.Context, findings []host.Finding) []host.Finding {
	lost, _ := s.agent.LostEngineMounts(ctx, s.host) // after an error, the findings of the shim stay unchanged
	for _, l := range lost {
		i := slices.IndexFunc(findings, func(f host.Finding) bool {
			return f.Alloc == l.Alloc && f.Kind == registry.FoundUnowned
		})
		if i < 0 {
			i = len(findings)
			findings = append(findings, host.Finding{Kind: registry.FoundUnowned, Alloc: l.Alloc, Path: l.Path,
				Detail: fmt.Sprintf("containers use volume %s, which this node has lost: %s", l.Volume, l.Reason)})
		}
		findings[i].Advice = "stop the containers: " + l.Stop
	}
	return findings
}

// mountNotices explains a mount that does not work. It returns nothing if the mount works.
func (e *explainer) mountNotices(h registry.Holder) []Notice {
	if h.Trouble == "" {
		return nil
	}
	job := ""
	if rec := e.allocs[h.Claim.Alloc]; rec != nil {
		job = rec.Job
	}
	return []Notice{mountTrouble(h, job)}
}

// allocName names an alloc and its job; empty without an alloc.
func (e *explainer) allocName(id host.AllocID) string {
	if rec := e.allocs[id]; rec != nil {
		return nameAlloc(id, rec.Job)
	}
	return short(id)
}

// volumeView describes a volume without its waits.
func (e *explainer) volumeView(v host.VolumeStatus) Volume {
	out := Volume{
		Volume: v.Volume, Staged: v.Staging.State, StagedAt: v.Staging.Path.Host, Holders: e.holders(&v),
		Waiting: v.Waiting, Intent: v.Intent,
	}
	for _, a := range v.Attachments {
		out.Attached = cmp.Or(out.Attached, a.State)
		out.Attachments = append(out.Attachments, Attachment{Node: a.Node, NodeID: a.NodeID, State: a.State,
			DetachingBy: a.Detaching.By, DetachingSince: a.Detaching.Since})
	}
	out.Notices = slices.Concat(expansionNotices(v.VolumeName(), v.Expansion), modificationNotices(v),
		healthNotices(v.VolumeName(), v.Plugin, v.Health), creationNotices(v),
		deletionNotices(v))
	for _, h := range v.Holders {
		out.Notices = append(out.Notices, e.mountNotices(h)...)
	}
	return out
}

// useView describes an alloc's use of a volume, with notices.
func (e *explainer) useView(alloc host.AllocID, u registry.AllocVolume) (AllocVolume, []Notice) {
	use := AllocVolume{
		Request: u.Request, Volume: u.Name.ID, Namespace: u.Name.Namespace, Plugin: u.Volume.Plugin,
		External: u.Volume.External, Access: u.Usage.Access, Attached: u.Attach, Staged: u.Stage,
		Published: u.Publish, Target: u.Target.Host, Intent: u.Intent,
	}
	claim := registry.Claim{Name: u.Name, Volume: u.Volume, Alloc: alloc, Request: u.Request}
	trouble := e.mountNotices(registry.Holder{Claim: claim, Trouble: u.Trouble, Troubled: u.Troubled})
	return use, slices.Concat(trouble, expansionNotices(u.Name, u.Expansion),
		healthNotices(u.Name, u.Volume.Plugin, u.Health))
}
