package node

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Publish publishes the volume for one request of an alloc, and returns where. If the plugin stages volumes and this
// one is not staged, Publish stages it first. Publish does nothing if the volume is published for an equal usage. The
// volume must be claimed for the request. then returns a change for the commit that ends the publish; nil: none.
func (s *Stager) Publish(
	ctx context.Context, by intent.Caller, v registry.Volume, key registry.ClaimKey, u registry.Usage,
	then func(registry.View, hooks.Published) (registry.Change, error),
) (at hooks.Published, err error) {
	calls, st, err := s.missingStage(ctx, by, v, u)
	if err != nil {
		return at, err
	}
	r, _ := st.ref(key)
	if r.Publish == registry.MarkDone && r.Usage == u && r.Boot == s.machine.Boot() {
		at, there, err := s.findPublished(ctx, r)
		if err == nil && there {
			err = s.mount(ctx, calls...) // the stage may be missing
		}
		if err != nil || there {
			return at, err
		}
	}
	inst, err := s.AwaitFor(ctx, by, registry.RoleNode, key.Volume)
	if err != nil {
		return at, err
	}
	if err := intent.Supports(inst, u); err != nil {
		return at, err
	}
	if r.Publish == registry.MarkNone {
		r = registry.Ref{Volume: key.Volume, Alloc: key.Alloc, Request: key.Request,
			Target: s.Layout.Target(key, inst.Volumes)}
		if err := s.checkNoMount(r.Target.Host); err != nil {
			return at, fmt.Errorf("publish volume %s for alloc %s as %q: %w", v.VolumeName(), key.Alloc, key.Request,
				err)
		}
	}
	r.Usage = u
	call, err := s.publishCall(ctx, by, v, r, st, inst, &at)
	if err != nil {
		return at, err
	}
	if then != nil {
		call.Then = []registry.Decision{func(view registry.View) (registry.Change, error) { return then(view, at) }}
	}
	err = s.mount(ctx, append(calls, call)...)
	return at, err
}

// findPublished returns where the volume is published, and whether it is still there. It looks for a file system in the
// mount table, but for a block device at the path: the plugin may have made a device node without a mount.
func (s *Stager) findPublished(ctx context.Context, r registry.Ref) (at hooks.Published, there bool, err error) {
	at = hooks.Published{Target: r.Target, Usage: r.Usage}
	if r.Usage.Attachment != registry.BlockDevice {
		there, err = s.machine.Mounted(r.Target.Host)
		return at, there, err
	}
	found, err := s.machine.Inspect(ctx, r.Target.Host)
	if err != nil {
		return at, false, err
	}
	at.Device = found[r.Target.Host].Device
	return at, found[r.Target.Host].Block, nil
}

// publishCall returns the NodePublishVolume for the ref. When the call is done, at says where the volume is published.
// If the plugin stages, the call needs the staging; publishChange checks that when the call begins.
func (s *Stager) publishCall(
	ctx context.Context, by intent.Caller, v registry.Volume, r registry.Ref, st state, inst registry.Instance,
	at *hooks.Published,
) (mountCall, error) {
	what := fmt.Sprintf("publish volume %s for alloc %s as %q", v.VolumeName(), r.Alloc, r.Request)
	r.Publish, r.Boot, r.Trouble, r.Troubled = registry.MarkSent, s.machine.Boot(), "", time.Time{}
	server := registry.TaskKey{}
	stages := !v.Ephemeral && (st.staging.Stages || inst.Fingerprint.Has(registry.StageUnstage) && !s.unstagedUsers(st))
	secrets, err := s.Resolve(ctx, v.VolumeSpec)
	if err != nil {
		return mountCall{}, fmt.Errorf("%s: %w", what, err)
	}
	request := csi.PublishRequest{VolumeID: v.External, PublishContext: st.attachment.PublishContext, Usage: r.Usage,
		VolumeContext: contextOf(v), Secrets: secrets}
	open := s.intent(registry.NodePublishRPC, by, r, v.VolumeName())
	open.Hash = intent.Hash(open.RPC, request, r.Target.Host, st.staging.Path.Host)
	return mountCall{s.To(ctx, by, intent.Call{
		Intent: open,
		What:   what,
		Before: func(view registry.View) (registry.Change, error) { return s.publishChange(view, v, r, stages) },
		Renew:  func(ctx context.Context) { request.Secrets = s.Renew(ctx, v.VolumeSpec, request.Secrets) },
		Done: func(view registry.View) registry.Change {
			done := r
			done.Publish, done.Server = registry.MarkDone, server
			put := []registry.Record{done}
			// the first mount of a volume that is not staged
			if p, found := view.Staging(r.Volume); found && !stages && !s.publishedForOther(view, r) {
				p.Expanded = mountedAnew(p.Expanded)
				put = append(put, p)
			}
			return registry.Change{Put: put, Events: []registry.Event{s.event(registry.EventPublished, open,
				"at "+r.Target.Host)}}
		},
	}, func(ctx context.Context, inst registry.Instance) (err error) {
		request.TargetPath = inst.Volumes.InTask(r.Target)
		if stages {
			request.StagingPath = inst.Volumes.InTask(st.staging.Path)
		}
		if err := s.fleet.Publish(ctx, inst.InstanceKey, request); err != nil {
			return err
		}
		*at, err = s.awaitPublished(ctx, inst.InstanceKey, r)
		server = s.server(inst, r.Target.Host)
		return err
	}), filepath.Dir(r.Target.Host)}, nil
}

