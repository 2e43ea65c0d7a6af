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

// CallWait returns the Wait of the volume's creation or deletion, otherwise that of its open call. It ignores the waits
// of allocs.
func (v VolumeStatus) CallWait() (w Wait, found bool) {
	for _, w := range v.Waiting {
		if w.Alloc == "" {
			return w, true
		}
	}
	if v.Intent == nil {
		return w, false
	}
	w = v.Intent.Waits()
	w.Volume, w.For = v.VolumeName(), "plugin "+string(v.Plugin)
	return w, true
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
	Volumes []AllocVolume
}

// AllocVolume is one request of an alloc for a volume, and its progress.
type AllocVolume struct {
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
	Plugin  PluginID        `json:"plugin"`
	Type    string          `json:"type"` // of the csi_plugin stanza
	Job     string          `json:"job"`
	Phase   TaskPhase       `json:"phase"`
	Attempt uint64          `json:"attempt"`
	Restart *RestartRequest `json:"restart,omitempty"` // requested, not done yet
	Problem string          `json:"problem,omitempty"` // why the plugin is not registered yet

	Healthy bool `json:"healthy"` // all its instances are registered and healthy
	Active  bool `json:"active"`  // it has the active instance of a role
	Calls   int  `json:"calls"`   // that run at the task now
	// Open lists those of the calls that change something, and calls that an earlier shim has left open.
	Open []OpenCall `json:"open,omitempty"`
	// Volumes lists the volumes whose mounts end with the task, because a process of the task serves them (FUSE).
	Volumes []ServedVolume `json:"volumes,omitempty"`
}

// MayStop reports whether the task can be stopped without an effect on calls and mounts. The plugin then has another
// active instance in each role. No call runs at this task, and it serves no mount.
func (t PluginTask) MayStop() bool {
	return !t.Active && t.Calls == 0 && len(t.Open) == 0 && len(t.Volumes) == 0
}

// OpenCall is a CSI call that changes something. It was sent and has no known outcome, so it may still run.
type OpenCall struct {
	RPC    RPC        `json:"rpc"`
	Volume VolumeName `json:"volume"`
	Alloc  AllocID    `json:"alloc,omitempty"`
	Since  time.Time  `json:"since,omitzero"`
}

// ServedVolume is a volume with a FUSE mount that a process of a plugin's task serves.
type ServedVolume struct {
	Volume   VolumeName `json:"volume"`
	External ExternalID `json:"external_id"`
	Allocs   []AllocID  `json:"allocs,omitempty"` // that use it; empty: it is staged, or clients of an endpoint use it
	Mount    string     `json:"mount,omitempty"`  // path of a mount that no record has; no other field is set
}

// String returns the name of the volume. A volume that clients of a CSI endpoint use has no name, so String returns the
// plugin's ID of it.
func (s ServedVolume) String() string {
	switch {
	case s.Mount != "":
		return "(unknown) at " + s.Mount
	case s.Volume.ID == "":
		return string(s.External) + " of a CSI endpoint"
	}
	return s.Volume.String()
}

// VolumeReport is the content of a NodeGetVolumeStatsResponse.
type VolumeReport struct {
	Usage     []VolumeUsage
	Condition *Condition // of CSI up to 1.12; nil: not reported
}

// VolumeUsage is one unit of NodeGetVolumeStatsResponse.usage. Plugins may leave out Used and Available.
type VolumeUsage struct {
	Unit      string `json:"unit"` // "bytes", "inodes"
	Total     int64  `json:"total"`
	Used      int64  `json:"used"`
	Available int64  `json:"available"`
}
