package registry

import "time"

// FieldChange is a difference between a volume and its changed volume file.
type FieldChange struct {
	Field string `json:"field"` // as in the volume file
	From  string `json:"from"`  // for people; empty: not set
	To    string `json:"to"`
	// Problem says why the change cannot be made, or not now, and what to do instead; empty: it can be made.
	Problem string `json:"problem,omitempty"`
}

// VolumeUpdate is the result of an update of a volume, or what an update would do.
type VolumeUpdate struct {
	Volume  Volume        `json:"volume"`
	Changes []FieldChange `json:"changes"` // in the order of the fields' names; none: the volume is as the file says
}

// PluginVolume is a volume as its plugin lists it.
type PluginVolume struct {
	Plugin     PluginID   `json:"plugin"`
	External   ExternalID `json:"external_id"`
	Capacity   int64      `json:"capacity,omitempty"` // bytes; 0: not known
	Accessible []Topology `json:"accessible_topology,omitempty"`
	Nodes      []NodeID   `json:"published_nodes,omitempty"` // those that the plugin reports
	Condition  *Condition `json:"condition,omitempty"`       // nil: the plugin does not report it
	Name       VolumeName `json:"name,omitzero"`             // of the volume's record; zero: there is none
}

// Deregistered is a volume that Holdfast created and no longer knows. If it is registered again, Holdfast may delete
// it, and this record is removed.
type Deregistered struct {
	Volume      VolumeKey `json:"volume"`
	CreateIndex Seq       `json:"create_index"`
	ModifyIndex Seq       `json:"modify_index"`
	Since       time.Time `json:"since,omitzero"`
}

// DeregisteredRecord returns the key of the volume's Deregistered record.
func (k VolumeKey) DeregisteredRecord() Key { return Key{BucketDeregistered, k.path()} }

func (d Deregistered) Key() Key { return d.Volume.DeregisteredRecord() }
