package controller

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Expand makes the volume larger: its controller does (ControllerExpandVolume), and in the commit of its answer it is
// recorded that the node has to see to it too, which it does now if the volume is used here, else when it is used next.
// Where the plugin expands on the node alone, that is all. A volume that is large enough stays as it is, and nothing is
// sent.
//
// An expansion that nobody knows the end of is asked for once more before another is. A plugin that expands only unused
// volumes (VolumeExpansion OFFLINE without ONLINE) is not asked while the volume is attached, staged or published:
// ErrConflict names its users.
func (m *Controller) Expand(
	ctx context.Context, call registry.Call, name registry.VolumeName, want registry.CapacityRange,
) (registry.Volume, error) {
	if err := meaningful(want); err != nil {
		return registry.Volume{}, err
	}
	v, err := m.expandable(ctx, name)
	if err != nil {
		return v, err
	}
	if done, err := m.enough(ctx, v, want); done || err != nil {
		return v, err
	}
	w, err := m.wayOf(ctx, v)
	if err != nil {
		return v, fmt.Errorf("expand volume %s: %w", name, err)
	}
	if err := m.expandIn(ctx, intent.Caller{Call: call}, name, want, w); err != nil {
		m.leaves()
		return v, fmt.Errorf("expand volume %s: %w", name, err)
	}
	return m.volume(ctx, name)
}

func meaningful(want registry.CapacityRange) error {
	switch {
	case want.Required <= 0:
		return registry.Invalid("%d bytes is not a valid size for an expansion", want.Required)
	case want.Limit < 0 || want.Limit > 0 && want.Limit < want.Required:
		return registry.Invalid("the limit of %d bytes is below the size of %d bytes", want.Limit, want.Required)
	}
	return nil
}

// expandable is the volume, if it is one that can be made larger.
func (m *Controller) expandable(ctx context.Context, name registry.VolumeName) (v registry.Volume, err error) {
	if v, err = m.volume(ctx, name); err != nil {
		return v, err
	}
	switch {
	case v.Ephemeral:
		err = registry.Errorf(registry.ErrUnsupported,
			"volume %s is an inline volume of alloc %s, and goes with it: it cannot be expanded", name, v.Owner)
	case v.State != registry.VolumeReady:
		err = registry.Errorf(registry.ErrConflict, "volume %s is %s; it can be expanded when it is ready", name,
			v.State)
	}
	return v, err
}

// enough says whether there is nothing to do: the volume is as large as it is to be, here too. An error says that it
// would have to shrink.
func (m *Controller) enough(
	ctx context.Context, v registry.Volume, want registry.CapacityRange,
) (done bool, err error) {
	e, floor := v.Expansion, v.Capacity
	if asked := max(e.Done, v.CapacityMin); asked > 0 {
		floor = min(floor, asked) // plugins round up, and what was asked for before is no request to shrink
	}
	switch {
	case want.Required < floor:
		return false, registry.Invalid("volume %s has %d bytes, and a volume cannot be made smaller: %d bytes were asked for",
			v.VolumeName(), v.Capacity, want.Required)
	case want.Limit > 0 && want.Limit < v.Capacity:
		return false, registry.Invalid("volume %s has %d bytes already, and a volume cannot be made smaller: the limit is %d bytes",
			v.VolumeName(), v.Capacity, want.Limit)
	case e.Open() || v.Capacity < want.Required && e.Node.Required < want.Required, v.Unmade() && e.Node != want:
		return false, nil
	}
	if m.node == nil {
		return true, nil
	}
	grows, err := m.node.Grows(ctx, v)
	if err != nil || grows {
		return false, err
	}
	n, _, err := m.node.Expansion(ctx, v.VolumeKey())
	return !(e.Pending() && n.Retriable()), err
}

// way is who makes a plugin's volumes larger, and when.
type way struct {
	controller bool // else the node alone does
	online     bool // also while they are used
}

// expandsInUse reports whether the plugin may be asked to expand a volume in use. A plugin that declares no mode
// decides itself.
func expandsInUse(f registry.Fingerprint) bool {
	return f.Has(registry.ExpandsOnline) || !f.Has(registry.ExpandsOffline)
}

