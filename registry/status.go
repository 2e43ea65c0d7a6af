package registry

import "time"

// VolumeStatus is a volume and its current use.
type VolumeStatus struct {
	Volume
	Attachments []Attachment
	Staging     Staging // on this node
	Holders     []Holder
	Intent      *Intent // the CSI call that is open or uncertain; nil: none
	Waiting     []Wait  // of allocs that claim or release it; without an alloc: of its creation or deletion
}

// Holder is a claim and its publish.
type Holder struct {
	Claim    Claim
	Publish  Mark
	Target   Tree
	Trouble  string // of its mount; empty: none is known
	Troubled time.Time
}

// AllocStatus is an alloc and the progress of its volumes.
type AllocStatus struct {
	Alloc
	Uses []Use
}

// Use is one request of an alloc for a volume.
type Use struct {
	Request RequestName
	Name    VolumeName
	Volume  VolumeKey
	Usage   Usage
	Attach  Mark
	Stage   Mark
	Publish Mark
	Target  Tree
	Intent  *Intent // of the volume, for any alloc; nil: none
	Wait    *Wait   // nil: none
	// Expansion of the volume, if it is not complete on this node.
	Expansion Expansion
	Health    VolumeHealth // of the volume
	// Trouble describes a fault of its mount, Troubled when it began; empty: none is known.
	Trouble  string
	Troubled time.Time
}

// PluginTask is a task that runs a plugin, registered or not.
type PluginTask struct {
	TaskKey
	Plugin  PluginID
	Type    string // of the csi_plugin stanza
	Job     string
	Phase   TaskPhase
	Attempt uint64
	Restart *RestartRequest
}

// PluginFingerprint describes one plugin in one role for a scheduler.
type PluginFingerprint struct {
	Role     Role
	Plugin   PluginID
	Gone     bool     // no instance is left
	Active   Instance // the active one; zero if gone
	Healthy  int      // instances
	Expected int      // instances: tasks that run the plugin in that role
}

// PendingRestart is a restart request and its task.
type PendingRestart struct {
	TaskKey
	RestartRequest
}

// VolumeReport is the content of a NodeGetVolumeStatsResponse.
type VolumeReport struct {
	Usage     []VolumeUsage
	Condition *VolumeCondition // of CSI up to 1.12; nil: not reported
}

// VolumeUsage is one unit of NodeGetVolumeStatsResponse.usage.
type VolumeUsage struct {
	Unit      string // "bytes", "inodes"
	Total     int64
	Used      int64
	Available int64
}
