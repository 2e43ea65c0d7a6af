package node

import (
	"context"
	"fmt"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Grow sends NodeExpandVolume if an expansion is pending for this node. It returns the node's progress, which it has
// stored; the caller records it in the volume, which nodes share. Grow needs the volume's lock.
//
//	open call | pending | mounted for writing | node plugin            | Grow
//	yes       |         | yes                 |                        | sends the call again
//	yes       |         | no                  |                        | closes the call: its mount is gone
//	yes       |         | without a claim     |                        | closes the call: other nodes may use the volume
//	no        | no, or done or refused        |                        | does nothing
//	no        | yes     | no                  |                        | does nothing: the next mount expands
//	no        | yes     | yes                 | lacks EXPAND_VOLUME    | records a refusal
//	no        | yes     | yes                 | stages now, or no more | does nothing: the next mount expands
//	no        | yes     | yes                 | other                  | sends the call
//
// A file system that its plugin stages is expanded where it is staged, any other volume where it is published. A
// refusal is recorded, has an event and is no error, because the volume remains usable. After a refusal the plugin is
// asked again only at the next mount (CSI NodeExpandVolume: "Caller MUST NOT retry"). retryRefused means that a
// person asks: Grow then also repeats a refused call, if CSI allows that.
func (s *Stager) Grow(
	ctx context.Context, by intent.Caller, key registry.VolumeKey, retryRefused bool,
) (n registry.NodeExpansion, err error) {
	if retryRefused {
		if err := s.clearRefusal(ctx, key); err != nil {
			return n, err
		}
	}
	st, err := s.state(ctx, key)
	if err != nil {
		return n, err
	}
	n = st.staging.Expanded
	isOpen := st.open.RPC == registry.NodeExpandRPC
	if !isOpen && !needsGrow(st) {
		return n, nil
	}
	at, mounted, err := s.expandSite(st, isOpen)
	switch {
	case err != nil:
		return n, fmt.Errorf("expand volume %s on its node: %w", st.volume.VolumeName(), err)
	case isOpen && !mounted:
		_, err := s.closeExpansion(ctx, key, func(_ registry.Intent, n registry.NodeExpansion) registry.NodeExpansion {
			return mountedAnew(n)
		})
		return n, err
	case !mounted:
		return n, nil
	}
	inst, err := s.AwaitFor(ctx, by, registry.RoleNode, key)
	switch {
	case err != nil:
		return n, err
	case !isOpen && !inst.Fingerprint.Has(registry.NodeExpand):
		return n, s.recordUnable(ctx, st, inst)
	case !isOpen && !stagesAsBefore(inst, st):
		return n, nil
	}
	if err := s.grow(ctx, by, st, at); err != nil {
		return n, fmt.Errorf("expand volume %s on its node: %w", st.volume.VolumeName(), err)
	}
	n, _, err = s.Expansion(ctx, key)
	return n, err
}

// expansion returns the progress of the volume's expansions as it is on this node.
func (st state) expansion(v registry.Volume) registry.Expansion {
	return v.Expansion.OnNode(st.staging.Expanded, len(st.refs) > 0)
}

// ExpansionPending reports whether an expansion of the volume is pending on this node.
func (s *Stager) ExpansionPending(ctx context.Context, key registry.VolumeKey) (bool, error) {
	st, err := s.state(ctx, key)
	return st.volume.Expansion.Pending(), err
}

// needsGrow reports whether the node has a pending expansion that its plugin has neither done nor refused.
func needsGrow(st state) bool {
	e, n := st.volume.Expansion, st.staging.Expanded
	return e.Pending() && !n.Answers(st.volume) && !n.Refuses(e.Node)
}

// Expansion returns the node's progress with expansions of the volume, and the RPC of its open call on the node. The
// RPC is empty if no call is open.
func (s *Stager) Expansion(ctx context.Context, key registry.VolumeKey) (registry.NodeExpansion, registry.RPC, error) {
	st, err := s.state(ctx, key)
	return st.staging.Expanded, st.open.RPC, err
}

// Grows reports whether Grow would send or close a call, or whether the node has a result that the volume does not
// record yet.
func (s *Stager) Grows(ctx context.Context, v registry.Volume) (bool, error) {
	st, err := s.state(ctx, v.VolumeKey())
	if err != nil || st.open.RPC == registry.NodeExpandRPC {
		return err == nil, err
	}
	st.volume = v
	st.volume.Expansion = st.expansion(v)
	if !needsGrow(st) {
		return st.staging.Expanded.Answers(v), nil
	}
	if inst, found := s.FindFor(ctx, registry.RoleNode, v.VolumeKey()); found && !stagesAsBefore(inst, st) {
		return false, nil
	}
	_, mounted, err := s.expandSite(st, false)
	return mounted || err != nil, nil // if the mount could not be inspected, Grow tries again
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

// stagesAsBefore reports whether the plugin still stages volumes, or still does not, as when it mounted this volume.
func stagesAsBefore(inst registry.Instance, st state) bool {
	return inst.Fingerprint.Has(registry.StageUnstage) == st.staging.Stages
}

// site is a path at which a volume can be expanded.
type site struct {
	at     registry.Tree
	staged registry.Tree // the staging path; zero: the plugin did not stage
	usage  registry.Usage
}

// expandSite returns where the volume can be expanded on this node, and whether it is mounted there. At a path without
// a mount, the plugin would expand the file system below. Without a claim of this node no mount counts, because other
// nodes may use the volume. isOpen means that an expansion call is open. That call is closed if there is no mount, so
// the mount of an uncertain stage or publish counts too.
func (s *Stager) expandSite(st state, isOpen bool) (where site, mounted bool, err error) {
	where, found := s.recordedSite(st, isOpen)
	switch {
	case !found || len(st.claims) == 0:
	case where.at != where.staged:
		mounted, err = s.isThere(where.at, where.usage.Attachment != registry.BlockDevice)
	case isOpen && st.staging.State != registry.MarkDone:
		mounted, err = s.isThere(where.at, true)
	default:
		mounted, err = s.stillStaged(st)
	}
	return where, mounted, err
}

// recordedSite returns where the volume is mounted for writing, according to the records of this boot. Once an
// expansion was sent to one of the paths at which the volume is published, the other paths do not count.
func (s *Stager) recordedSite(st state, isOpen bool) (where site, found bool) {
	isMounted := func(m registry.Mark, boot string) bool {
		return (m == registry.MarkDone || isOpen && m != registry.MarkNone) && boot == s.machine.Boot()
	}
	p := st.staging
	if p.Stages && !isMounted(p.State, p.Boot) {
		return site{}, false
	}
	if p.Stages && p.Usage.Attachment != registry.BlockDevice {
		return site{p.Path, p.Path, p.Usage}, !p.Usage.Access.ReaderOnly()
	}
	for _, r := range st.refs {
		writes := !r.Usage.ReadOnly && !r.Usage.Access.ReaderOnly()
		if at := p.Expanded.At; writes && isMounted(r.Publish, r.Boot) && (at == "" || at == r.Target.Host) {
			return site{r.Target, p.Path, r.Usage}, true
		}
	}
	return site{}, false
}

// grow sends NodeExpandVolume until its outcome is certain or its policy gives up. A refusal by the plugin is recorded,
// and is no error.
func (s *Stager) grow(ctx context.Context, by intent.Caller, st state, where site) error {
	v, want := st.volume, st.volume.Expansion.Node
	if st.open.RPC == registry.NodeExpandRPC {
		want = st.staging.Expanded.Range // the size of the open call may not be pending any more
	}
	secrets, err := s.Resolve(ctx, v.VolumeSpec)
	if err != nil {
		return err
	}
	request := csi.NodeExpandRequest{
		VolumeID: v.External, Range: want, Usage: where.usage, Secrets: secrets,
		Private: csi.Private{Contexts: []map[string]string{v.Context, st.attachment.PublishContext}},
	}
	open := registry.Intent{
		Volume: v.VolumeKey(), Name: v.VolumeName(), RPC: registry.NodeExpandRPC, Operation: by.ID,
		Hash: intent.Hash(registry.NodeExpandRPC, request, where.at.Host, where.staged.Host),
	}
	before := st.staging.Expanded
	refused := false
	capacity := int64(0) // as the plugin responds
	err = s.Send(ctx, by, intent.Call{
		Intent: open,
		Before: func(view registry.View) (registry.Change, error) {
			return expandedChange(view, v, func(n registry.NodeExpansion) registry.NodeExpansion {
				n.At, n.Range = where.at.Host, want
				return n
			}), nil
		},
		Renew: func(ctx context.Context) { request.Secrets = s.Renew(ctx, v.VolumeSpec, request.Secrets) },
		Done: func(view registry.View) registry.Change {
			made := want.Required
			if v.Capacity < made { // only the node expands this volume, so the node's response has the capacity
				made = max(made, capacity)
			}
			done := s.event(registry.EventNodeExpanded, open, fmt.Sprintf("%d bytes", max(made, v.Capacity)))
			return expandedChange(view, v, func(n registry.NodeExpansion) registry.NodeExpansion {
				return n.Expanded(made)
			}).And(registry.Change{Events: []registry.Event{done}})
		},
		Failed: func(view registry.View, err *registry.CallError, _ bool) registry.Change {
			refused = intent.Answers(err.Code)
			return expandedChange(view, v, func(n registry.NodeExpansion) registry.NodeExpansion {
				if !refused { // the call was not sent
					n.At, n.Range = before.At, before.Range
					return n
				}
				return n.WithError(err)
			})
		},
	}, func(ctx context.Context, inst registry.Instance) (err error) {
		request.Path = inst.Volumes.InTask(where.at)
		if where.staged.Host != "" {
			request.StagingPath = inst.Volumes.InTask(where.staged)
		}
		capacity, err = s.fleet.NodeExpand(ctx, inst.InstanceKey, request)
		return err
	})
	if refused && ctx.Err() == nil {
		return intent.Unsettled(err)
	}
	return err
}

// expandedChange returns the change that applies edit to the node's progress with expansions of the volume.
func expandedChange(
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

// recordUnable records as a refusal that the node plugin lacks EXPAND_VOLUME, though the controller requires it.
func (s *Stager) recordUnable(ctx context.Context, st state, inst registry.Instance) error {
	v := st.volume
	why := &registry.CallError{RPC: registry.NodeExpandRPC, Code: "UNIMPLEMENTED", Detail: fmt.Sprintf(
		"not sent: the controller of plugin %s requires it, and its node plugin lacks %s", inst.Plugin,
		registry.NodeExpand)}
	failed := s.event(registry.EventStepFailed,
		registry.Intent{Volume: v.VolumeKey(), Name: v.VolumeName(), RPC: registry.NodeExpandRPC}, why.Detail)
	_, err := s.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		return expandedChange(view, v, func(n registry.NodeExpansion) registry.NodeExpansion {
			n.Range = v.Expansion.Node
			return n.WithError(why)
		}).And(registry.Change{Events: []registry.Event{failed}}), nil
	})
	return err
}

// LeaveExpansion closes an open NodeExpandVolume without waiting for its outcome, and reports whether a call was open.
func (s *Stager) LeaveExpansion(ctx context.Context, key registry.VolumeKey) (left bool, err error) {
	return s.closeExpansion(ctx, key, func(open registry.Intent, n registry.NodeExpansion) registry.NodeExpansion {
		return n.WithError(intent.UnknownEnd(open))
	})
}

// closeExpansion closes an open NodeExpandVolume, edits the node's progress in the same commit, and reports whether
// a call was open.
func (s *Stager) closeExpansion(
	ctx context.Context, key registry.VolumeKey,
	edit func(open registry.Intent, n registry.NodeExpansion) registry.NodeExpansion,
) (closed bool, err error) {
	_, err = registry.Ensure(ctx, s.State, func(view registry.View) (registry.Change, error) {
		open, found := view.NodeIntent(key)
		if closed = found && open.RPC.Alters(); !closed {
			return registry.Change{}, nil
		}
		change := registry.Change{Delete: []registry.Key{open.Key()}}
		if p, found := view.Staging(key); found {
			p.Expanded = edit(open, p.Expanded)
			change.Put = []registry.Record{p}
		}
		return change, nil
	})
	return closed, err
}

// clearRefusal deletes a recorded refusal of the node plugin, unless CSI forbids to ask again.
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

// mountedAnew returns n without its refusal and path, because a plugin may be asked once more after each mount.
func mountedAnew(n registry.NodeExpansion) registry.NodeExpansion {
	n.Refused, n.At = "", ""
	return n
}