// wayOf asks the plugin's controller, if it has one, and else its node plugin, which are waited for. No lock is held
// meanwhile.
func (m *Controller) wayOf(ctx context.Context, v registry.Volume) (way, error) {
	inst, has, err := m.asked(ctx, v.Plugin, v.Created)
	if err != nil {
		return way{}, err
	}
	if has && inst.Fingerprint.Has(registry.ControllerExpand) {
		return way{controller: true, online: expandsInUse(inst.Fingerprint)}, nil
	}
	if inst.Role != registry.RoleNode {
		if inst, err = m.askedNode(ctx, v.Plugin); err != nil {
			return way{}, err
		}
	}
	if !inst.Fingerprint.Has(registry.NodeExpand) {
		return way{}, registry.Errorf(registry.ErrUnsupported, "plugin %s cannot expand volumes (it lacks %s and %s)",
			v.Plugin, registry.ControllerExpand, registry.NodeExpand)
	}
	return way{online: expandsInUse(inst.Fingerprint)}, nil
}

// expandIn expands the volume in its locks: that of its name, and that of what it is called by now.
func (m *Controller) expandIn(
	ctx context.Context, by intent.Caller, name registry.VolumeName, want registry.CapacityRange, w way,
) error {
	leave, err := m.Locks.Lock(ctx, name, "its expansion")
	if err != nil {
		return err
	}
	defer leave()
	v, err := m.expandable(ctx, name)
	if err != nil {
		return err
	}
	leaveKey, err := m.Locks.Lock(ctx, v.VolumeKey(), "its expansion")
	if err != nil {
		return err
	}
	defer leaveKey()
	if v, err = m.expandable(ctx, name); err != nil { // an alloc may have finished what was open, meanwhile
		return err
	}
	v, asked, err := m.earlier(ctx, by, v, want, w)
	if err != nil {
		return err
	}
	done, err := m.enough(ctx, v, want)
	if err != nil || done {
		return err
	}
	switch {
	case !v.Expansion.Open() && v.Capacity >= want.Required:
		err = m.withdraw(ctx, v)
	case w.controller:
		err = m.enlarge(ctx, by, v, want, w, intent.PolicyOf(registry.ControllerExpandRPC))
	case v.Expansion.Node.Required < want.Required || v.Unmade() && v.Expansion.Node != want:
		err = m.leaveToNode(ctx, v, want, w)
	}
	if err != nil {
		return err
	}
	if err := m.grow(ctx, by, v.VolumeKey(), !asked); err != nil {
		return err
	}
	return m.possible(ctx, name, want)
}

// earlier has an expansion come to its end that is open, if it is another one: on the node, and at its controller. What
// the node has answered vaguely has to be known too, as long as the volume is mounted as it was then. asked: the node
// was asked for what is pending.
func (m *Controller) earlier(
	ctx context.Context, by intent.Caller, v registry.Volume, want registry.CapacityRange, w way,
) (now registry.Volume, asked bool, err error) {
	open, err := m.opened(ctx, v)
	if err != nil {
		return v, false, err
	}
	if open != registry.ControllerExpandRPC { // which comes first where it is open
		if v, asked, err = m.nodeFirst(ctx, by, v, want); err != nil {
			return v, asked, err
		}
	}
	if e := v.Expansion; !e.Open() || e.Asked == want || !w.controller {
		return v, asked, nil
	}
	if err := m.enlarge(ctx, by, v, v.Expansion.Asked, w, intent.PolicyOf(registry.ControllerExpandRPC)); err != nil {
		return v, asked, fmt.Errorf("%d bytes were asked for before, and what became of that has to be known first: %w",
			v.Expansion.Asked.Required, err)
	}
	if v, err = m.volume(ctx, v.VolumeName()); err != nil {
		return v, asked, err
	}
	return m.nodeFirst(ctx, by, v, want)
}

