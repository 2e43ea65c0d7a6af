package alloc

import (
	"context"
	"fmt"

	"holdfast/hooks"
	"holdfast/registry"
)

// up brings one request from nothing to a published volume: claim, attach, stage, publish.
func (a *Allocs) up(ctx context.Context, call registry.Call, g hooks.AllocGroup, r hooks.VolumeRequest) (hooks.Published, error) {
	vol, err := a.volume(ctx, g, r)
	if err != nil {
		return hooks.Published{}, err
	}
	claim, err := a.claims.Take(ctx, registry.Claim{
		Volume: vol.VolumeKey(), Name: vol.VolumeName(), Alloc: g.Alloc, Request: r.Name, Node: a.host.Node, Usage: usageOf(vol, r),
	})
	if err != nil {
		return hooks.Published{}, err
	}
	node, err := a.awaitNode(ctx, g.Alloc, vol)
	if err != nil {
		return hooks.Published{}, err
	}
	leave, err := a.lanes.Enter(ctx, vol.VolumeKey(), fmt.Sprintf("a mount for alloc %s", g.Alloc))
	if err != nil {
		return hooks.Published{}, err
	}
	defer leave()
	if err := a.controller.Attach(ctx, call, vol, claim.Usage, node.Fingerprint.NodeID); err != nil {
		return hooks.Published{}, err
	}
	if err := a.node.Stage(ctx, call, vol, claim.Usage); err != nil {
		return hooks.Published{}, err
	}
	target, err := a.node.Publish(ctx, call, vol, claim.ClaimKey(), claim.Usage)
	return hooks.Published{Target: target, Usage: claim.Usage}, err
}

// volume is the volume that the request names.
func (a *Allocs) volume(ctx context.Context, g hooks.AllocGroup, r hooks.VolumeRequest) (vol registry.Volume, err error) {
	source := r.Source
	if r.PerAlloc {
		source = fmt.Sprintf("%s[%d]", source, g.Index)
	}
	id, err := registry.ParseVolumeID(source)
	if err != nil {
		return vol, err
	}
	name := registry.VolumeName{Namespace: g.Namespace, ID: id}
	err = a.log.View(ctx, func(v registry.View) error {
		var known bool
		if vol, known = v.Volume(name); !known {
			return registry.Errorf(registry.ErrNotFound, "volume %s is not known in namespace %s; create or register it first", id, g.Namespace)
		}
		return nil
	})
	return vol, err
}

// usageOf is the request's usage: what it does not say of mount options is the volume's.
func usageOf(vol registry.Volume, r hooks.VolumeRequest) registry.Usage {
	u := r.Usage
	if u.Attachment != registry.FileSystem {
		return u
	}
	if u.FSType == "" {
		u.FSType = vol.FSType
	}
	if u.MountFlags == "" {
		u.MountFlags = vol.MountFlags
	}
	return u
}

// awaitNode waits for a healthy node instance of the volume's plugin, and says so while it does.
func (a *Allocs) awaitNode(ctx context.Context, id registry.AllocID, vol registry.Volume) (registry.Instance, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, pluginWait)
		defer cancel()
	}
	a.waits(ctx, id, fmt.Sprintf("plugin %s to be healthy on this node", vol.Plugin))
	node, err := a.plugins.Await(ctx, registry.RoleNode, vol.Plugin)
	if err != nil {
		return node, err
	}
	a.waits(ctx, id, "")
	return node, nil
}
