package registry

import "time"

// EndpointUse records that a client of a CSI endpoint uses a volume, or may use it. It has the call that begins the
// use, and the call's target. A call that changes the volume is a use without a target until its outcome is certain.
// A volume with an EndpointUse has no Volume record. Nodes share the record.
type EndpointUse struct {
	Volume      VolumeKey `json:"volume"`
	Call        RPC       `json:"call"`
	Target      string    `json:"target"` // node_id, staging_target_path or target_path of the call; "": it has none
	Node        NodeName  `json:"node"`   // the node whose host serves the endpoint
	CreateIndex Seq       `json:"create_index"`
	ModifyIndex Seq       `json:"modify_index"`
	Since       time.Time `json:"since,omitzero"`
	// Server is the task that got the call. Once the call has succeeded, Server is the task that serves the mount
	// (FUSE, nbd, ublk), or zero if the kernel does.
	Server TaskKey `json:"server,omitzero"`
}

// Key returns the key of the record.
func (u EndpointUse) Key() Key {
	return Key{BucketEndpointUses,
		pathOf(u.Volume.Plugin, string(u.Volume.External), string(u.Node), string(u.Call), u.Target)}
}

func (u EndpointUse) String() string {
	if u.Target == "" {
		return string(u.Call)
	}
	return string(u.Call) + " at " + u.Target
}