// publishedForOther reports whether, since the last boot, the volume may also have been published for another request.
func (s *Stager) publishedForOther(view registry.View, r registry.Ref) bool {
	return slices.ContainsFunc(view.Refs(r.Volume), func(other registry.Ref) bool {
		return other.ClaimKey() != r.ClaimKey() && other.Publish != registry.MarkNone && other.Boot == s.machine.Boot()
	})
}

// unstagedUsers reports whether the volume is published without being staged, because the plugin did not stage volumes
// then. A publish of an earlier boot does not count.
func (s *Stager) unstagedUsers(st state) bool {
	return st.staging.State == registry.MarkNone && slices.ContainsFunc(st.refs, s.sinceBoot)
}

// sinceBoot reports whether a publish is one of this boot.
func (s *Stager) sinceBoot(r registry.Ref) bool { return r.Boot == s.machine.Boot() }

// inlineKey is the volume_context key with which Kubernetes marks inline volumes.
const inlineKey = "csi.storage.k8s.io/ephemeral"

// contextOf returns the volume_context, which also marks inline volumes: CSI has no field for that.
func contextOf(v registry.Volume) map[string]string {
	if !v.Ephemeral {
		return v.Context
	}
	out := maps.Clone(v.Context)
	if out == nil {
		out = map[string]string{}
	}
	out[inlineKey] = "true"
	return out
}

// awaitPublished waits for the mount or device of the publish, and returns where it is.
func (s *Stager) awaitPublished(
	ctx context.Context, by registry.InstanceKey, r registry.Ref,
) (at hooks.Published, err error) {
	there, err := pollMounts(ctx, func() (there bool, err error) {
		at, there, err = s.findPublished(ctx, r)
		return there, err
	})
	switch {
	case err != nil || there:
	case r.Usage.Attachment == registry.BlockDevice:
		err = csi.AnswerError(registry.NodePublishRPC, by,
			"the plugin answered OK, but there was no block device at %s on the host %v later; its log may say why",
			r.Target.Host, mountWait)
	default:
		err = csi.AnswerError(registry.NodePublishRPC, by,
			"the plugin answered OK, but nothing was mounted at %s on the host %v later: "+
				"either its mount failed or takes longer (see its log), "+
				"or the host cannot see it (the plugin's mount of %s has to be bidirectional)",
			r.Target.Host, mountWait, filepath.Dir(r.Target.Host))
	}
	return at, err
}

// publishChange returns the change that records the ref. It returns an error if the publish conflicts with the records,
// or if nothing may be published on this node now.
func (s *Stager) publishChange(
	view registry.View, v registry.Volume, r registry.Ref, stages bool,
) (registry.Change, error) {
	st := s.stateOf(view, r.Volume)
	p := st.staging
	old, found := st.ref(r.ClaimKey())
	if err := s.Admitted(view); err != nil {
		return registry.Change{}, err
	}
	switch {
	case !st.hasClaim(r.ClaimKey()):
		return registry.Change{}, conflict("volume %s is not claimed for the request", v.VolumeName())
	case s.unattached(view, st, v):
		return registry.Change{}, conflict("volume %s is not attached; it has to be attached first", v.VolumeName())
	case stages && (p.State != registry.MarkDone || p.Boot != s.machine.Boot()):
		return registry.Change{}, conflict("volume %s is not staged; it has to be staged first", v.VolumeName())
	case stages && p.Usage != r.Usage.Staging():
		return registry.Change{}, conflict("volume %s is staged for another usage: %s, not %s", v.VolumeName(), p.Usage,
			r.Usage)
	case found && old.Usage != r.Usage:
		return registry.Change{}, conflict("volume %s is already published for the request with another usage: %s, "+
			"not %s", v.VolumeName(), old.Usage, r.Usage)
	}
	change := registry.Change{Put: []registry.Record{r}}
	mayBeMounted := stages || slices.ContainsFunc(st.refs, s.sinceBoot)
	if n := p.Expanded.Mounting(st.volume); !mayBeMounted && n != p.Expanded {
		p = stagingOf(view, v)
		p.Expanded = n
		change.Put = append(change.Put, p)
	}
	return change, nil
}

