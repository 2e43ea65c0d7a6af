package registry

import "time"

// VolumeStatus is a volume and how it is used now.
type VolumeStatus struct {
	Volume
	Attachments []Attachment
	Staging     Staging // on this node
	Holders     []Holder
	Intent      *Intent // the CSI call that is open or uncertain; nil: none
	Waiting     []Wait  // allocs that wait for it, or to be rid of it; without an alloc: its creation or deletion
}

// Holder is a claim, and the publish that goes with it.
type Holder struct {
	Claim    Claim
	Publish  Mark
	Target   Tree
	Trouble  string // what is wrong with its mount; empty: nothing is known to be
	Troubled time.Time
}

// AllocStatus is an alloc and how far its volumes have come.
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
	Intent  *Intent // of the volume, whoever it is for; nil: none
	Wait    *Wait   // what it waits for; nil: nothing
	// Expansion of the volume, if it has not come to its end on this node.
	Expansion Expansion
	Health    VolumeHealth // of the volume
	// Trouble is what is wrong with its mount, and since when; empty: nothing is known to be.
	Trouble  string
	Troubled time.Time
}

// PluginTask is a task that runs a plugin: what is expected, registered or not.
type PluginTask struct {
	TaskKey
	Plugin  PluginID
	Type    string // of the csi_plugin stanza
	Job     string
	Phase   TaskPhase
	Attempt uint64
	Restart *RestartRequest
}

// PluginFingerprint is what a scheduler needs of one plugin in one role.
type PluginFingerprint struct {
	Role     Role
	Plugin   PluginID
	Gone     bool     // there is no instance any more
	Active   Instance // the active one; zero if gone
	Healthy  int      // instances
	Expected int      // instances: tasks that run the plugin in that role
}

// PendingRestart is a restart request with the task that it is for.
type PendingRestart struct {
	TaskKey
	RestartRequest
}

// VolumeReport is what NodeGetVolumeStatsResponse says.
type VolumeReport struct {
	Usage     []VolumeUsage
	Condition *VolumeCondition // of CSI up to 1.12; nil: it is not told
}

// VolumeUsage is one unit of NodeGetVolumeStatsResponse.usage.
type VolumeUsage struct {
	Unit      string // "bytes", "inodes"
	Total     int64
	Used      int64
	Available int64
}
