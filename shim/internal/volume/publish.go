package volume

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Publish has the plugin publish the volume for one request of an alloc, and returns where. What is published already for an equal
// usage stays as it is. The volume is claimed for the request and, where its plugin stages, is staged.
func (s *Stager) Publish(
	ctx context.Context, call registry.Call, v registry.Volume, key registry.ClaimKey, u registry.Usage,
) (registry.Tree, error) {
	st, err := s.state(ctx, key.Volume)
	if err != nil {
		return registry.Tree{}, err
	}
	old, _ := st.ref(key)
	if old.Publish == registry.MarkDone && old.Usage == u && old.Boot == s.kernel.Boot() {
		if stands, err := s.published(old); err != nil || stands {
			return old.Target, err
		}
	}
	inst, err := s.await(ctx, v.Plugin)
	if err != nil {
		return registry.Tree{}, err
	}
	if err := demands(inst, u.Access); err != nil {
		return registry.Tree{}, err
	}
	r := registry.Ref{
		Volume: key.Volume, Alloc: key.Alloc, Request: key.Request, Usage: u, Publish: registry.MarkSent, Boot: s.kernel.Boot(),
		Target: old.Target,
	}
	if old.Publish == registry.MarkNone {
		r.Target = s.Layout.Target(key, inst.Volumes)
	}
	if err := s.publish(ctx, call, v, r, st, inst); err != nil {
		return registry.Tree{}, fmt.Errorf("publish volume %s for alloc %s as %q: %w",
			v.VolumeName(), key.Alloc, key.Request, err)
	}
	return r.Target, nil
}

// published asks the mount table. Only a file system has to be a mount; a block device may be a node that the plugin made.
func (s *Stager) published(r registry.Ref) (bool, error) {
	if r.Usage.Attachment != registry.FileSystem {
		return true, nil
	}
	return s.mounted(r.Target.Host, true)
}

func (s *Stager) publish(
	ctx context.Context, call registry.Call, v registry.Volume, r registry.Ref, st state, inst registry.Instance,
) error {
	stages := st.place.Stages || inst.Fingerprint.Has(registry.StageUnstage) && !unstagedUsers(st)
	secrets, err := s.resolve(ctx, v)
	if err != nil {
		return err
	}
	request := PublishRequest{VolumeID: v.External, PublishContext: st.place.Publish, Usage: r.Usage, VolumeContext: v.Context, Secrets: secrets}
	if err := s.makeDir(filepath.Dir(r.Target.Host)); err != nil {
		return err
	}
	open := s.intent(registry.NodePublishRPC, call, r, v.VolumeName())
	open.Hash = intent.Hash(open.RPC, request, r.Target.Host, st.place.StagedAt.Host)
	defer s.tidyUnused(ctx, r.Volume, filepath.Dir(r.Target.Host))
	return s.drive(ctx, intent.Call{
		Intent: open,
		Before: func(view registry.View) (registry.Change, error) { return s.publishing(view, v, r, stages) },
		Do: func(ctx context.Context) error {
			inst, err := s.await(ctx, v.Plugin)
			if err != nil {
				return err
			}
			request.TargetPath = pathAt(inst, r.Target)
			if stages {
				request.StagingPath = pathAt(inst, st.place.StagedAt)
			}
			if err := s.node.Publish(ctx, inst.InstanceKey, request); err != nil {
				return err
			}
			return s.appeared(inst.InstanceKey, r)
		},
		Done: func(view registry.View) registry.Change {
			r.Publish = registry.MarkDone
			return registry.Change{Put: []registry.Record{r}, Events: []registry.Event{s.told(registry.EventPublished, open, "at "+r.Target.Host)}}
		},
	})
}

// unstagedUsers says whether the volume was published for others without being staged: by a plugin that did not stage then.
func unstagedUsers(st state) bool {
	return st.place.Stage == registry.MarkNone && len(st.refs) > 0
}

// appeared is nil if something is mounted where the plugin said so.
func (s *Stager) appeared(at registry.InstanceKey, r registry.Ref) error {
	mounted, err := s.published(r)
	if err != nil || mounted {
		return err
	}
	return lied(registry.NodePublishRPC, at, "the plugin answered OK, but nothing is mounted at %s on the host: is the plugin's mount of %s bidirectional?",
		r.Target.Host, filepath.Dir(r.Target.Host))
}

