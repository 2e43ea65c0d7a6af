package node

import (
	"context"

	"holdfast/hooks"
	"holdfast/registry"
)

// Node is what volume needs of a node plugin. Calls for one volume are never concurrent. Every error of a call that was or may
// have been sent is a *registry.CallError or is treated as one of unknown outcome.
type Node interface {
	Stage(context.Context, registry.InstanceKey, StageRequest) error
	Unstage(context.Context, registry.InstanceKey, UnstageRequest) error
	Publish(context.Context, registry.InstanceKey, PublishRequest) error
	Unpublish(context.Context, registry.InstanceKey, UnpublishRequest) error
	// Grow returns the capacity that the plugin tells; 0: it tells none.
	Grow(context.Context, registry.InstanceKey, GrowRequest) (int64, error)
	// Stats changes nothing: it may be under way beside another call, and its error never means that something is uncertain.
	Stats(context.Context, registry.InstanceKey, StatsRequest) (registry.VolumeReport, error)
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

// StageRequest is NodeStageVolumeRequest. Paths in requests are those that the plugin knows.
type StageRequest struct {
	VolumeID       registry.ExternalID             `json:"volume_id"`
	PublishContext map[string]string               `json:"publish_context,omitempty"`
	StagingPath    string                          `json:"-"` // staging_target_path
	Usage          registry.Usage                  `json:"usage"`
	VolumeContext  map[string]string               `json:"volume_context,omitempty"`
	Secrets        map[string]registry.SecretValue `json:"-"`
}

// Private is what must not appear in the error of a call, though the call does not carry it.
type Private struct {
	Secrets    map[string]registry.SecretValue
	Unknown    bool // the volume has secrets that nobody could be asked for: of what the plugin says, only its code may be told
	MountFlags registry.Flags
	Contexts   []map[string]string
}

// UnstageRequest is NodeUnstageVolumeRequest.
type UnstageRequest struct {
	VolumeID    registry.ExternalID           `json:"volume_id"`
	StagingPath string                        `json:"-"` // staging_target_path
	Private     func(context.Context) Private `json:"-"` // is called only when the plugin has said something; nil: nothing is
}

// PublishRequest is NodePublishVolumeRequest.
type PublishRequest struct {
	VolumeID       registry.ExternalID             `json:"volume_id"`
	PublishContext map[string]string               `json:"publish_context,omitempty"`
	StagingPath    string                          `json:"-"`     // staging_target_path; empty: the plugin does not stage
	TargetPath     string                          `json:"-"`     // target_path; its parent exists
	Usage          registry.Usage                  `json:"usage"` // its ReadOnly is readonly
	VolumeContext  map[string]string               `json:"volume_context,omitempty"`
	Secrets        map[string]registry.SecretValue `json:"-"`
}

// UnpublishRequest is NodeUnpublishVolumeRequest.
type UnpublishRequest struct {
	VolumeID   registry.ExternalID           `json:"volume_id"`
	TargetPath string                        `json:"-"` // target_path
	Private    func(context.Context) Private `json:"-"` // is called only when the plugin has said something; nil: nothing is
}

// GrowRequest is NodeExpandVolumeRequest.
type GrowRequest struct {
	VolumeID    registry.ExternalID             `json:"volume_id"`
	Path        string                          `json:"-"` // volume_path
	StagingPath string                          `json:"-"` // staging_target_path; empty: the plugin does not stage
	Range       registry.CapacityRange          `json:"capacity_range"`
	Usage       registry.Usage                  `json:"usage"` // volume_capability
	Secrets     map[string]registry.SecretValue `json:"-"`
	Contexts    []map[string]string             `json:"-"` // not sent; what they hold must not appear in the error of the call
}

// StatsRequest is NodeGetVolumeStatsRequest.
type StatsRequest struct {
	VolumeID    registry.ExternalID
	Path        string                        // volume_path: where it is published or staged
	StagingPath string                        // staging_target_path; empty: the plugin does not stage
	Private     func(context.Context) Private // is called only when the plugin has said something; nil: nothing is
}