// nodeFirst has the node end what it was asked for or is to be, before it is asked for something else. asked: it was,
// or it cannot be.
func (m *Controller) nodeFirst(
	ctx context.Context, by intent.Caller, v registry.Volume, want registry.CapacityRange,
) (now registry.Volume, asked bool, err error) {
	if m.node == nil {
		return v, v.Expansion.Pending(), nil
	}
	before, _, err := m.node.Expansion(ctx, v.VolumeKey())
	if err != nil {
		return v, false, err
	}
	vague := before.Refused != "" && intent.Vague(before.Refused)
	if err := m.grow(ctx, by, v.VolumeKey(), vague); err != nil {
		return v, false, err
	}
	if now, err = m.volume(ctx, v.VolumeName()); err != nil {
		return v, false, err
	}
	n, _, err := m.node.Expansion(ctx, v.VolumeKey())
	if err != nil {
		return v, false, err
	}
	other := now.Capacity < want.Required
	if now.Unmade() {
		other = now.Expansion.Node != want
	}
	if other && n.Refused != "" && intent.Vague(n.Refused) { // the record is one of the volume as it is mounted now
		return now, false, registry.Errorf(registry.ErrConflict,
			"the expansion before is not known to have come to its end "+
				"on the node (%s: %s); stop the jobs that use the volume, and expand it then", registry.NodeExpandRPC,
			n.Refused)
	}
	return now, v.Expansion.Pending() && (vague || before.Refused == ""), nil
}

// opened returns the call that is open for the volume, at its controller or on this node; empty: none.
func (m *Controller) opened(ctx context.Context, v registry.Volume) (rpc registry.RPC, err error) {
	err = m.State.View(ctx, func(view registry.View) error {
		open, _ := view.Intent(v.VolumeKey())
		rpc = open.RPC
		return nil
	})
	if err == nil && rpc == "" && m.node != nil {
		_, rpc, err = m.node.Expansion(ctx, v.VolumeKey())
	}
	return rpc, err
}

// grow has the node make what is pending, if it can, and records what it has made. again: also what the node's plugin
// has refused, unless CSI forbids that.
func (m *Controller) grow(ctx context.Context, by intent.Caller, key registry.VolumeKey, again bool) error {
	if m.node == nil {
		return nil
	}
	done, err := m.node.Grow(ctx, by, key, again)
	if err != nil {
		return err
	}
	return m.NodeExpanded(ctx, key, done)
}

// NodeExpanded records in the volume what a node has done of its expansion. The node has stored that before, so it may
// be called any number of times.
func (m *Controller) NodeExpanded(ctx context.Context, key registry.VolumeKey, n registry.NodeExpansion) error {
	_, err := registry.Ensure(ctx, m.State, func(view registry.View) (registry.Change, error) {
		v, known := view.VolumeByKey(key)
		if !known || v.Ephemeral || !n.Answers(v) {
			return registry.Change{}, nil
		}
		e := v.Expansion
		switch {
		case n.Done < e.Node.Required: // the size can never be, and is not asked for any more
			v.Expansion = e.Settled()
			v.Expansion.RPC, v.Expansion.Code, v.Expansion.Detail = n.RPC, n.Code, n.Detail
		case v.Unmade():
			v.Capacity, e.Done = n.Done, max(e.Done, e.Node.Required)
			v.Expansion = e.Settled()
		default:
			v.Expansion = e.Settled()
		}
		return registry.Change{Put: []registry.Record{v}}, nil
	})
	return err
}

// LeaveExpansion closes an open ControllerExpandVolume whose end nobody knows, and says whether there was one.
func (m *Controller) LeaveExpansion(ctx context.Context, key registry.VolumeKey) (left bool, err error) {
	_, err = registry.Ensure(ctx, m.State, func(view registry.View) (registry.Change, error) {
		open, found := view.Intent(key)
		if left = found && open.RPC.Expands(); !left {
			return registry.Change{}, nil
		}
		change := registry.Change{Delete: []registry.Key{open.Key()}}
		if v, known := view.VolumeByKey(key); known {
			v.Expansion = v.Expansion.Troubled(intent.NoEnd(open))
			change.Put = []registry.Record{v}
		}
		return change, nil
	})
	return left, err
}

// offline returns nil if the volume may be expanded now. One that was only claimed so far is not used yet.
func offline(view registry.View, v registry.Volume, local []string, w way) error {
	if w.online || len(view.Attachments(v.VolumeKey())) == 0 && len(local) == 0 {
		return nil
	}
	return registry.Errorf(registry.ErrConflict, "%w; plugin %s expands only unused volumes (it declares %s and not %s): "+
		"stop the jobs of these allocs, expand the volume, and run them again",
		idle(view, v, local, "expanded now"), v.Plugin, registry.ExpandsOffline, registry.ExpandsOnline)
}

