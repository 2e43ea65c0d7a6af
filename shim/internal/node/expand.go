package node

import (
	"context"
	"fmt"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Grow makes what is pending of the volume's expansion for the node (NodeExpandVolume), if the volume is here: where it
// is staged, if it is a file system that its plugin stages, else where it is published. It has to be somewhere where it
// may be written: a file system that is read-only everywhere cannot grow, and the expansion stays pending. Grow returns
// how far the node has come, which is stored here first. The caller then records it in the volume, which nodes share.
//
// What the plugin refuses for certain is recorded, has an event, and is no error: users of the volume continue with the
// size that it has. The plugin is asked again when the volume is mounted anew, not before (CSI NodeExpandVolume:
// "Caller MUST NOT retry"). again: it is asked now for what it has refused, where CSI allows that. Grow needs the
// volume's lock.
func (s *Stager) Grow(
	ctx context.Context, by intent.Caller, key registry.VolumeKey, again bool,
) (n registry.NodeExpansion, err error) {
	if again {
		if err := s.clearRefusal(ctx, key); err != nil {
			return n, err
		}
	}
	st, open, err := s.expansion(ctx, key)
	if err != nil {
		return n, err
	}
	repeats := open.RPC == registry.NodeExpandRPC
	if n = st.staging.Expanded; !repeats && (!st.volume.Expansion.Pending() || n.Answers(st.volume)) {
		return n, nil
	}
	at, here, err := s.place(st, repeats)
	switch {
	case err != nil:
		return n, fmt.Errorf("expand volume %s on its node: %w", st.volume.VolumeName(), err)
	case repeats && !here:
		return n, s.moot(ctx, open)
	case !here || !repeats && n.Refuses(st.volume.Expansion.Node):
		return n, nil
	}
	inst, err := s.Await(ctx, by, registry.RoleNode, key.Plugin)
	if err != nil {
		return n, err
	}
	switch {
	case repeats:
	case !inst.Fingerprint.Has(registry.NodeExpand):
		return n, s.unable(ctx, st, inst)
	case !fits(inst, st):
		return n, nil
	}
	if err := s.grow(ctx, by, st, at); err != nil {
		return n, fmt.Errorf("expand volume %s on its node: %w", st.volume.VolumeName(), err)
	}
	n, _, err = s.Expansion(ctx, key)
	return n, err
}

// expansion returns the records of the volume and its open call.
func (s *Stager) expansion(ctx context.Context, key registry.VolumeKey) (st state, open registry.Intent, err error) {
	err = s.State.View(ctx, func(view registry.View) error {
		st = s.stateOf(view, key)
		open, _ = view.NodeIntent(key)
		return nil
	})
	return st, open, err
}

// Expansion returns how far the node has come with expansions of the volume, and the RPC of its open call on the node,
// empty: none.
func (s *Stager) Expansion(ctx context.Context, key registry.VolumeKey) (registry.NodeExpansion, registry.RPC, error) {
	st, open, err := s.expansion(ctx, key)
	return st.staging.Expanded, open.RPC, err
}

// Grows reports whether Grow would have something to do, or has done something that the volume does not record.
func (s *Stager) Grows(ctx context.Context, v registry.Volume) (bool, error) {
	st, open, err := s.expansion(ctx, v.VolumeKey())
	if err != nil || open.RPC == registry.NodeExpandRPC {
		return err == nil, err
	}
	n := st.staging.Expanded
	if !v.Expansion.Pending() || n.Answers(v) || n.Refuses(v.Expansion.Node) {
		return n.Answers(v), nil
	}
	if inst, found := s.Plugins.Find(registry.RoleNode, v.Plugin); found && !fits(inst, st) {
		return false, nil
	}
	_, here, err := s.place(st, false)
	return here || err != nil, nil // a place that cannot be inspected is inspected again
}

// Uses lists for people how this node uses the volume.
func (s *Stager) Uses(ctx context.Context, key registry.VolumeKey) (users []string, err error) {
	st, err := s.state(ctx, key)
	for _, r := range st.refs {
		users = append(users, fmt.Sprintf("published for alloc %s at %s", r.Alloc, r.Target.Host))
	}
	if st.staging.State != registry.MarkNone {
		users = append(users, fmt.Sprintf("staged at %s", st.staging.Path.Host))
	}
	return users, err
}

// fits reports whether the plugin is of the kind that has mounted the volume: one that stages, or one that does not.
func fits(inst registry.Instance, st state) bool {
	return inst.Fingerprint.Has(registry.StageUnstage) == st.staging.Stages
}

// site is a place where a volume can grow.
type site struct {
	at     registry.Tree
	staged registry.Tree // none: the plugin did not stage
	usage  registry.Usage
}

// place returns the site of the volume on this node, if it has one where the volume is mounted. Without a mount a
// plugin would expand what lies below, or nothing, and answer that it is done.
func (s *Stager) place(st state, repeats bool) (site, bool, error) {
	where, here := s.site(st, repeats)
	if !here {
		return site{}, false, nil
	}
	there, err := false, error(nil)
	switch {
	case where.at != where.staged:
		there, err = s.isThere(where.at, where.usage.Attachment != registry.BlockDevice)
	case repeats && st.staging.State != registry.MarkDone: // something is there, or the plugin is asked about nothing
		there, err = s.isThere(where.at, true)
	default:
		there, err = s.stands(st)
	}
	return where, there, err
}

// site returns the site of the volume on this node, if it has one. repeats: a call for it is open, so what may be there
// counts.
func (s *Stager) site(st state, repeats bool) (site, bool) {
	up := func(m registry.Mark, boot string) bool {
		return (m == registry.MarkDone || repeats && m != registry.MarkNone) && boot == s.kernel.Boot()
	}
	p := st.staging
	if p.Stages && !up(p.State, p.Boot) {
		return site{}, false
	}
	if p.Stages && p.Usage.Attachment != registry.BlockDevice {
		return site{p.Path, p.Path, p.Usage}, !p.Usage.Access.ReaderOnly()
	}
	for _, r := range st.refs {
		if at := p.Expanded.At; at != "" && at != r.Target.Host {
			continue
		}
		if up(r.Publish, r.Boot) && !r.Usage.ReadOnly && !r.Usage.Access.ReaderOnly() {
			return site{r.Target, p.Path, r.Usage}, true
		}
	}
	return site{}, false
}

func (s *Stager) grow(ctx context.Context, by intent.Caller, st state, where site) error {
	v, want := st.volume, st.volume.Expansion.Node
	if n := st.staging.Expanded; n.Range != (registry.CapacityRange{}) && !v.Expansion.Pending() {
		want = n.Range // an open call of a size that is not asked for any more
	}
	secrets, err := s.Resolve(ctx, v.VolumeSpec)
	if err != nil {
		return err
	}
	request := csi.GrowRequest{
		VolumeID: v.External, Range: want, Usage: where.usage, Secrets: secrets,
		Private: csi.Private{Contexts: []map[string]string{v.Context, st.attachment.PublishContext}},
	}
	open := registry.Intent{
		Volume: v.VolumeKey(), Name: v.VolumeName(), RPC: registry.NodeExpandRPC, Operation: by.ID,
		Hash: intent.Hash(registry.NodeExpandRPC, request, where.at.Host, where.staged.Host),
	}
	before := st.staging.Expanded
	refused, capacity := false, int64(0)
	err = s.Send(ctx, intent.Call{
		Intent: open, RetryUntil: by.RetryUntil,
		Before: func(view registry.View) (registry.Change, error) {
			return expanded(view, v, func(n registry.NodeExpansion) registry.NodeExpansion {
				n.At, n.Range = where.at.Host, want
				return n
			}), nil
		},
		Renew: func(ctx context.Context) { request.Secrets = s.Renew(ctx, v.VolumeSpec, request.Secrets) },
		Do: func(ctx context.Context) error {
			inst, err := s.Await(ctx, by, registry.RoleNode, v.Plugin)
			if err != nil {
				return err
			}
			request.Path = pathAt(inst, where.at)
			if where.staged.Host != "" {
				request.StagingPath = pathAt(inst, where.staged)
			}
			capacity, err = s.driver.Grow(ctx, inst.InstanceKey, request)
			return err
		},
		Done: func(view registry.View) registry.Change {
			made := want.Required
			if v.Capacity < made { // the plugin expands on the node alone: what it says is the capacity
				made = max(made, capacity)
			}
			told := s.event(registry.EventNodeExpanded, open, fmt.Sprintf("%d bytes", max(made, v.Capacity)))
			return expanded(view, v, func(n registry.NodeExpansion) registry.NodeExpansion { return n.Made(made) }).
				And(registry.Change{Events: []registry.Event{told}})
		},
		Failed: func(view registry.View, err *registry.CallError, _ bool) registry.Change {
			refused = intent.Answers(err.Code)
			return expanded(view, v, func(n registry.NodeExpansion) registry.NodeExpansion {
				if !refused { // it has not left
					n.At, n.Range = before.At, before.Range
					return n
				}
				return n.Failed(err)
			})
		},
	})
	if refused && ctx.Err() == nil {
		return intent.Settled(err)
	}
	return err
}

// expanded returns the change that edits how far the node has come with expansions of the volume.
func expanded(
	view registry.View, v registry.Volume, edit func(registry.NodeExpansion) registry.NodeExpansion,
) registry.Change {
	p := stagingOf(view, v)
	before := p.Expanded
	if p.Expanded = edit(before); p.Expanded == before && p.CreateIndex > 0 {
		return registry.Change{}
	}
	return registry.Change{Put: []registry.Record{p}}
}

// stagingOf returns the volume's staging record, or a new one.
func stagingOf(view registry.View, v registry.Volume) registry.Staging {
	p, _ := view.Staging(v.VolumeKey())
	p.Volume, p.Name = v.VolumeKey(), v.VolumeName()
	return p
}

// moot closes a call for a place that is gone with an earlier boot. The expansion stays pending.
func (s *Stager) moot(ctx context.Context, open registry.Intent) error {
	_, err := s.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		now, found := view.NodeIntent(open.Volume)
		if !found || now.RPC != open.RPC || now.Hash != open.Hash {
			return registry.Change{}, nil
		}
		change := registry.Change{Delete: []registry.Key{open.Key()}}
		if p, found := view.Staging(open.Volume); found {
			change.Put = []registry.Record{anew(p)}
		}
		return change, nil
	})
	return err
}

