package registry

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// InstanceKey names one instance: one role of one plugin, served by one task of one alloc. A monolith has two.
type InstanceKey struct {
	Role   Role     `json:"role"`
	Plugin PluginID `json:"plugin"`
	Alloc  AllocID  `json:"alloc"`
	Task   TaskName `json:"task"`
}

// TaskKey returns the key of the task that serves the instance.
func (k InstanceKey) TaskKey() TaskKey { return TaskKey{k.Alloc, k.Task} }

func (k InstanceKey) String() string {
	return string(k.Role) + " " + string(k.Plugin) + " of " + k.TaskKey().String()
}

// Endpoint is the path of one unix socket, as the host and as the task see it.
type Endpoint struct {
	Host string `json:"host"`
	Task string `json:"task"`
}

// Tree is the path of one directory, as the host and as the task see it. Without file system isolation both are equal.
type Tree struct {
	Host string `json:"host"`
	Task string `json:"task"`
}

// OnHost returns the host's path of what the task sees at path. A path that is not below the directory is only cleaned.
func (t Tree) OnHost(path string) string {
	path = filepath.Clean(path)
	if rest, below := strings.CutPrefix(path, filepath.Clean(t.Task)+"/"); below {
		return filepath.Join(t.Host, rest)
	}
	return path
}

// InTask returns the path by which a task with the tree t knows a path that was recorded for another task of its
// plugin. If the host's path is not below the tree, that is the recorded path.
func (t Tree) InTask(recorded Tree) string {
	rest, below := strings.CutPrefix(recorded.Host, t.Host+"/")
	if !below || t.Task == "" {
		return recorded.Task
	}
	return filepath.Join(t.Task, rest)
}

// Instance is one running task of a plugin in one role. The higher of CreateIndex and Preferred ranks the instances of
// a plugin. The newest healthy instance is active, or the newest if none is healthy.
type Instance struct {
	InstanceKey
	Attempt     uint64            `json:"attempt"`  // number of the task's start
	Endpoint    Endpoint          `json:"endpoint"` // its socket
	Volumes     Tree              `json:"volumes"`  // staging root of all volumes of the plugin
	Fingerprint Fingerprint       `json:"fingerprint"`
	Health      Health            `json:"health"`
	Storage     Condition         `json:"storage,omitzero"`    // of a node plugin's storage (NodeGetStorageHealth)
	Options     map[string]string `json:"options,omitempty"`   // free for the host and later versions
	Preferred   Seq               `json:"preferred,omitempty"` // when the host last preferred it; 0: never
	CreateIndex Seq               `json:"create_index"`        // when it was first put; ranks the instance
	ModifyIndex Seq               `json:"modify_index"`        // when it last changed
	Since       time.Time         `json:"since,omitzero"`      // wall time of CreateIndex, for people
}

// Clone returns a deep copy of i.
func (i Instance) Clone() Instance {
	i.Fingerprint = i.Fingerprint.Clone()
	i.Options = maps.Clone(i.Options)
	return i
}

// Same reports whether i and o differ at most in indexes, times, health detail and storage condition.
func (i Instance) Same(o Instance) bool {
	return i.InstanceKey == o.InstanceKey && i.Attempt == o.Attempt && i.Endpoint == o.Endpoint &&
		i.Volumes == o.Volumes &&
		i.Fingerprint.Equal(o.Fingerprint) && i.Health.State == o.Health.State && i.Health.Cause == o.Health.Cause &&
		maps.Equal(i.Options, o.Options)
}

// OptionListVolumes is set to OptionOff on an instance whose stanza has list_volumes = false, OptionScope to ScopeNode
// if it has controller_scope = "node".
const (
	OptionListVolumes = "list_volumes"
	OptionOff         = "off"
	OptionScope       = "controller_scope"
	ScopeNode         = "node"
)

// Local reports whether each node has controllers of the plugin for its own volumes (controller_scope = "node").
func (i Instance) Local() bool { return i.Options[OptionScope] == ScopeNode }

// HealthState is the health of an instance. The zero value is invalid.
type HealthState string

const (
	Healthy   HealthState = "healthy"
	Unhealthy HealthState = "unhealthy"
)

// Cause is the reason for an instance's health. The set is closed, so programs may switch over it.
type Cause string

const (
	CauseProbed       Cause = "probed"            // a probe succeeded
	CauseGone         Cause = "gone"              // the connection was lost and a redial was refused
	CauseMissed       Cause = "heartbeats missed" // too many heartbeats in a row got no answer or an error
	CauseNotReady     Cause = "not ready"         // Probe answers ready=false
	CauseStartTimeout Cause = "start timeout"     // no good probe within health_timeout of the task's start
	CauseIdentity     Cause = "wrong identity"    // its responses to identity calls are unusable
	CauseSocketGone   Cause = "socket gone"       // its socket file was removed, so it accepts no connections
	CauseExited       Cause = "task exited"       // the task that served it has ended
)