// leaveToNode records what the node is to see to, for a plugin that expands there alone.
func (m *Controller) leaveToNode(ctx context.Context, v registry.Volume, want registry.CapacityRange, w way) error {
	local, err := m.uses(ctx, v)
	if err != nil {
		return err
	}
	_, err = m.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		now, found := view.Volume(v.VolumeName())
		if !found {
			return registry.Change{}, unknown(v.VolumeName())
		}
		if err := offline(view, now, local, w); err != nil {
			return registry.Change{}, err
		}
		now.Expansion = now.Expansion.Settled()
		now.Expansion.Node, now.Expansion.Since = want, m.Now()
		return registry.Change{
			Put: []registry.Record{now},
			Events: []registry.Event{m.event(registry.EventVolumeExpanded, now,
				fmt.Sprintf("to %d bytes, by its node alone", want.Required))},
		}, nil
	})
	return err
}

// withdraw has the node not make a size any more that somebody asked for before, who asks for what there is now.
func (m *Controller) withdraw(ctx context.Context, v registry.Volume) error {
	if !v.Unmade() {
		return nil
	}
	_, err := m.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		now, found := view.Volume(v.VolumeName())
		if !found || !now.Unmade() {
			return registry.Change{}, nil
		}
		now.Expansion = now.Expansion.Settled()
		return registry.Change{Put: []registry.Record{now}}, nil
	})
	return err
}

// possible is nil unless the node has said that it can never make the volume so large, and is not asked for that any
// more.
func (m *Controller) possible(ctx context.Context, name registry.VolumeName, want registry.CapacityRange) error {
	v, err := m.volume(ctx, name)
	if e := v.Expansion; err == nil && v.Capacity < want.Required && !e.Pending() && !e.Open() &&
		e.RPC == registry.NodeExpandRPC {
		err = registry.Invalid("%s: %s: %s; %s", e.RPC, e.Code, e.Detail, intent.Advice(e.RPC, e.Code))
	}
	return err
}

// enlarge drives ControllerExpandVolume to its end.
func (m *Controller) enlarge(
	ctx context.Context, by intent.Caller, v registry.Volume, want registry.CapacityRange, w way, p intent.Policy,
) error {
	request := csi.ExpandRequest{
		VolumeID: v.External, Range: want, Private: csi.Private{MountFlags: v.MountFlags,
			Contexts: []map[string]string{v.Context, v.Parameters}},
	}
	var err error
	if request.Secrets, err = m.Resolve(ctx, v.VolumeSpec); err != nil {
		return err
	}
	local, err := m.uses(ctx, v)
	if err != nil {
		return err
	}
	before := v.Expansion
	if request.Usage = before.Usage; !before.Open() {
		if request.Usage, err = m.usage(ctx, v); err != nil {
			return err
		}
	}
	vague := before.Open() // something may be made of the request that nobody knows of
	var answer csi.Expanded
	open := base(registry.ControllerExpandRPC, by.Call, v, intent.Hash(registry.ControllerExpandRPC, request))
	return m.Send(ctx, intent.Call{
		Intent: open, RetryUntil: by.RetryUntil, Policy: p,
		Before: func(view registry.View) (registry.Change, error) { return m.expanding(view, v, local, request, w) },
		Renew:  func(ctx context.Context) { request.Secrets = m.Renew(ctx, v.VolumeSpec, request.Secrets) },
		Do: func(ctx context.Context) error {
			inst, err := m.Await(ctx, by, registry.RoleController, v.Plugin)
			if err != nil {
				return err
			}
			if answer, err = m.driver.Expand(ctx, inst.InstanceKey, request); err == nil {
				err = checkExpanded(answer, inst.InstanceKey, want)
			}
			if e, is := errors.AsType[*registry.CallError](err); is && intent.Answers(e.Code) &&
				!intent.Silent(e.Code) {
				vague = intent.Vague(e.Code)
			}
			return err
		},
		Done: func(view registry.View) registry.Change { return m.expanded(view, v.VolumeName(), want, answer) },
		Failed: func(view registry.View, err *registry.CallError, clean bool) registry.Change {
			v, known := view.Volume(v.VolumeName())
			if !known {
				return registry.Change{}
			}
			switch {
			case err.Code == "OK":
				v.Expansion = before.Closed()
				v = m.resized(v, answer)
			case vague || !clean && intent.Silent(err.Code):
				v.Expansion = v.Expansion.Troubled(err)
			default:
				v.Expansion = before.Closed()
			}
			return registry.Change{Put: []registry.Record{v}}
		},
	})
}