// publishing makes the ref a record, unless it contradicts what is.
func (s *Stager) publishing(view registry.View, v registry.Volume, r registry.Ref, stages bool) (registry.Change, error) {
	st := stateOf(view, r.Volume)
	p := st.place
	old, found := st.ref(r.ClaimKey())
	switch {
	case !st.claimed(r.ClaimKey()):
		return registry.Change{}, conflict("volume %s is not claimed for it", v.VolumeName())
	case s.unattached(view, st, v):
		return registry.Change{}, conflict("volume %s is not attached; it has to be attached first", v.VolumeName())
	case stages && (p.Stage != registry.MarkDone || p.Boot != s.kernel.Boot()):
		return registry.Change{}, conflict("volume %s is not staged; it has to be staged first", v.VolumeName())
	case stages && p.Staged != r.Usage.Staging():
		return registry.Change{}, conflict("volume %s is staged for another usage: %s, not %s", v.VolumeName(), p.Staged, r.Usage)
	case found && old.Usage != r.Usage:
		return registry.Change{}, conflict("volume %s is published for it already, for another usage: %s, not %s",
			v.VolumeName(), old.Usage, r.Usage)
	}
	return registry.Change{Put: []registry.Record{r}}, nil
}

// Unpublish has the plugin unpublish what was published for the claim, and forgets it. Without a ref there is nothing to do.
func (s *Stager) Unpublish(ctx context.Context, call registry.Call, key registry.ClaimKey) error {
	st, err := s.state(ctx, key.Volume)
	if err != nil {
		return err
	}
	r, found := st.ref(key)
	if !found {
		return nil
	}
	inst, err := s.await(ctx, key.Volume.Plugin)
	if err != nil {
		return err
	}
	name, err := s.settled(ctx, call, st, inst)
	if err != nil {
		return err
	}
	if err := s.unpublish(ctx, call, r, name); err != nil {
		return fmt.Errorf("unpublish volume %s for alloc %s as %q: %w", name, key.Alloc, key.Request, err)
	}
	return nil
}

// settled waits for the certain answer of a stage that was repeated under the publishes which stand on it: nothing but the same call
// again is legal then, as its undo would take the volume from under them. It returns the volume's name, for people.
func (s *Stager) settled(ctx context.Context, call registry.Call, st state, inst registry.Instance) (name registry.VolumeName, err error) {
	var v registry.Volume
	var staging bool
	key := st.refs[0].Volume
	err = s.log.View(ctx, func(view registry.View) error {
		v, _ = view.VolumeByKey(key)
		open, _ := view.Intent(key)
		staging = open.RPC == registry.NodeStageRPC
		return nil
	})
	if err != nil || !staging {
		return v.VolumeName(), err
	}
	if err = s.stage(ctx, call, v, st.place.Staged, st.place, inst); errors.Is(err, registry.ErrUncertain) {
		return v.VolumeName(), fmt.Errorf("stage volume %s: %w", v.VolumeName(), err)
	}
	return v.VolumeName(), nil // one that failed for certain is undone after the publishes
}

func (s *Stager) unpublish(ctx context.Context, call registry.Call, r registry.Ref, name registry.VolumeName) error {
	request := UnpublishRequest{
		VolumeID: r.Volume.External, Private: func(ctx context.Context) Private { return s.private(ctx, r.Volume) },
	}
	open := s.intent(registry.NodeUnpublishRPC, call, r, name)
	open.Hash = intent.Hash(open.RPC, request, r.Target.Host)
	left := ""
	return s.drive(ctx, intent.Call{
		Intent: open,
		Before: func(view registry.View) (registry.Change, error) {
			r.Publish = registry.MarkSent
			return registry.Change{Put: []registry.Record{r}}, nil
		},
		Do: func(ctx context.Context) error {
			inst, err := s.await(ctx, r.Volume.Plugin)
			if err != nil {
				return err
			}
			request.TargetPath = pathAt(inst, r.Target)
			answer := s.node.Unpublish(ctx, inst.InstanceKey, request)
			if err := s.gone(open.RPC, inst.InstanceKey, r.Target.Host, answer); err != nil {
				return err
			}
			left = s.tidyTarget(r)
			return nil
		},
		Done: func(registry.View) registry.Change {
			return registry.Change{
				Delete: []registry.Key{r.Key()}, Events: []registry.Event{s.told(registry.EventUnpublished, open, left)},
			}
		},
	})
}

// tidyTarget removes the target's parent. A plugin should have removed the target; many leave an empty directory.
func (s *Stager) tidyTarget(r registry.Ref) string {
	parent := filepath.Dir(r.Target.Host)
	if s.kernel.RemoveDir(parent) == nil {
		return ""
	}
	return s.tidy(r.Target.Host, parent)
}

// intent is the intent of a call for one publish.
func (s *Stager) intent(rpc registry.RPC, call registry.Call, r registry.Ref, name registry.VolumeName) registry.Intent {
	return registry.Intent{
		Volume: r.Volume, Name: name, RPC: rpc, Alloc: r.Alloc, Request: r.Request, Operation: call.ID,
	}
}
