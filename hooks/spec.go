package hooks

import (
	"cmp"
	"time"

	"holdfast/registry"
)

// PluginType is the type field of a csi_plugin stanza.
type PluginType string

const (
	TypeNode       PluginType = "node"
	TypeController PluginType = "controller"
	TypeMonolith   PluginType = "monolith" // both; registers twice
)

// RollMode is the roll field of a csi_plugin stanza: how a host replaces a running instance.
type RollMode string

const (
	RollBeside    RollMode = "beside"     // the new instance starts beside the old one; the zero value means the same
	RollStopFirst RollMode = "stop_first" // the old instance ends before the new one starts
)

// Roles returns the roles that a plugin of the type registers.
func (t PluginType) Roles() []registry.Role {
	switch t {
	case TypeNode:
		return []registry.Role{registry.RoleNode}
	case TypeController:
		return []registry.Role{registry.RoleController}
	case TypeMonolith:
		return []registry.Role{registry.RoleController, registry.RoleNode}
	}
	return nil
}

// Defaults of the csi_plugin stanza.
const (
	DefaultMountDir            = "/csi"
	DefaultStagePublishBaseDir = "/local/csi"
	DefaultHealthTimeout       = 30 * time.Second
	DefaultHeartbeatInterval   = 10 * time.Second
	DefaultHeartbeatTimeout    = 5 * time.Second
	DefaultHeartbeatFailures   = 3
)

// PluginSpec is a csi_plugin stanza.
type PluginSpec struct {
	ID       registry.PluginID `json:"id"`
	Type     PluginType        `json:"type"`
	MountDir string            `json:"mount_dir"` // in the task: the socket csi.sock lies in it
	// in the task: volumes are staged and published below
	StagePublishBaseDir string `json:"stage_publish_base_dir"`
	// from the task's start to its first good probe
	HealthTimeout time.Duration `json:"health_timeout"`
	Heartbeat     Heartbeat     `json:"heartbeat"`
	// list_volumes = false: ListVolumes is never called
	NoListVolumes bool `json:"no_list_volumes,omitempty"`
	// controller_scope = "node": each node makes the controller calls for its own volumes
	LocalController bool `json:"local_controller,omitempty"`
	// how a host replaces an instance; empty: RollBeside
	Roll RollMode `json:"roll,omitempty"`
}

// Heartbeat is a csi_plugin's heartbeat block.
type Heartbeat struct {
	Interval time.Duration `json:"interval"` // between two probes of a healthy plugin, jittered
	Timeout  time.Duration `json:"timeout"`  // of one probe
	Failures int           `json:"failures"` // failed probes in a row that make it unhealthy
	// how long it may be unhealthy before its task is restarted; 0: for ever
	RestartAfter time.Duration `json:"restart_after,omitempty"`
}

// VolumeRequest is a group's volume block.
type VolumeRequest struct {
	Name     registry.RequestName `json:"name"`   // the block's label
	Type     string               `json:"type"`   // "csi"
	Source   string               `json:"source"` // the volume's id; with PerAlloc "[n]" is appended
	Usage    registry.Usage       `json:"usage"`  // empty FSType and MountFlags: those of the volume
	PerAlloc bool                 `json:"per_alloc,omitempty"`
	// Ephemeral is set if the volume is an inline one, which lives as long as the alloc; Source and PerAlloc are empty
	// then.
	Ephemeral *Ephemeral `json:"ephemeral,omitempty"`
	// Create is set if the volume is created with the first alloc that uses it.
	Create *Create `json:"create,omitempty"`
}

// Create is a volume block's create block. The volume's ID is the source of the volume block.
type Create struct {
	Plugin        registry.PluginID          `json:"plugin_id"`
	Name          string                     `json:"name,omitempty"`         // empty: the ID of the volume
	CapacityMin   int64                      `json:"capacity_min,omitempty"` // bytes; 0: none
	CapacityMax   int64                      `json:"capacity_max,omitempty"` // bytes; 0: none
	Parameters    map[string]string          `json:"parameters,omitempty"`
	Mutable       map[string]string          `json:"mutable_parameters,omitempty"`
	Secrets       map[string]registry.Secret `json:"secrets,omitempty"` // references only, never values
	Required      []registry.Topology        `json:"required,omitempty"`
	Preferred     []registry.Topology        `json:"preferred,omitempty"`
	CloneID       registry.VolumeID          `json:"clone_id,omitempty"`
	CloneExternal registry.ExternalID        `json:"clone_external_id,omitempty"`
	SnapshotID    registry.ExternalID        `json:"snapshot_id,omitempty"`
	Delete        bool                       `json:"delete,omitempty"` // on_stop = "delete"
}

// Spec returns the spec of the volume that is created for the request.
func (c Create) Spec(name registry.VolumeName, u registry.Usage) registry.VolumeSpec {
	return registry.VolumeSpec{
		Namespace: name.Namespace, ID: name.ID, Name: cmp.Or(c.Name, string(name.ID)), Plugin: c.Plugin,
		CapacityMin: c.CapacityMin, CapacityMax: c.CapacityMax,
		Capabilities: []registry.VolumeCapability{{Access: u.Access, Attachment: u.Attachment}},
		FSType:       u.FSType, MountFlags: u.MountFlags, MountGroup: u.MountGroup, Ownership: u.Ownership,
		Parameters: c.Parameters, Mutable: c.Mutable, Secrets: c.Secrets, Required: c.Required, Preferred: c.Preferred,
		CloneID: c.CloneID, CloneExternal: c.CloneExternal, SnapshotID: c.SnapshotID,
	}
}

// Ephemeral is a volume block's ephemeral block: a volume that its plugin makes when it is published and deletes when
// it is unpublished (CSI ephemeral inline volumes). It is neither created by CreateVolume, nor attached, nor staged.
type Ephemeral struct {
	Plugin  registry.PluginID          `json:"plugin_id"`
	Context map[string]string          `json:"context,omitempty"` // volume_context
	Secrets map[string]registry.Secret `json:"secrets,omitempty"` // references only, never values
}

// VolumeMount is a task's volume_mount block.
type VolumeMount struct {
	Volume      registry.RequestName `json:"volume"`
	Destination string               `json:"destination"` // absolute, in the task
	// the part of the volume that is mounted; empty: all of it. See WrongSubPath
	SubPath     string      `json:"sub_path,omitempty"`
	ReadOnly    bool        `json:"read_only,omitempty"`
	Propagation Propagation `json:"propagation_mode"`
	SELinux     string      `json:"selinux_label,omitempty"`
}

// GroupSpec is the part of a group that is for Holdfast. It travels sealed.
type GroupSpec struct {
	Volumes []VolumeRequest          `json:"volumes,omitempty"`
	Mounts  map[string][]VolumeMount `json:"mounts,omitempty"` // by task name
}

// TaskSpec is the part of a plugin's task that is for Holdfast. It travels sealed.
type TaskSpec struct {
	Plugin PluginSpec `json:"csi_plugin"`
	Env    []string   `json:"env,omitempty"` // names that the task sets itself
}
