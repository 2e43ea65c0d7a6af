package controller

import (
	"context"
	"slices"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// OpenCallsAt returns the open calls for volumes and snapshots of a plugin that may run at a node.
func OpenCallsAt(view registry.View, plugin registry.PluginID, node registry.NodeName) (list []registry.LateCall) {
	for _, open := range view.Intents() {
		if open.Volume.Plugin == plugin && slices.Contains(open.Senders, node) {
			list = append(list, view.LateCallOf(open))
		}
	}
	for _, snap := range view.SnapshotRecords() {
		if snap.Plugin == plugin && snap.State.Unfinished() && slices.Contains(snap.Senders, node) {
			list = append(list, lateSnapshot(snap))
		}
	}
	for i := range list {
		list[i].Node = node
	}
	return list
}

// lateSnapshot returns the call for the current state of the snapshot as a late call.
func lateSnapshot(snap registry.VolumeSnapshot) registry.LateCall {
	rpc := changingRPC(snap)
	return registry.LateCall{Plugin: snap.Plugin, For: nameOf(snap.SnapshotSpec).String(), RPC: rpc,
		Hash: intent.Hash(rpc, snap.Name, snap.VolumeKeys(), snap.Parameters), Snapshot: &snap}
}

// Repeat repeats, at an instance of the plugin on this node, a call that this node has begun as a former executor. It
// stores nothing. It returns nil once an answer of the instance shows that the call has ended there.
func (m *Controller) Repeat(ctx context.Context, at registry.Instance, late registry.LateCall) error {
	if err := repeatable(late); err != nil {
		return err
	}
	v, by, policy := *late.Volume, intent.Caller{}, intent.PolicyOf(late.RPC)
	r := *m
	r.Plugins, r.Late = oneInstance{m.Plugins, at}, &late
	switch {
	case late.RPC == registry.CreateVolumeRPC:
		now, err := m.volume(ctx, v.VolumeName())
		if err != nil {
			return err // no record would name what the call makes
		}
		return r.create(ctx, by.Call, now.VolumeSpec, attempt{})
	case late.RPC == registry.DeleteVolumeRPC:
		if err := m.checkNotRegistered(ctx, v); err != nil {
			return err
		}
		return r.sendDelete(ctx, by.Call, v, nil, policy, 0)
	case late.RPC.Alters():
		return r.repeatAlteration(ctx, by, v, policy, late.RPC)
	case late.Attachment == nil:
		return errRecordsGone(late)
	case late.RPC == registry.ControllerPublishRPC:
		to := intent.AttachTo{Node: late.Attachment.Node, ID: late.Attachment.NodeID}
		return r.attach(ctx, by, v, late.Attachment.Usage, to)
	case late.RPC == registry.ControllerUnpublishRPC:
		return r.detach(ctx, by, *late.Attachment)
	}
	return registry.Errorf(registry.ErrUnsupported, "%s of %s cannot be repeated: this shim does not know the call",
		late.RPC, late.For)
}

// checkNotRegistered returns an error if a deleted volume has been registered again.
func (m *Controller) checkNotRegistered(ctx context.Context, v registry.Volume) error {
	return m.State.View(ctx, func(view registry.View) error {
		if now, found := view.VolumeByKey(v.VolumeKey()); found && now.State != registry.VolumeDeleting {
			return registry.Errorf(registry.ErrConflict,
				"DeleteVolume of %s is not repeated: it has since been registered as %s",
				v.VolumeName(), now.VolumeName())
		}
		return nil
	})
}

// Repeat repeats a call for a snapshot, as Controller.Repeat does for volumes.
func (s *Snapshots) Repeat(ctx context.Context, at registry.Instance, late registry.LateCall) error {
	if err := repeatable(late); err != nil {
		return err
	}
	if err := s.volumes.State.View(ctx, func(view registry.View) error {
		if late.Snapshot.State != registry.SnapshotDeleting && view.Get(late.Snapshot.Key()) == nil {
			return errRecordsGone(late) // nothing would name the snapshot that the call makes
		}
		return nil
	}); err != nil {
		return err
	}
	secrets, err := s.secrets(ctx, *late.Snapshot)
	if err != nil {
		return err
	}
	return s.volumes.Sender.Repeat(ctx, late.Snapshot.Plugin, late, func(ctx context.Context) error {
		_, err := s.send(ctx, late.RPC, *late.Snapshot, at.InstanceKey, secrets)
		return err
	})
}

// repeatable returns an error if the call must not be repeated.
func repeatable(late registry.LateCall) error {
	switch {
	case late.Volume == nil && late.Snapshot == nil:
		return errRecordsGone(late)
	case late.Failed && (late.RPC == registry.DeleteVolumeRPC || late.RPC == registry.DeleteSnapshotRPC ||
		late.RPC == registry.DeleteGroupSnapshotRPC):
		return registry.Errorf(registry.ErrConflict, "%s of %s was refused at another node, and is not repeated: "+
			"it might succeed now", late.RPC, late.For)
	}
	return nil
}

func errRecordsGone(late registry.LateCall) error {
	return registry.Errorf(registry.ErrConflict, "%s of %s cannot be repeated: its records are gone",
		late.RPC, late.For)
}

// oneInstance is a table of plugins with one instance, for which each look-up finds that instance.
type oneInstance struct {
	intent.Plugins
	at registry.Instance
}

func (o oneInstance) Find(registry.Role, registry.PluginID) (registry.Instance, bool) {
	return o.at, true
}

func (o oneInstance) Await(context.Context, registry.Role, registry.PluginID) (registry.Instance, error) {
	return o.at, nil
}

func (o oneInstance) Members(registry.Role, registry.PluginID) []registry.Instance {
	return []registry.Instance{o.at}
}
