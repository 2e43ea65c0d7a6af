package node

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// maxStacked bounds the mounts on top of each other that Abandon unmounts at one path.
const maxStacked = 16

// mountPoint is a mount point of a claim on this node, with the call that would unmount it.
type mountPoint struct {
	path string
	rpc  registry.RPC // empty: a part, which the shim has mounted
}

// mountPoints lists what a release by force takes down for a claim, uppermost mount first. If the claim is the last one
// on its volume (last), the list includes the staging, which all users of the volume share.
func (st state) mountPoints(key registry.ClaimKey, last bool) (list []mountPoint) {
	if r, found := st.ref(key); found {
		for _, p := range r.Parts {
			list = append(list, mountPoint{path: p.At})
		}
		list = append(list, mountPoint{r.Target.Host, registry.NodeUnpublishRPC})
	}
	if last && st.staging.State != registry.MarkNone {
		list = append(list, mountPoint{st.staging.Path.Host, registry.NodeUnstageRPC})
	}
	return list
}

// AbandonSteps returns what a release of the claim by force would do on this node. going has the mount points that are
// unmounted anyway: a mount at one of them is no user of another mount. AbandonSteps adds those of the claim.
func (s *Stager) AbandonSteps(
	ctx context.Context, key registry.ClaimKey, last bool, going map[string]bool,
) (steps []registry.ReleaseStep, err error) {
	st, err := s.state(ctx, key.Volume)
	if err != nil {
		return nil, err
	}
	reasons := intent.FeasibleAt(s.Plugins, registry.RoleNode, key.Volume.Plugin, registry.Usage{})
	for _, m := range st.mountPoints(key, last) {
		step := registry.ReleaseStep{Volume: st.name(), Request: key.Request, RPC: m.rpc, Target: m.path}
		going[m.path] = true
		switch {
		case m.rpc != "" && len(reasons) == 0:
			step.Action, step.Detail = registry.ReleaseSend, "skipped if it fails"
			steps = append(steps, step)
			continue
		case m.rpc != "":
			step.Action, step.Detail = registry.ReleaseSkip, reasons[0].Detail
			steps = append(steps, step)
		}
		mounted, err := s.machine.Mounted(m.path)
		if err != nil {
			return nil, err
		}
		if !mounted {
			continue
		}
		step.RPC, step.Action, step.Detail = "", registry.ReleaseUnmount, ""
		users, err := s.usersOf(m.path, going)
		if err != nil {
			return nil, err
		}
		if len(users) > 0 {
			step.Action, step.Detail = registry.ReleaseRefuse,
				fmt.Sprintf("%s is in use by %s: stop that first", m.path, strings.Join(users, ", "))
		}
		steps = append(steps, step)
	}
	return steps, nil
}

// name returns the volume's name, even if the volume has no record any more.
func (st state) name() registry.VolumeName {
	if st.volume.ID == "" {
		return st.staging.Name
	}
	return st.volume.VolumeName()
}

// usersOf describes the users of the mount at a path. It ignores mounts at paths in going.
func (s *Stager) usersOf(path string, going map[string]bool) (texts []string, err error) {
	users, err := s.machine.Users([]string{path})
	for _, u := range users[path] {
		if u.Mount == "" || !going[u.Mount] {
			texts = append(texts, u.Text)
		}
	}
	if err != nil {
		err = fmt.Errorf("find the users of %s: %w", path, err)
	}
	return texts, err
}

// Abandon takes down a claim's mounts on this node without the plugin, after a person has confirmed that. It unmounts
// mounts that nothing uses, and then deletes the claim's records and open calls. With last it also takes down the
// staging, which the users of the volume share. A mount in use stays with all records, and ErrConflict names its users.
// why, the reason for the release by force, is for people. The caller holds the volume's lock.
func (s *Stager) Abandon(ctx context.Context, key registry.ClaimKey, last bool, by registry.Forced, why string) error {
	st, err := s.state(ctx, key.Volume)
	if err != nil {
		return err
	}
	list := st.mountPoints(key, last)
	if len(list) == 0 {
		return s.forget(ctx, key, last, nil)
	}
	if r, found := st.ref(key); found {
		if err := s.unmountParts(ctx, r); err != nil {
			return err
		}
	}
	if err := s.markUncertain(ctx, key, last); err != nil {
		return err
	}
	list = slices.DeleteFunc(list, func(m mountPoint) bool { return m.rpc == "" })
	var skipped []string
	for _, m := range list {
		if err := s.unmountUnused(ctx, m.path); err != nil {
			return err
		}
		skipped = append(skipped, string(m.rpc))
	}
	e := registry.Event{
		Kind: registry.EventAbandoned, Role: registry.RoleNode, Plugin: key.Volume.Plugin, Alloc: key.Alloc,
		Volume: st.name(), External: key.Volume.External, Request: key.Request, At: s.Now(),
		Detail: fmt.Sprintf("without %s, by %s: %s", strings.Join(skipped, " and "), by.By, why),
	}
	if err := s.forget(ctx, key, last, []registry.Event{e}); err != nil {
		return err
	}
	for _, m := range list { // package doctor finds directories that remain
		s.removeDirs(m.path)
		if m.rpc == registry.NodeUnpublishRPC {
			s.removeDirs(filepath.Dir(m.path))
		}
	}
	return nil
}

// markUncertain records that the mounts may be gone, before they are unmounted.
func (s *Stager) markUncertain(ctx context.Context, key registry.ClaimKey, last bool) error {
	_, err := registry.Ensure(ctx, s.State, func(view registry.View) (change registry.Change, err error) {
		st := s.stateOf(view, key.Volume)
		if r, found := st.ref(key); found && r.Publish == registry.MarkDone {
			r.Publish = registry.MarkSent
			change.Put = append(change.Put, r)
		}
		if last && st.staging.State == registry.MarkDone {
			st.staging.State = registry.MarkSent
			change.Put = append(change.Put, st.staging)
		}
		return change, nil
	})
	return err
}

// unmountUnused unmounts the mounts at a path, unless something uses them.
func (s *Stager) unmountUnused(ctx context.Context, path string) error {
	for range maxStacked {
		mounted, err := s.machine.Mounted(path)
		if err != nil || !mounted {
			return err
		}
		users, err := s.usersOf(path, nil)
		if err != nil {
			return err
		}
		if len(users) > 0 {
			return conflict("%s is in use by %s: stop that first", path, strings.Join(users, ", "))
		}
		if err := s.machine.Unmount(ctx, path); err != nil {
			return err
		}
	}
	return conflict("%s is still mounted after it was unmounted %d times; run holdfast doctor", path, maxStacked)
}

// forget deletes the node's records of a claim, and its open call. With last it also deletes the staging and any open
// call of the volume. It adds the events only if it deletes something.
func (s *Stager) forget(ctx context.Context, key registry.ClaimKey, last bool, events []registry.Event) error {
	_, err := registry.Ensure(ctx, s.State, func(view registry.View) (change registry.Change, err error) {
		st := s.stateOf(view, key.Volume)
		if r, found := st.ref(key); found {
			change.Delete = append(change.Delete, r.Key())
		}
		if last && st.staging.Volume == key.Volume {
			change.Delete = append(change.Delete, st.staging.Key())
		}
		if open := st.open; open.RPC != "" && (last || open.Alloc == key.Alloc && open.Request == key.Request) {
			change.Delete = append(change.Delete, open.Key())
		}
		if len(change.Delete) > 0 {
			change.Events = events
		}
		return change, nil
	})
	return err
}
