package registry

import "time"

// EndpointUse records that a client of a CSI endpoint uses a volume, or may: the call that begins the use, and where. A
// call that changes the volume is a use without a place, until its outcome is certain. The volume has no record of its
// own meanwhile. Nodes share it.
type EndpointUse struct {
	Volume      VolumeKey `json:"volume"`
	Call        RPC       `json:"call"`
	Target      string    `json:"target"` // its node_id, staging_target_path or target_path; "": the call has none
	Node        NodeName  `json:"node"`   // whose host serves the endpoint
	CreateIndex Seq       `json:"create_index"`
	ModifyIndex Seq       `json:"modify_index"`
	Since       time.Time `json:"since,omitzero"`
	// Server is the task that got the call. Once that has succeeded it is the task that serves the mount (FUSE, nbd,
	// ublk); zero: the kernel does.
	Server TaskKey `json:"server,omitzero"`
}

// Key returns the key of the record.
func (u EndpointUse) Key() Key {
	return Key{BucketEndpointUses,
		PathOf(u.Volume.Plugin, string(u.Volume.External), string(u.Node), string(u.Call), u.Target)}
}

func (u EndpointUse) String() string {
	if u.Target == "" {
		return string(u.Call)
	}
	return string(u.Call) + " at " + u.Target
}