// usage is that for which the volume is attached; else the one that it was made for; zero if there are several: a
// plugin that is told of the one could leave out what the others need.
func (m *Controller) usage(ctx context.Context, v registry.Volume) (u registry.Usage, err error) {
	err = m.State.View(ctx, func(view registry.View) error {
		if at := view.Attachments(v.VolumeKey()); len(at) > 0 {
			u = at[0].Usage
		} else {
			u = usageOf(v.VolumeSpec)
		}
		return nil
	})
	return u, err
}

func usageOf(s registry.VolumeSpec) (u registry.Usage) {
	for _, c := range s.Capabilities {
		if c != s.Capabilities[0] {
			return registry.Usage{}
		}
	}
	if len(s.Capabilities) == 0 {
		return u
	}
	u = registry.Usage{Access: s.Capabilities[0].Access, Attachment: s.Capabilities[0].Attachment}
	if u.Attachment == registry.FileSystem {
		u.FSType, u.MountFlags, u.MountGroup = s.FSType, s.MountFlags, s.MountGroup
	}
	return u
}

// expanding records what is asked for, unless the volume is used and its plugin does not expand it then.
func (m *Controller) expanding(
	view registry.View, v registry.Volume, local []string, r csi.ExpandRequest, w way,
) (registry.Change, error) {
	now, found := view.Volume(v.VolumeName())
	if !found {
		return registry.Change{}, unknown(v.VolumeName())
	}
	if err := offline(view, now, local, w); err != nil {
		return registry.Change{}, err
	}
	if !now.Expansion.Open() {
		now.Expansion.Since = m.Now()
	}
	now.Expansion.Asked, now.Expansion.Usage = r.Range, r.Usage
	return registry.Change{Put: []registry.Record{now}}, nil
}

// expanded is what the controller has made of the volume, and in the same commit what is left for its node.
func (m *Controller) expanded(
	view registry.View, name registry.VolumeName, want registry.CapacityRange, answer csi.Expanded,
) registry.Change {
	v, known := view.Volume(name)
	if !known {
		return registry.Change{}
	}
	v.Expansion = v.Expansion.Closed().Settled()
	v.Expansion.Done = max(want.Required, v.Expansion.Done)
	v.Expansion.Since = time.Time{}
	v = m.resized(v, answer)
	told := fmt.Sprintf("%d bytes", v.Capacity)
	if answer.Node {
		told += "; its node is to see to it"
	}
	return registry.Change{Put: []registry.Record{v},
		Events: []registry.Event{m.event(registry.EventVolumeExpanded, v, told)}}
}

// resized is v as its controller says that it is, with what it leaves to the node. That the volume cannot grow as it is
// mounted still stands.
func (m *Controller) resized(v registry.Volume, answer csi.Expanded) registry.Volume {
	v.Capacity = max(v.Capacity, answer.Capacity)
	if answer.Node {
		v.Expansion = v.Expansion.Settled()
		v.Expansion.Node, v.Expansion.Since = registry.CapacityRange{Required: v.Capacity}, m.Now()
	}
	return v
}

// checkExpanded returns an error if the volume does not have the size that was asked for.
func checkExpanded(e csi.Expanded, at registry.InstanceKey, want registry.CapacityRange) error {
	switch {
	case e.Capacity < want.Required:
		return broken(registry.ControllerExpandRPC, at, registry.ErrInternal,
			"the plugin says that the volume has %d bytes; %d were asked for", e.Capacity, want.Required)
	case want.Limit > 0 && e.Capacity > want.Limit:
		return broken(registry.ControllerExpandRPC, at, registry.ErrInternal,
			"the plugin says that the volume has %d bytes; at most %d were asked for", e.Capacity, want.Limit)
	}
	return nil
}
