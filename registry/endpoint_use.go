package registry

import "time"

// EndpointUse records that a client of a CSI endpoint uses a volume, or may: the call that begins the use, and where.
// The volume has no record of its own meanwhile. Nodes share it.
type EndpointUse struct {
	Volume      VolumeKey `json:"volume"`
	Call        RPC       `json:"call"`   // ControllerPublishVolume, NodeStageVolume or NodePublishVolume
	Target      string    `json:"target"` // its node_id, staging_target_path or target_path
	Node        NodeName  `json:"node"`   // whose host serves the endpoint
	CreateIndex Seq       `json:"create_index"`
	ModifyIndex Seq       `json:"modify_index"`
	Since       time.Time `json:"since,omitzero"`
}

// Key returns the key of the record.
func (u EndpointUse) Key() Key {
	return Key{BucketEndpointUses, PathOf(u.Volume.Plugin, string(u.Volume.External), string(u.Node), string(u.Call), u.Target)}
}
