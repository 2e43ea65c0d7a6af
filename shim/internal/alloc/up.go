package alloc

import (
	"context"
	"fmt"

	"holdfast/hooks"
	"holdfast/registry"
)

// up brings one request from nothing to a published volume: claim, attach, stage, publish. An inline volume is made by its publish.
func (h *hold) up(ctx context.Context, g hooks.AllocGroup, r hooks.VolumeRequest) (at hooks.Published, err error) {
	h.step = registry.StepClaim
	vol, err := h.volume(ctx, g, r)
	if err != nil {
		return at, err
	}
	h.name, h.key.Volume = vol.VolumeName(), vol.VolumeKey()
	claim, err := h.claims.Take(ctx, registry.Claim{
		Volume: vol.VolumeKey(), Name: vol.VolumeName(), Alloc: g.Alloc, Request: r.Name, Node: h.host.Node, Usage: r.Usage,
	})
	if err != nil {
		return at, err
	}
	node, err := h.awaitNode(ctx, vol.Plugin)
	if err != nil {
		return at, err
	}
	if err := h.awaitAttach(ctx, vol); err != nil {
		return at, err
	}
	leave, err := h.turn(ctx, fmt.Sprintf("a mount for alloc %s", g.Alloc))
	if err != nil {
		return at, err
	}
	defer leave()
	if err := h.settle(ctx, func(open registry.Intent) bool { return h.own(open) && open.RPC == registry.NodePublishRPC }); err != nil {
		return at, err
	}
	return h.mount(ctx, vol, claim.Usage, node)
}

// awaitAttach waits until the volume's plugin can be asked to attach it, if it has to be.
func (h *hold) awaitAttach(ctx context.Context, vol registry.Volume) error {
	ctx, cancel := h.bounded(ctx)
	defer cancel()
	return h.controller.AwaitAttach(ctx, vol, h.awaits(ctx, registry.RoleController))
}

// mount has the volume attached, staged and published, and parts of it mounted, each only after the one before.
func (h *hold) mount(ctx context.Context, vol registry.Volume, u registry.Usage, node registry.Instance) (hooks.Published, error) {
	h.step = registry.StepAttach
	if err := h.controller.Attach(ctx, h.by, vol, u, node.Fingerprint.NodeID); err != nil {
		return hooks.Published{}, err
	}
	h.step = registry.StepStage
	if err := h.node.Stage(ctx, h.by, vol, u); err != nil {
		return hooks.Published{}, err
	}
	if err := h.grow(ctx); err != nil {
		return hooks.Published{}, err
	}
	h.step = registry.StepPublish
	at, err := h.node.Publish(ctx, h.by, vol, h.key, u)
	if err != nil {
		return hooks.Published{}, err
	}
	if err := h.grow(ctx); err != nil {
		return hooks.Published{}, err
	}
	at.Parts, err = h.node.MountParts(ctx, h.key, h.parts)
	return at, err
}

// grow has an expansion seen to that was made while nobody used the volume here, once it is staged, or published if it has to be.
func (h *hold) grow(ctx context.Context) error {
	before := h.step
	h.step = registry.StepExpand
	err := h.node.Grow(ctx, h.by, h.key.Volume)
	if err == nil {
		h.step = before
	}
	return err
}

// volume is the volume that the request names, or makes.
func (h *hold) volume(ctx context.Context, g hooks.AllocGroup, r hooks.VolumeRequest) (vol registry.Volume, err error) {
	if r.Ephemeral != nil {
		return h.inline(ctx, g, r)
	}
	source := r.Source
	if r.PerAlloc {
		source = fmt.Sprintf("%s[%d]", source, g.Index)
	}
	id, err := registry.ParseVolumeID(source)
	if err != nil {
		return vol, err
	}
	h.name = registry.VolumeName{Namespace: g.Namespace, ID: id}
	err = h.log.View(ctx, func(v registry.View) error {
		var known bool
		vol, known = v.Volume(h.name)
		switch {
		case !known:
			return registry.Errorf(registry.ErrNotFound, "volume %s is not known in namespace %s; create or register it first", id, g.Namespace)
		case vol.Ephemeral:
			return registry.Errorf(registry.ErrConflict, "volume %s is an inline volume of alloc %s: nobody else can use it", id, vol.Owner)
		}
		return nil
	})
	return vol, err
}

// inline makes the request's volume known, for as long as the alloc is.
func (h *hold) inline(ctx context.Context, g hooks.AllocGroup, r hooks.VolumeRequest) (vol registry.Volume, err error) {
	vol = inlineVolume(g, r)
	vol.Since = h.clock.Now()
	h.name = vol.VolumeName()
	_, err = registry.Ensure(ctx, h.log, func(v registry.View) (registry.Change, error) {
		old, known := v.Volume(h.name)
		switch {
		case known && old.Owner != g.Alloc:
			return registry.Change{}, registry.Errorf(registry.ErrConflict, "volume %s is no inline volume of alloc %s, and has the name of one; give it another",
				h.name, g.Alloc)
		case known:
			vol = old
			return registry.Change{}, nil
		}
		return registry.Change{Put: []registry.Record{vol}}, nil
	})
	return vol, err
}

// inlineVolume is the volume that an ephemeral block asks for.
func inlineVolume(g hooks.AllocGroup, r hooks.VolumeRequest) registry.Volume {
	return registry.Volume{
		VolumeSpec: registry.VolumeSpec{
			Namespace: g.Namespace, ID: registry.InlineID(g.Alloc, r.Name), Name: string(r.Name), Plugin: r.Ephemeral.Plugin,
			External: hooks.EphemeralID(g.Alloc, r.Name), Context: r.Ephemeral.Context, Secrets: r.Ephemeral.Secrets,
			Capabilities: []registry.VolumeCapability{{Access: r.Usage.Access, Attachment: r.Usage.Attachment}},
		},
		State: registry.VolumeReady, Ephemeral: true, Owner: g.Alloc,
	}
}
