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
		Volume: vol.VolumeKey(), Name: vol.VolumeName(), Alloc: g.Alloc, Request: r.Name, Node: a.host.Node, Usage: r.Usage,
	})
	if err != nil {
		return hooks.Published{}, err
	}
	node, err := a.awaitNode(ctx, g.Alloc, vol.Plugin)
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

// awaitNode waits for a healthy node instance of the volume's plugin, and says so if it has to.
func (a *Allocs) awaitNode(ctx context.Context, id registry.AllocID, plugin registry.PluginID) (registry.Instance, error) {
	if node, ok := a.plugins.Find(registry.RoleNode, plugin); ok && node.Health.State == registry.Healthy {
		return node, nil
	}
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, pluginWait)
		defer cancel()
	}
	a.waits(ctx, id, fmt.Sprintf("plugin %s to be healthy on this node", plugin))
	return a.plugins.Await(ctx, registry.RoleNode, plugin)
}
