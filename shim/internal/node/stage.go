package node

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Stage stages the volume with its plugin. It does nothing if the plugin does not stage volumes, if the volume is
// inline or if it is staged for an equal usage. The volume must have a claim and, if its plugin attaches, be attached.
// ErrConflict names the users with another usage.
func (s *Stager) Stage(ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage) error {
	calls, _, err := s.missingStage(ctx, by, v, u)
	if err != nil {
		return err
	}
	return s.mount(ctx, calls...)
}

// mountCall is a call that mounts something at or below a directory.
type mountCall struct {
	intent.Call
	dir string
}

// mount makes the directories of the calls and sends the calls, one after the other. Then it removes each directory
// that no record names, because its call was not sent.
func (s *Stager) mount(ctx context.Context, calls ...mountCall) error {
	var send []intent.Call
	for _, c := range calls {
		defer s.removeUnusedDir(ctx, c.Intent.Volume, c.dir)
		if err := s.makeDir(c.dir); err != nil {
			return fmt.Errorf("%s: %w", c.What, err)
		}
		send = append(send, c.Call)
	}
	return s.Sender.Send(ctx, send...)
}

// missingStage returns the call that Stage has to send, if any, and the volume's records. If it returns a call, it has
// undone a publish of unknown outcome, and st.staging.Path is set.
func (s *Stager) missingStage(
	ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage,
) (calls []mountCall, st state, err error) {
	st, err = s.state(ctx, v.VolumeKey())
	if err != nil || v.Ephemeral {
		return nil, st, err
	}
	staged, err := s.stillStaged(st)
	if err != nil || staged && st.staging.Usage == u.Staging() {
		return nil, st, err
	}
	inst, err := s.AwaitFor(ctx, by, registry.RoleNode, v.VolumeKey())
	if err != nil {
		return nil, st, err
	}
	if st.staging.State == registry.MarkNone && (!inst.Fingerprint.Has(registry.StageUnstage) || s.unstagedUsers(st)) {
		return nil, st, nil // the plugin does not stage, or did not when it mounted the volume
	}
	if err := intent.Supports(inst, u); err != nil {
		return nil, st, err
	}
	if st.staging.State == registry.MarkNone {
		st.staging.Path = s.Layout.Staging(v.VolumeKey(), inst.Volumes)
		if err := s.checkNoMount(st.staging.Path.Host); err != nil {
			return nil, st, fmt.Errorf("stage volume %s: %w", v.VolumeName(), err)
		}
	}
	if err := s.undoOpenPublish(ctx, by, &st); err != nil {
		return nil, st, err
	}
	st.staging.Stages = true
	call, err := s.stageCall(ctx, by, v, u.Staging(), st)
	return []mountCall{call}, st, err
}

// undoOpenPublish undoes a publish of unknown outcome before a stage, and removes its ref from st. The publish cannot
// be repeated, because it needs the stage that is missing.
func (s *Stager) undoOpenPublish(ctx context.Context, by intent.Caller, st *state) error {
	open := st.open
	r, found := st.ref(registry.ClaimKey{Volume: open.Volume, Alloc: open.Alloc, Request: open.Request})
	if open.RPC != registry.NodePublishRPC || !found {
		return nil
	}
	if err := s.unpublish(ctx, by, r, open.Name); err != nil {
		return fmt.Errorf("undo the publish of volume %s for alloc %s as %q: %w", open.Name, r.Alloc, r.Request, err)
	}
	st.refs = slices.DeleteFunc(st.refs, func(other registry.Ref) bool { return other.ClaimKey() == r.ClaimKey() })
	return nil
}

// stillStaged reports whether the volume is still staged. If NodeStageVolume has made a mount at the staging path, that
// mount must exist, because the plugin would publish or expand the directory below. A plugin need not mount anything
// there. Then a publish of the volume must be mounted.
func (s *Stager) stillStaged(st state) (bool, error) {
	if st.staging.State != registry.MarkDone || st.staging.Boot != s.machine.Boot() {
		return false, nil
	}
	mounted, err := s.machine.Mounted(st.staging.Path.Host)
	for i := 0; err == nil && !mounted && !st.staging.Mounts && i < len(st.refs); i++ {
		if st.refs[i].Publish == registry.MarkDone {
			mounted, err = s.machine.Mounted(st.refs[i].Target.Host)
		}
	}
	return mounted, err
}

