package registry

import (
	"maps"
	"slices"
	"time"
)

// InstanceKey names one instance: one role of one plugin, served by one task of one alloc. A monolith has two.
type InstanceKey struct {
	Role   Role     `json:"role"`
	Plugin PluginID `json:"plugin"`
	Alloc  AllocID  `json:"alloc"`
	Task   TaskName `json:"task"`
}

// TaskKey is the task that serves the instance.
func (k InstanceKey) TaskKey() TaskKey { return TaskKey{k.Alloc, k.Task} }

func (k InstanceKey) String() string {
	return string(k.Role) + " " + string(k.Plugin) + " of " + k.TaskKey().String()
}

// Endpoint is one unix socket, with the path by which the host reaches it and the path that the task knows it by.
type Endpoint struct {
	Host string `json:"host"`
	Task string `json:"task"`
}

// Tree is one directory, with the path by which the host reaches it and the path that the task knows it by. Without
// file system isolation the two are equal.
type Tree struct {
	Host string `json:"host"`
	Task string `json:"task"`
}

// Instance is one running task of a plugin, in one role. Its rank among others of the plugin is its Start: the newest
// healthy one is active; if none is healthy, the newest.
type Instance struct {
	InstanceKey
	Attempt     uint64            `json:"attempt"`           // which start of the task
	Endpoint    Endpoint          `json:"endpoint"`          // its socket
	Volumes     Tree              `json:"volumes"`           // its staging root: all volumes of the plugin lie below
	Fingerprint Fingerprint       `json:"fingerprint"`       //
	Health      Health            `json:"health"`            //
	Options     map[string]string `json:"options,omitempty"` // free for the host and later versions
	CreateIndex Seq               `json:"create_index"`      // its rank: when it was first put
	ModifyIndex Seq               `json:"modify_index"`      // when it last changed
	Since       time.Time         `json:"since,omitzero"`    // wall time of CreateIndex, for people
}

// Clone is a copy that shares nothing with i.
func (i Instance) Clone() Instance {
	i.Fingerprint = i.Fingerprint.Clone()
	i.Options = maps.Clone(i.Options)
	return i
}

// Same says whether a Put of o in place of i would change nothing: indexes and times do not count.
func (i Instance) Same(o Instance) bool {
	return i.InstanceKey == o.InstanceKey && i.Attempt == o.Attempt && i.Endpoint == o.Endpoint &&
		i.Volumes == o.Volumes &&
		i.Fingerprint.Equal(o.Fingerprint) && i.Health.State == o.Health.State && i.Health.Cause == o.Health.Cause &&
		maps.Equal(i.Options, o.Options)
}

// OptionListVolumes is the option of an instance whose stanza says list_volumes = false. Its value is then OptionOff.
const (
	OptionListVolumes = "list_volumes"
	OptionOff         = "off"
)

// HealthState of an instance. The zero value is not a state.
type HealthState string

const (
	Healthy   HealthState = "healthy"
	Unhealthy HealthState = "unhealthy"
)

// Cause says why an instance's health is what it is. The set is closed so that programs may switch over it.
type Cause string

const (
	CauseProbed       Cause = "probed"         // a probe succeeded
	CauseGone         Cause = "gone"           // the connection was lost and a redial was refused
	CauseMissed       Cause = "missed"         // too many heartbeats in a row got no or an error answer
	CauseNotReady     Cause = "not ready"      // Probe answers ready=false
	CauseStartTimeout Cause = "start timeout"  // no good probe within health_timeout of the task's start
	CauseIdentity     Cause = "wrong identity" // its answers to identity calls are unusable
	CauseSocketGone   Cause = "socket gone"    // the file of its socket was removed, so it can accept no connections
	CauseExited       Cause = "task exited"    // the task that served it has ended
)

// Health is the last judgement of an instance.
type Health struct {
	State  HealthState `json:"state"`
	Cause  Cause       `json:"cause"`
	Detail string      `json:"detail,omitempty"` // for people: the error, redacted
	Since  time.Time   `json:"since,omitzero"`   // wall time of the last change, for people
}

