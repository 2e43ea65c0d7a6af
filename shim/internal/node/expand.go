package node

import (
	"context"
	"fmt"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Grow has the node see to an expansion of the volume (NodeExpandVolume), if one is pending and the volume is here: where it is staged,
// if it is a file system that its plugin stages, else where it is published. It has to be somewhere where it may be written: a file
// system that is read-only everywhere cannot grow, and the expansion stays pending until it is not.
//
// What the plugin refuses for certain is recorded and told, and is no error: who uses the volume goes on with the size that it has. It
// is asked again when the volume is mounted anew, not before (CSI NodeExpandVolume: "Caller MUST NOT retry"). Whoever calls it holds the
// volume's lane.
func (s *Stager) Grow(ctx context.Context, by intent.Caller, key registry.VolumeKey) error {
	var st state
	var open registry.Intent
	err := s.State.View(ctx, func(view registry.View) error {
		st = stateOf(view, key)
		open, _ = registry.OpenIntent(view, key)
		return nil
	})
	again := open.RPC == registry.NodeExpandRPC
	if err != nil || !st.volume.Expansion.Pending() && !again {
		return err
	}
	at, here, err := s.place(st, again)
	switch {
	case err != nil:
		return fmt.Errorf("expand volume %s on its node: %w", st.volume.VolumeName(), err)
	case again && !here:
		return s.moot(ctx, open)
	case !here || !again && st.volume.Expansion.Refused != "":
		return nil
	}
	inst, err := s.Await(ctx, by, registry.RoleNode, key.Plugin)
	if err != nil {
		return err
	}
	switch {
	case again:
	case !inst.Fingerprint.Has(registry.NodeExpand):
		return s.unable(ctx, key, inst)
	case !fits(inst, st):
		return nil
	}
	if err := s.grow(ctx, by, st, at); err != nil {
		return fmt.Errorf("expand volume %s on its node: %w", st.volume.VolumeName(), err)
	}
	return nil
}

// Grows says whether Grow would have something to do.
func (s *Stager) Grows(view registry.View, v registry.Volume) bool {
	if open, found := registry.OpenIntent(view, v.VolumeKey()); found && open.RPC == registry.NodeExpandRPC {
		return true
	}
	if !v.Expansion.Pending() || v.Expansion.Refused != "" {
		return false
	}
	st := stateOf(view, v.VolumeKey())
	if inst, found := s.Plugins.Find(registry.RoleNode, v.Plugin); found && !fits(inst, st) {
		return false
	}
	_, here, err := s.place(st, false)
	return here || err != nil // what cannot be looked at is looked at again
}

// fits says whether the plugin is of the kind that has put the volume up: one that stages, or one that does not.
func fits(inst registry.Instance, st state) bool {
	return inst.Fingerprint.Has(registry.StageUnstage) == st.place.Stages
}

// site is a place where a volume can grow.
type site struct {
	at     registry.Tree
	staged registry.Tree // none: the plugin did not stage
	usage  registry.Usage
}

// place is the site of the volume on this node, if it has one where the volume is mounted. Without a mount a plugin would make what lies
// below larger, or nothing, and say that it has done it.
func (s *Stager) place(st state, again bool) (site, bool, error) {
	where, here := s.site(st, again)
	if !here {
		return site{}, false, nil
	}
	there, err := false, error(nil)
	switch {
	case where.at != where.staged:
		there, err = s.isThere(where.at, where.usage.Attachment != registry.BlockDevice)
	case again && st.place.Stage != registry.MarkDone: // something is there, or the plugin is asked about nothing
		there, err = s.isThere(where.at, true)
	default:
		there, err = s.stands(st)
	}
	return where, there, err
}

// site of the volume on this node, if it has one. again: a call for it is open, so that what may be there counts.
func (s *Stager) site(st state, again bool) (site, bool) {
	up := func(m registry.Mark, boot string) bool {
		return (m == registry.MarkDone || again && m != registry.MarkNone) && boot == s.kernel.Boot()
	}
	p := st.place
	if p.Stages && !up(p.Stage, p.Boot) {
		return site{}, false
	}
	if p.Stages && p.Staged.Attachment != registry.BlockDevice {
		return site{p.StagedAt, p.StagedAt, p.Staged}, !p.Staged.Access.ReaderOnly()
	}
	for _, r := range st.refs {
		if at := st.volume.Expansion.At; at != "" && at != r.Target.Host {
			continue
		}
		if up(r.Publish, r.Boot) && !r.Usage.ReadOnly && !r.Usage.Access.ReaderOnly() {
			return site{r.Target, p.StagedAt, r.Usage}, true
		}
	}
	return site{}, false
}

func (s *Stager) grow(ctx context.Context, by intent.Caller, st state, where site) error {
	v := st.volume
	secrets, err := s.Resolve(ctx, v.VolumeSpec)
	if err != nil {
		return err
	}
	request := csi.GrowRequest{
		VolumeID: v.External, Range: v.Expansion.Node, Usage: where.usage, Secrets: secrets,
		Private: csi.Private{Contexts: []map[string]string{v.Context, st.place.Publish}},
	}
	open := registry.Intent{
		Volume: v.VolumeKey(), Name: v.VolumeName(), RPC: registry.NodeExpandRPC, Operation: by.ID,
		Hash: intent.Hash(registry.NodeExpandRPC, request, where.at.Host, where.staged.Host),
	}
	refused, capacity := false, int64(0)
	err = s.Send(ctx, intent.Call{
		Intent: open, RetryUntil: by.RetryUntil,
		Before: func(view registry.View) (registry.Change, error) {
			v, known := view.VolumeByKey(open.Volume)
			if !known {
				return registry.Change{}, conflict("volume %s is not known any more", open.Name)
			}
			v.Expansion.At = where.at.Host
			return registry.Change{Put: []registry.Record{v}}, nil
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
		Done: func(view registry.View) registry.Change { return s.grown(view, open, capacity) },
		Failed: func(view registry.View, err *registry.CallError, _ bool) registry.Change {
			now, known := view.VolumeByKey(open.Volume)
			if refused = intent.Answers(err.Code) && known; !known {
				return registry.Change{}
			}
			if now.Expansion.At = where.at.Host; !refused {
				now.Expansion.At = v.Expansion.At // it has not left
			} else {
				now = refusing(now, err)
			}
			return registry.Change{Put: []registry.Record{now}}
		},
	})
	if refused && ctx.Err() == nil {
		return intent.Settled(err)
	}
	return err
}

// refusing is the volume after the node's plugin has refused. A size that cannot be, and that the plugin's controller has not made either, is
// asked for no more.
func refusing(v registry.Volume, err *registry.CallError) registry.Volume {
	never := v.Unmade() && (err.Code == "OUT_OF_RANGE" || err.Code == "INVALID_ARGUMENT")
	if v.Expansion = v.Expansion.Troubled(err); never {
		v.Expansion.Node, v.Expansion.Refused, v.Expansion.At = registry.CapacityRange{}, "", ""
	}
	return v
}

// grown is the volume without a pending expansion. What a plugin that expands on the node alone has made of it is its capacity.
func (s *Stager) grown(view registry.View, open registry.Intent, capacity int64) registry.Change {
	v, known := view.VolumeByKey(open.Volume)
	if !known {
		return registry.Change{}
	}
	if want := v.Expansion.Node.Required; v.Unmade() {
		v.Capacity, v.Expansion.Done = max(capacity, want), max(v.Expansion.Done, want)
	}
	v.Expansion = v.Expansion.Untroubled()
	v.Expansion.Node = registry.CapacityRange{}
	return registry.Change{
		Put: []registry.Record{v}, Events: []registry.Event{s.told(registry.EventNodeExpanded, open, fmt.Sprintf("%d bytes", v.Capacity))},
	}
}

// moot closes a call for a place that is gone with an earlier boot. The expansion stays pending.
func (s *Stager) moot(ctx context.Context, open registry.Intent) error {
	_, err := s.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		now, found := registry.OpenIntent(view, open.Volume)
		if !found || now.RPC != open.RPC || now.Hash != open.Hash {
			return registry.Change{}, nil
		}
		return registry.Change{Put: anew(view, open.Volume), Delete: []registry.Key{open.Key()}}, nil
	})
	return err
}