// stageCall returns the NodeStageVolume that stages the volume at the path of its staging.
func (s *Stager) stageCall(
	ctx context.Context, by intent.Caller, v registry.Volume, u registry.Usage, st state,
) (mountCall, error) {
	at := st.staging.Path
	what := fmt.Sprintf("stage volume %s", v.VolumeName())
	secrets, err := s.Resolve(ctx, v.VolumeSpec)
	if err != nil {
		return mountCall{}, fmt.Errorf("%s: %w", what, err)
	}
	request := csi.StageRequest{VolumeID: v.External, PublishContext: st.attachment.PublishContext, Usage: u,
		VolumeContext: v.Context, Secrets: secrets}
	open := registry.Intent{
		Volume: v.VolumeKey(), Name: v.VolumeName(), RPC: registry.NodeStageRPC, Operation: by.ID,
		Hash: intent.Hash(registry.NodeStageRPC, request, at.Host),
	}
	mounts, server := false, registry.TaskKey{}
	return mountCall{s.To(ctx, by, intent.Call{
		Intent: open,
		What:   what,
		Before: func(view registry.View) (registry.Change, error) { return s.stageChange(view, v, u, at) },
		Renew:  func(ctx context.Context) { request.Secrets = s.Renew(ctx, v.VolumeSpec, request.Secrets) },
		Done: func(view registry.View) registry.Change {
			p, _ := view.Staging(v.VolumeKey())
			p.State, p.Mounts, p.Server, p.Expanded = registry.MarkDone, mounts, server, mountedAnew(p.Expanded)
			return registry.Change{
				Put: []registry.Record{p}, Events: []registry.Event{s.event(registry.EventStaged, open,
					"at "+at.Host)},
			}
		},
	}, func(ctx context.Context, inst registry.Instance) error {
		request.StagingPath = inst.Volumes.InTask(at)
		if err := s.fleet.Stage(ctx, inst.InstanceKey, request); err != nil {
			return err
		}
		mounts, _ = s.machine.Mounted(at.Host) // a mount that cannot be inspected now is never reported as lost
		server = s.server(inst, at.Host)
		return nil
	}), at.Host}, nil
}

// stageChange returns the change that marks the stage as sent. It returns an error if the stage conflicts with the
// records, or if nothing may be staged on this node now.
func (s *Stager) stageChange(
	view registry.View, v registry.Volume, u registry.Usage, at registry.Tree,
) (registry.Change, error) {
	st := s.stateOf(view, v.VolumeKey())
	p := stagingOf(view, v)
	if err := s.Admitted(view); err != nil {
		return registry.Change{}, err
	}
	switch {
	case len(st.claims) == 0:
		return registry.Change{}, conflict("volume %s has no claim; claim it first", v.VolumeName())
	case s.unattached(view, st, v):
		return registry.Change{}, conflict("volume %s is not attached; it has to be attached first", v.VolumeName())
	case p.State != registry.MarkNone && p.Usage != u && len(st.refs) > 0:
		return registry.Change{}, conflict(
			"volume %s is staged for another usage (%s) and in use by %s; ask for the same, or wait until they are "+
				"gone", v.VolumeName(), p.Usage, st.users())
	case p.State != registry.MarkNone && p.Usage != u:
		return registry.Change{}, conflict("volume %s is staged for another usage (%s); it has to be unstaged first",
			v.VolumeName(), p.Usage)
	}
	if p.State == registry.MarkNone || p.Boot != s.machine.Boot() { // otherwise the mount may be an older one
		p.Expanded = p.Expanded.Mounting(st.volume)
	}
	p.State, p.Stages, p.Usage, p.Path, p.Boot = registry.MarkSent, true, u, at, s.machine.Boot()
	return registry.Change{Put: []registry.Record{p}}, nil
}

// unattached reports whether the volume lacks an attachment that its plugin needs. While no controller is registered,
// an attachment that the plugin may need counts as needed. A volume that was mounted without an attachment needs none.
func (s *Stager) unattached(view registry.View, st state, v registry.Volume) bool {
	attachment := st.attachment.State
	if attachment != registry.MarkNone {
		return attachment != registry.MarkDone
	}
	if s.usedHere(view, v.VolumeKey()) {
		return false
	}
	if inst, found := s.Plugins.Find(registry.RoleController, v.Plugin); found && !v.Ephemeral {
		return inst.Fingerprint.Has(registry.AttachDetach)
	}
	if v.Unattached || v.Ephemeral || s.Sender.Node != "" { // in a cluster, Attach has asked the plugin's executor
		return false
	}
	return v.Created || s.Expected != nil && s.Expected(view, registry.RoleController, v.Plugin)
}

