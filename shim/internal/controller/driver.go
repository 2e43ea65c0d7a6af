package controller

import (
	"context"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Driver is what controller needs of a controller plugin. Calls for one volume are never concurrent. Every error of a call that
// was or may have been sent is a *registry.CallError or is treated as one of unknown outcome.
type Driver interface {
	Create(context.Context, registry.InstanceKey, csi.CreateRequest) (csi.Created, error)
	Delete(context.Context, registry.InstanceKey, csi.DeleteRequest) error
	// Attach returns the publish context.
	Attach(context.Context, registry.InstanceKey, csi.AttachRequest) (map[string]string, error)
	Detach(context.Context, registry.InstanceKey, csi.DetachRequest) error
	Validate(context.Context, registry.InstanceKey, csi.ValidateRequest) (csi.Validated, error)
	Expand(context.Context, registry.InstanceKey, csi.ExpandRequest) (csi.Expanded, error)
}

// Node is the node's half of an expansion. Whoever calls Grow holds the volume's lane.
type Node interface {
	// Grow has the node see to an expansion that is pending, if the volume is where it can. What the plugin refuses for certain is recorded,
	// and no error.
	Grow(ctx context.Context, by intent.Caller, key registry.VolumeKey) error
	// Grows says whether Grow would have something to do.
	Grows(view registry.View, v registry.Volume) bool
}

// Plugins answers which instance of a plugin is the active one.
type Plugins interface {
	// Await waits for a healthy instance until ctx ends.
	Await(context.Context, registry.Role, registry.PluginID) (registry.Instance, error)
	Find(registry.Role, registry.PluginID) (registry.Instance, bool)
}

// Secrets resolves references to secrets, for one call.
type Secrets interface {
	Resolve(context.Context, map[string]registry.Secret) (map[string]registry.SecretValue, error)
}