// unable records that the node's plugin does not expand, though its controller asks for it.
func (s *Stager) unable(ctx context.Context, key registry.VolumeKey, inst registry.Instance) error {
	_, err := s.State.Commit(ctx, func(view registry.View) (registry.Change, error) {
		v, known := view.VolumeByKey(key)
		if !known || !v.Expansion.Pending() {
			return registry.Change{}, nil
		}
		why := &registry.CallError{RPC: registry.NodeExpandRPC, Code: "UNIMPLEMENTED", Detail: fmt.Sprintf(
			"it was not sent: plugin %s asks for it, and its node plugin lacks %s", inst.Plugin, registry.NodeExpand)}
		v.Expansion = v.Expansion.Troubled(why)
		told := intent.Event(registry.EventStepFailed, registry.Intent{Volume: key, Name: v.VolumeName(), RPC: registry.NodeExpandRPC}, s.Now())
		told.Detail = why.Detail
		return registry.Change{Put: []registry.Record{v}, Events: []registry.Event{told}}, nil
	})
	return err
}

// anew is the volume's record where its node's plugin may be asked once more for what it has refused: the volume is mounted anew.
func anew(view registry.View, key registry.VolumeKey) []registry.Record {
	v, known := view.VolumeByKey(key)
	if !known || v.Expansion.Refused == "" && v.Expansion.At == "" {
		return nil
	}
	v.Expansion.Refused, v.Expansion.At = "", ""
	return []registry.Record{v}
}