// Unstage unstages the volume with its plugin. It does nothing if the volume is not staged, or while it is published.
func (s *Stager) Unstage(ctx context.Context, by intent.Caller, key registry.VolumeKey) error {
	st, err := s.state(ctx, key)
	if err != nil || st.staging.State == registry.MarkNone || len(st.refs) > 0 {
		return err
	}
	if _, err := s.Await(ctx, by, registry.RoleNode, key.Plugin); err != nil {
		return err
	}
	return s.Sender.Send(ctx, s.unstageCall(ctx, by, st.staging))
}

// unstageCall returns the NodeUnstageVolume for the staging.
func (s *Stager) unstageCall(ctx context.Context, by intent.Caller, p registry.Staging) intent.Call {
	request := csi.UnstageRequest{VolumeID: p.Volume.External, Private: s.private(p.Volume)}
	open := registry.Intent{
		Volume: p.Volume, Name: p.Name, RPC: registry.NodeUnstageRPC, Operation: by.ID,
		Hash: intent.Hash(registry.NodeUnstageRPC, request, p.Path.Host),
	}
	left := ""
	return s.To(ctx, by, intent.Call{
		Intent: open,
		What:   fmt.Sprintf("unstage volume %s", p.Name),
		Before: func(view registry.View) (registry.Change, error) {
			st := s.stateOf(view, p.Volume)
			if len(st.refs) > 0 {
				return registry.Change{}, conflict("volume %s is still used by %s", p.Name, st.users())
			}
			st.staging.State = registry.MarkSent
			return registry.Change{Put: []registry.Record{st.staging}}, nil
		},
		Done: func(registry.View) registry.Change {
			return registry.Change{
				Delete: []registry.Key{p.Key()}, Events: []registry.Event{s.event(registry.EventUnstaged, open, left)},
			}
		},
	}, func(ctx context.Context, inst registry.Instance) error {
		request.StagingPath = inst.Volumes.InTask(p.Path)
		answer := s.fleet.Unstage(ctx, inst.InstanceKey, request)
		if err := s.awaitUnmounted(ctx, open.RPC, inst.InstanceKey, p.Path.Host, answer); err != nil {
			return err
		}
		left = s.removeDirs(p.Path.Host)
		return nil
	})
}

// CheckUnmounted returns nil if the volume is not mounted for the claim on this node, else an ErrConflict.
func (s *Stager) CheckUnmounted(view registry.View, key registry.ClaimKey) error {
	st := s.stateOf(view, key.Volume)
	r, published := st.ref(key)
	switch {
	case published:
		return conflict("volume %s is still published for alloc %s at %s; it has to be unpublished first",
			st.name(), key.Alloc, r.Target.Host)
	case st.staging.State != registry.MarkNone && len(st.refs) == 0 && len(st.claims) <= 1:
		return conflict("volume %s is still staged at %s, and alloc %s is its last user; it has to be unstaged first",
			st.staging.Name, st.staging.Path.Host, key.Alloc)
	}
	return nil
}

// checkNoMount returns an ErrConflict if something is mounted at a path that no record names: a plugin might take that
// mount for its own.
func (s *Stager) checkNoMount(path string) error {
	mounted, err := s.machine.Mounted(path)
	if err == nil && mounted {
		err = conflict("an unknown mount is in the way at %s; run holdfast doctor to inspect it, "+
			"and holdfast doctor --repair to unmount it if unused", path)
	}
	return err
}

// makeDir makes a directory, unless something is mounted there: a mount must not be touched.
func (s *Stager) makeDir(path string) error {
	if mounted, err := s.machine.Mounted(path); err != nil || mounted {
		return err
	}
	return s.machine.MakeDir(path)
}

// removeUnusedDir removes dir if no record names it, because its call was refused before it was sent. Package doctor
// finds directories that cannot be removed now.
func (s *Stager) removeUnusedDir(ctx context.Context, key registry.VolumeKey, dir string) {
	st, err := s.state(context.WithoutCancel(ctx), key)
	known := st.staging.State != registry.MarkNone && st.staging.Path.Host == dir
	for _, r := range st.refs {
		known = known || filepath.Dir(r.Target.Host) == dir
	}
	if err == nil && !known {
		_ = s.machine.RemoveDir(dir)
	}
}

// removeDirs removes empty directories, children first, and describes those that it could not remove. The release of
// the volume succeeds even if directories remain; package doctor reports them.
func (s *Stager) removeDirs(paths ...string) string {
	left := ""
	for _, path := range paths {
		if err := s.machine.RemoveDir(path); err != nil {
			left += fmt.Sprintf("left %s behind: %v; ", path, err)
		}
	}
	return left
}