// Capability is one thing that a plugin says it can do: the name of the CSI service's enum value behind the service, as
// in "controller.PUBLISH_UNPUBLISH_VOLUME". Values that this build does not know stay as "controller.99".
type Capability string

// Optional calls that Holdfast makes unasked.
const (
	ListVolumesRPC RPC = "ListVolumes"
	NodeStatsRPC   RPC = "NodeGetVolumeStats"
)

// The capabilities that Holdfast itself asks for.
const (
	PluginController Capability = "plugin.CONTROLLER_SERVICE"
	PluginTopology   Capability = "plugin.VOLUME_ACCESSIBILITY_CONSTRAINTS"
	CreateDelete     Capability = "controller.CREATE_DELETE_VOLUME"
	CloneVolume      Capability = "controller.CLONE_VOLUME"
	CreateSnapshot   Capability = "controller.CREATE_DELETE_SNAPSHOT"
	AttachDetach     Capability = "controller.PUBLISH_UNPUBLISH_VOLUME"
	AttachReadOnly   Capability = "controller.PUBLISH_READONLY"
	ListVolumes      Capability = "controller.LIST_VOLUMES"
	ListPublished    Capability = "controller.LIST_VOLUMES_PUBLISHED_NODES"
	ControllerExpand Capability = "controller.EXPAND_VOLUME"
	NodeExpand       Capability = "node.EXPAND_VOLUME"
	ExpandsOnline    Capability = "expansion.ONLINE"
	ExpandsOffline   Capability = "expansion.OFFLINE"
	GetCapacity      Capability = "controller.GET_CAPACITY"
	StageUnstage     Capability = "node.STAGE_UNSTAGE_VOLUME"
	VolumeStats      Capability = "node.GET_VOLUME_STATS"
	NodeCondition    Capability = "node.VOLUME_CONDITION"       // of CSI up to 1.12: NodeGetVolumeStats tells it
	ListCondition    Capability = "controller.VOLUME_CONDITION" // of CSI up to 1.12: ListVolumes tells it
	SingleNodeMulti  Capability = "node.SINGLE_NODE_MULTI_WRITER"
	ControllerMulti  Capability = "controller.SINGLE_NODE_MULTI_WRITER"
	VolumeMountGroup Capability = "node.VOLUME_MOUNT_GROUP"
)

// Fingerprint is what a plugin says of itself (GetPluginInfo, GetPluginCapabilities, Controller- and
// NodeGetCapabilities, NodeGetInfo).
type Fingerprint struct {
	Provider     string            `json:"provider"`               // GetPluginInfo.name
	Version      string            `json:"version,omitempty"`      // GetPluginInfo.vendor_version
	NodeID       NodeID            `json:"node_id,omitempty"`      // empty for a controller, or without NodeGetInfo
	MaxVolumes   int64             `json:"max_volumes,omitempty"`  // 0: no limit known
	Topology     map[string]string `json:"topology,omitempty"`     // NodeGetInfo.accessible_topology
	Capabilities []Capability      `json:"capabilities,omitempty"` // sorted
}

// Has says whether the plugin announced c.
func (f Fingerprint) Has(c Capability) bool {
	_, found := slices.BinarySearch(f.Capabilities, c)
	return found
}

// Equal compares by value.
func (f Fingerprint) Equal(o Fingerprint) bool {
	return f.Provider == o.Provider && f.Version == o.Version && f.NodeID == o.NodeID && f.MaxVolumes == o.MaxVolumes &&
		maps.Equal(f.Topology, o.Topology) && slices.Equal(f.Capabilities, o.Capabilities)
}

// Clone is a copy that shares nothing with f.
func (f Fingerprint) Clone() Fingerprint {
	f.Topology = maps.Clone(f.Topology)
	f.Capabilities = slices.Clone(f.Capabilities)
	return f
}
