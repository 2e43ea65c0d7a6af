package node

import (
	"context"
	"fmt"

	"holdfast/hooks"
	"holdfast/registry"
)

// claim claims the volume of the request. It first creates a missing volume of a create block, and creates it again if
// the release of another alloc deletes it before the claim. If claim has to wait for a plugin, it records the alloc
// first.
func (req *request) claim(
	ctx context.Context, g hooks.AllocGroup, r hooks.VolumeRequest,
) (vol registry.Volume, claim registry.Claim, err error) {
	for {
		req.step = registry.StepClaim // until provideVolume creates the volume
		if r.Create != nil || r.Ephemeral != nil {
			if err := req.admit(ctx, g); err != nil {
				return vol, claim, err
			}
		}
		if vol, err = req.ensureVolume(ctx, g, r); err != nil {
			return vol, claim, err
		}
		req.name, req.key.Volume = vol.VolumeName(), vol.VolumeKey()
		// the claim needs the node's topology and limit, which the node plugin reports
		if _, known := req.Plugins.Find(registry.RoleNode, vol.Plugin); !known {
			if err := req.admit(ctx, g); err != nil {
				return vol, claim, err
			}
			if _, err := req.awaitNode(ctx, vol.Plugin); err != nil {
				return vol, claim, err
			}
		}
		req.step = registry.StepClaim
		claim, err = req.controller.Claim(ctx, claimFor(g, r, vol, req.host.Node), req.admission(ctx, g))
		if err == nil || r.Create == nil || ctx.Err() != nil {
			return vol, claim, err
		}
		// the claim failed: try again only if the volume is gone
		now, known, readErr := req.volumeRecord(ctx)
		if readErr != nil || known && !now.Unwanted() {
			return vol, claim, err
		}
	}
}

// volumeRecord returns the record of the volume of the request.
func (req *request) volumeRecord(ctx context.Context) (vol registry.Volume, known bool, err error) {
	err = req.State.View(ctx, func(v registry.View) error { vol, known = v.Volume(req.name); return nil })
	return vol, known, err
}

// provideVolume returns the volume of the request's create block. It creates the volume unless it exists.
func (req *request) provideVolume(
	ctx context.Context, g hooks.AllocGroup, r hooks.VolumeRequest,
) (vol registry.Volume, err error) {
	if err := req.awaitController(ctx, r.Create.Plugin); err != nil {
		return vol, err
	}
	req.step = registry.StepCreate
	wait := registry.Wait{For: "plugin " + string(r.Create.Plugin), RPC: registry.CreateVolumeRPC}
	ended := req.recordLongWait(ctx, wait)
	vol, err = req.controller.Provide(ctx, req.by.Call, r.Create.Spec(req.name, r.Usage),
		originOf(g.Job, g.Group, r.Name))
	if ended(); err == nil {
		req.clearWait(ctx)
	}
	return vol, err
}

// awaitController waits for the controller of the plugin. It returns at once if the plugin has an executor in the
// cluster: the call itself waits for that node, which may be this one.
func (req *request) awaitController(ctx context.Context, plugin registry.PluginID) error {
	executed := false
	err := req.State.View(ctx, func(v registry.View) error {
		executed = req.Executors != nil && v.Executed(plugin)
		return nil
	})
	if err != nil || executed {
		return err
	}
	_, err = req.awaitPlugin(ctx, registry.RoleController, plugin,
		fmt.Sprintf("a healthy controller of plugin %s", plugin))
	return err
}

func originOf(job, group string, request registry.RequestName) registry.Origin {
	return registry.Origin{Job: job, Group: group, Request: request}
}

// ensureVolume returns the volume of the request, and sets req.name. It records a new inline volume, and creates the
// missing volume of a create block.
func (req *request) ensureVolume(
	ctx context.Context, g hooks.AllocGroup, r hooks.VolumeRequest,
) (vol registry.Volume, err error) {
	_, err = registry.Ensure(ctx, req.State, func(v registry.View) (registry.Change, error) {
		vol, err = volumeOf(v, g, r)
		if err == nil && r.Create == nil && vol.External == "" {
			err = registry.Errorf(registry.ErrConflict, "volume %s is %s; it must be %s to be used", vol.VolumeName(),
				vol.State, registry.VolumeReady)
		}
		req.name = vol.VolumeName()
		if err != nil || !vol.Ephemeral || vol.CreateIndex > 0 {
			return registry.Change{}, err
		}
		vol.Since = req.Now()
		return registry.Change{Put: []registry.Record{vol}}, nil
	})
	if err == nil && r.Create != nil && (vol.CreateIndex == 0 || vol.State != registry.VolumeReady) {
		return req.provideVolume(ctx, g, r)
	}
	return vol, err
}

// inlineVolume returns the record of the volume of an ephemeral block.
func inlineVolume(g hooks.AllocGroup, r hooks.VolumeRequest) registry.Volume {
	return registry.Volume{
		VolumeSpec: registry.VolumeSpec{
			Namespace: g.Namespace, ID: registry.InlineID(g.Alloc, r.Name), Name: string(r.Name),
			Plugin:   r.Ephemeral.Plugin,
			External: hooks.EphemeralID(g.Alloc, r.Name), Context: r.Ephemeral.Context, Secrets: r.Ephemeral.Secrets,
			Capabilities: []registry.VolumeCapability{{Access: r.Usage.Access, Attachment: r.Usage.Attachment}},
		},
		State: registry.VolumeReady, Ephemeral: true, Owner: g.Alloc,
	}
}