// CheckUnused returns ErrConflict while a process with another mount namespace uses the volume that is published for
// the claim: such a use does not keep the plugin from unmounting its own mount. Uses below the mount root do not count:
// that namespace is a private copy of the shim's, and has only inherited the mount.
func (s *Stager) CheckUnused(ctx context.Context, key registry.ClaimKey) error {
	st, err := s.state(ctx, key.Volume)
	r, published := st.ref(key)
	if err != nil || !published {
		return err
	}
	users, err := s.machine.Users([]string{r.Target.Host})
	if err != nil {
		return fmt.Errorf("find the users of %s: %w", r.Target.Host, err)
	}
	var texts []string
	for _, u := range users[r.Target.Host] {
		if u.There != "" && !strings.HasPrefix(u.There, s.Layout.MountRoot()+"/") {
			texts = append(texts, u.Text)
		}
	}
	if len(texts) > 0 {
		return conflict("%s: stop that first", strings.Join(texts, ", "))
	}
	return nil
}

// Unpublish unpublishes the volume for the claim, and deletes the ref. With last it unstages the volume afterwards,
// unless the volume is published for another claim. then is committed with the last call. If there is nothing to
// unpublish or unstage, Unpublish does nothing, and does not commit then.
func (s *Stager) Unpublish(
	ctx context.Context, by intent.Caller, key registry.ClaimKey, last bool, then ...registry.Decision,
) error {
	st, err := s.state(ctx, key.Volume)
	if err != nil {
		return err
	}
	r, published := st.ref(key)
	unstage := last && st.staging.State != registry.MarkNone && (len(st.refs) == 0 || published && len(st.refs) == 1)
	if !published && !unstage {
		return nil
	}
	if _, err := s.Await(ctx, by, registry.RoleNode, key.Volume.Plugin); err != nil {
		return err
	}
	var calls []intent.Call
	if published {
		what := fmt.Sprintf("unpublish volume %s for alloc %s as %q", st.name(), key.Alloc, key.Request)
		if err := s.unmountParts(ctx, r); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		call := s.unpublishCall(ctx, by, r, st.name())
		call.What = what
		calls = append(calls, call)
	}
	if unstage {
		calls = append(calls, s.unstageCall(ctx, by, st.staging))
	}
	calls[len(calls)-1].Then = then
	return s.Sender.Send(ctx, calls...)
}

// unpublish unmounts the parts, and sends NodeUnpublishVolume until its outcome is certain or its policy gives up.
func (s *Stager) unpublish(ctx context.Context, by intent.Caller, r registry.Ref, name registry.VolumeName) error {
	if err := s.unmountParts(ctx, r); err != nil {
		return err
	}
	return s.Sender.Send(ctx, s.unpublishCall(ctx, by, r, name))
}

// unpublishCall returns the NodeUnpublishVolume for the ref. The caller has unmounted the parts.
func (s *Stager) unpublishCall(
	ctx context.Context, by intent.Caller, r registry.Ref, name registry.VolumeName,
) intent.Call {
	r.Parts = nil
	request := csi.UnpublishRequest{VolumeID: r.Volume.External, Private: s.private(r.Volume)}
	open := s.intent(registry.NodeUnpublishRPC, by, r, name)
	open.Hash = intent.Hash(open.RPC, request, r.Target.Host)
	left := ""
	return s.To(ctx, by, intent.Call{
		Intent: open,
		Before: func(view registry.View) (registry.Change, error) {
			r.Publish = registry.MarkSent
			return registry.Change{Put: []registry.Record{r}}, nil
		},
		Done: func(view registry.View) registry.Change {
			change := registry.Change{
				Delete: []registry.Key{r.Key()}, Events: []registry.Event{s.event(registry.EventUnpublished, open,
					left)},
			}
			p, found := view.Staging(r.Volume)
			// the volume is not used on this node any more
			if found && p.State == registry.MarkNone && len(view.Refs(r.Volume)) == 1 {
				change.Delete = append(change.Delete, p.Key())
			}
			return change
		},
	}, func(ctx context.Context, inst registry.Instance) error {
		request.TargetPath = inst.Volumes.InTask(r.Target)
		answer := s.fleet.Unpublish(ctx, inst.InstanceKey, request)
		if err := s.awaitUnmounted(ctx, open.RPC, inst.InstanceKey, r.Target.Host, answer); err != nil {
			return err
		}
		// a plugin should have removed the target; many leave an empty directory
		left = s.removeDirs(r.Target.Host, filepath.Dir(r.Target.Host))
		return nil
	})
}

// intent returns the intent of a call for one publish.
func (s *Stager) intent(rpc registry.RPC, by intent.Caller, r registry.Ref, name registry.VolumeName) registry.Intent {
	return registry.Intent{
		Volume: r.Volume, Name: name, RPC: rpc, Alloc: r.Alloc, Request: r.Request, Operation: by.ID,
	}
}