// unable records that the node's plugin does not expand, though its controller asks for it.
func (s *Stager) unable(ctx context.Context, st state, inst registry.Instance) error {
	v := st.volume
	_, err := s.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		why := &registry.CallError{RPC: registry.NodeExpandRPC, Code: "UNIMPLEMENTED", Detail: fmt.Sprintf(
			"it was not sent: plugin %s asks for it, and its node plugin lacks %s", inst.Plugin, registry.NodeExpand)}
		told := s.event(registry.EventStepFailed,
			registry.Intent{Volume: v.VolumeKey(), Name: v.VolumeName(), RPC: registry.NodeExpandRPC}, why.Detail)
		return expanded(view, v, func(n registry.NodeExpansion) registry.NodeExpansion {
			n.Range = v.Expansion.Node
			return n.Failed(why)
		}).And(registry.Change{Events: []registry.Event{told}}), nil
	})
	return err
}

// LeaveExpansion closes an open NodeExpandVolume whose end is not awaited any more, and says whether there was one.
func (s *Stager) LeaveExpansion(ctx context.Context, key registry.VolumeKey) (left bool, err error) {
	_, err = registry.Ensure(ctx, s.State, func(view registry.View) (registry.Change, error) {
		open, found := view.NodeIntent(key)
		if left = found && open.RPC.Expands(); !left {
			return registry.Change{}, nil
		}
		change := registry.Change{Delete: []registry.Key{open.Key()}}
		if p, found := view.Staging(key); found {
			p.Expanded = p.Expanded.Failed(intent.NoEnd(open))
			change.Put = []registry.Record{p}
		}
		return change, nil
	})
	return left, err
}

// clearRefusal has the node's plugin asked once more for what it has refused, unless CSI forbids that.
func (s *Stager) clearRefusal(ctx context.Context, key registry.VolumeKey) error {
	_, err := registry.Ensure(ctx, s.State, func(view registry.View) (registry.Change, error) {
		p, found := view.Staging(key)
		if !found || !p.Expanded.Retriable() {
			return registry.Change{}, nil
		}
		p.Expanded.Refused = ""
		return registry.Change{Put: []registry.Record{p}}, nil
	})
	return err
}

// anew returns the staging record of a volume that is mounted anew: its plugin may be asked once more for what it has
// refused.
func anew(p registry.Staging) registry.Staging {
	p.Expanded.Refused, p.Expanded.At = "", ""
	return p
}
