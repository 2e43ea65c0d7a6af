package node

import (
	"context"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// Node is what volume needs of a node plugin. Calls for one volume are never concurrent. Every error of a call that was or may
// have been sent is a *registry.CallError or is treated as one of unknown outcome.
type Node interface {
	Stage(context.Context, registry.InstanceKey, csi.StageRequest) error
	Unstage(context.Context, registry.InstanceKey, csi.UnstageRequest) error
	Publish(context.Context, registry.InstanceKey, csi.PublishRequest) error
	Unpublish(context.Context, registry.InstanceKey, csi.UnpublishRequest) error
	// Grow returns the capacity that the plugin tells; 0: it tells none.
	Grow(context.Context, registry.InstanceKey, csi.GrowRequest) (int64, error)
	// Stats changes nothing: it may be under way beside another call, and its error never means that something is uncertain.
	Stats(context.Context, registry.InstanceKey, csi.StatsRequest) (registry.VolumeReport, error)
}

// Plugins answers which instance of a plugin is the active one.
type Plugins interface {
	// Await waits for a healthy instance until ctx ends.
	Await(context.Context, registry.Role, registry.PluginID) (registry.Instance, error)
	Find(registry.Role, registry.PluginID) (registry.Instance, bool)
}

// Kernel is the mount table, and the few things done to directories that may be mount points. None of them may follow a path
// into a mount: a dead one would freeze its caller.
type Kernel interface {
	// Mounted says whether path, as the host sees it, is a mount point.
	Mounted(path string) (bool, error)
	// MakeDir makes the directory and its parents, with mode 0700. It may exist.
	MakeDir(path string) error
	// RemoveDir removes an empty directory that is no mount point (rmdir(2)). It may be gone.
	RemoveDir(path string) error
	// Boot is the boot id of this boot.
	Boot() string
}

// Seen is what lies at a path.
type Seen struct {
	Block   bool               // a block device
	Device  hooks.DeviceNumber // its number
	Trouble string             // why it cannot be used, for people: it hangs, or its server is gone; empty: nothing is known to be wrong
}

// Secrets resolves references to secrets, for one call.
type Secrets interface {
	Resolve(context.Context, map[string]registry.Secret) (map[string]registry.SecretValue, error)
}