// Health is the last known health of an instance.
type Health struct {
	State  HealthState `json:"state"`
	Cause  Cause       `json:"cause"`
	Detail string      `json:"detail,omitempty"` // for people: the error, redacted
	Since  time.Time   `json:"since,omitzero"`   // wall time of the last change, for people
}

// Capability is a capability that a plugin reports. It joins the CSI service and the name of the enum value, as in
// "controller.PUBLISH_UNPUBLISH_VOLUME". A value unknown to this build keeps its number, as in "controller.99".
type Capability string

// Calls that change nothing.
const (
	ListVolumesRPC   RPC = "ListVolumes"
	NodeStatsRPC     RPC = "NodeGetVolumeStats"
	GetSnapshotRPC   RPC = "GetSnapshot"
	ListSnapshotsRPC RPC = "ListSnapshots"
	GetCapacityRPC   RPC = "GetCapacity"

	GetGroupSnapshotRPC     RPC = "GetVolumeGroupSnapshot"
	GetMetadataAllocatedRPC RPC = "GetMetadataAllocated"
	GetMetadataDeltaRPC     RPC = "GetMetadataDelta"
	GetVolumeRPC            RPC = "ControllerGetVolume"
)

// The capabilities that Holdfast checks.
const (
	PluginController Capability = "plugin.CONTROLLER_SERVICE"
	PluginTopology   Capability = "plugin.VOLUME_ACCESSIBILITY_CONSTRAINTS"
	PluginGroups     Capability = "plugin.GROUP_CONTROLLER_SERVICE"
	SnapshotMetadata Capability = "plugin.SNAPSHOT_METADATA_SERVICE"
	GroupSnapshots   Capability = "group.CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT"
	CreateDelete     Capability = "controller.CREATE_DELETE_VOLUME"
	CloneVolume      Capability = "controller.CLONE_VOLUME"
	CreateSnapshot   Capability = "controller.CREATE_DELETE_SNAPSHOT"
	GetSnapshot      Capability = "controller.GET_SNAPSHOT"
	ListSnapshots    Capability = "controller.LIST_SNAPSHOTS"
	AttachDetach     Capability = "controller.PUBLISH_UNPUBLISH_VOLUME"
	AttachReadOnly   Capability = "controller.PUBLISH_READONLY"
	ListVolumes      Capability = "controller.LIST_VOLUMES"
	ListPublished    Capability = "controller.LIST_VOLUMES_PUBLISHED_NODES"
	ControllerExpand Capability = "controller.EXPAND_VOLUME"
	ModifyVolume     Capability = "controller.MODIFY_VOLUME"
	GetVolume        Capability = "controller.GET_VOLUME"
	NodeExpand       Capability = "node.EXPAND_VOLUME"
	ExpandsOnline    Capability = "expansion.ONLINE"
	ExpandsOffline   Capability = "expansion.OFFLINE"
	GetCapacity      Capability = "controller.GET_CAPACITY"
	StageUnstage     Capability = "node.STAGE_UNSTAGE_VOLUME"
	VolumeStats      Capability = "node.GET_VOLUME_STATS"
	SingleNodeMulti  Capability = "node.SINGLE_NODE_MULTI_WRITER"
	ControllerMulti  Capability = "controller.SINGLE_NODE_MULTI_WRITER"
	VolumeMountGroup Capability = "node.VOLUME_MOUNT_GROUP"
)

// Fingerprint holds what a plugin reports in GetPluginInfo, GetPluginCapabilities, ControllerGetCapabilities,
// NodeGetCapabilities and NodeGetInfo.
type Fingerprint struct {
	Provider     string            `json:"provider"`               // GetPluginInfo.name
	Version      string            `json:"version,omitempty"`      // GetPluginInfo.vendor_version
	NodeID       NodeID            `json:"node_id,omitempty"`      // empty for a controller, or without NodeGetInfo
	MaxVolumes   int64             `json:"max_volumes,omitempty"`  // 0: no limit known
	Topology     map[string]string `json:"topology,omitempty"`     // NodeGetInfo.accessible_topology
	Capabilities []Capability      `json:"capabilities,omitempty"` // sorted
}

// Has reports whether the plugin announced c.
func (f Fingerprint) Has(c Capability) bool {
	_, found := slices.BinarySearch(f.Capabilities, c)
	return found
}

// Equal reports whether f and o have equal values.
func (f Fingerprint) Equal(o Fingerprint) bool {
	return f.Provider == o.Provider && f.Version == o.Version && f.NodeID == o.NodeID && f.MaxVolumes == o.MaxVolumes &&
		maps.Equal(f.Topology, o.Topology) && slices.Equal(f.Capabilities, o.Capabilities)
}

// Clone returns a deep copy of f.
func (f Fingerprint) Clone() Fingerprint {
	f.Topology = maps.Clone(f.Topology)
	f.Capabilities = slices.Clone(f.Capabilities)
	return f
}
