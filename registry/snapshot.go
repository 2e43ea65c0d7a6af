package registry

import (
	"cmp"
	"slices"
	"time"
)

// SnapshotID is the id of a snapshot within its namespace.
type SnapshotID string

// ParseSnapshotID accepts what ParseVolumeID accepts.
func ParseSnapshotID(s string) (SnapshotID, error) { return parseLabel[SnapshotID]("snapshot id", s) }

// SnapshotName names a snapshot.
type SnapshotName struct {
	Namespace Namespace  `json:"namespace"`
	ID        SnapshotID `json:"id"`
}

func (n SnapshotName) String() string { return string(n.Namespace) + "/" + string(n.ID) }

// Key returns the key of the snapshot's record.
func (n SnapshotName) Key() Key { return Key{BucketSnapshots, pathOf(n.Namespace, string(n.ID))} }

// GroupKey returns the key of the record of the group snapshot of that name.
func (n SnapshotName) GroupKey() Key { return Key{BucketGroupSnapshots, n.Key().Path} }

// SnapshotSpec describes a snapshot to take.
type SnapshotSpec struct {
	Namespace  Namespace         `json:"namespace"`
	ID         SnapshotID        `json:"id"`
	Name       string            `json:"name"`                 // CreateSnapshotRequest.name; defaults to the id
	Volume     VolumeID          `json:"volume,omitempty"`     // of the same namespace
	Volumes    []VolumeID        `json:"volumes,omitempty"`    // instead of Volume: those of a group snapshot, sorted
	Parameters map[string]string `json:"parameters,omitempty"` // CreateSnapshotRequest.parameters
	Secrets    map[string]Secret `json:"secrets,omitempty"`    // references; none: those of the (first) volume
}

// SnapshotName returns the name of the snapshot.
func (s SnapshotSpec) SnapshotName() SnapshotName { return SnapshotName{s.Namespace, s.ID} }

// VolumeName returns the name of the snapshot's volume.
func (s SnapshotSpec) VolumeName() VolumeName { return VolumeName{s.Namespace, s.Volume} }

// SnapshotState is the state of a snapshot.
type SnapshotState string

const (
	SnapshotCreating   SnapshotState = "creating"   // CreateSnapshot is sent until its outcome is certain
	SnapshotProcessing SnapshotState = "processing" // taken, and the plugin has yet to make it ready_to_use
	SnapshotReady      SnapshotState = "ready"      // volumes can be created from it
	SnapshotDeleting   SnapshotState = "deleting"   // DeleteSnapshot is sent until its outcome is certain
	SnapshotFailed     SnapshotState = "failed"     // it is unusable and may exist at the plugin; see Failure
)

// Unfinished reports whether a call for the snapshot is sent until its outcome is certain.
func (s SnapshotState) Unfinished() bool {
	return s == SnapshotCreating || s == SnapshotProcessing || s == SnapshotDeleting
}

// VolumeSnapshot is a snapshot that Holdfast has made of a volume, or a group snapshot of several volumes. Nodes share
// it. State is stored before each CSI call, so a call that an ended process has left open is repeated with the same
// fields.
type VolumeSnapshot struct {
	SnapshotSpec
	Plugin      PluginID      `json:"plugin"`
	Node        NodeName      `json:"node,omitempty"`             // that of its volumes
	Senders     []NodeName    `json:"senders,omitempty"`          // nodes of a cluster where its call may run
	Source      ExternalID    `json:"source_volume_id,omitempty"` // of the volume
	Members     []GroupMember `json:"members,omitempty"`          // of a group snapshot, in the order of Volumes
	Unusable    []ExternalID  `json:"unusable,omitempty"`         // members in an unusable answer, for the deletion
	State       SnapshotState `json:"state"`
	External    ExternalID    `json:"external_id,omitempty"`    // the plugin's id; empty: it has not named it yet
	Size        int64         `json:"size_bytes,omitempty"`     // minimum size of a volume made from it; 0: not known
	Taken       time.Time     `json:"creation_time,omitzero"`   // by the plugin's clock
	Group       ExternalID    `json:"group_snapshot,omitempty"` // the group snapshot that it belongs to
	Before      SnapshotState `json:"before,omitempty"`         // the state before its deletion began
	Failure     Failure       `json:"failure,omitzero"`         // the last answer, unless it was a success
	CreateIndex Seq           `json:"create_index"`
	ModifyIndex Seq           `json:"modify_index"`
	Since       time.Time     `json:"since,omitzero"`
}

// GroupMember is the snapshot of one volume in a group snapshot. The group's record alone holds it.
type GroupMember struct {
	Volume   VolumeID   `json:"volume"`
	Source   ExternalID `json:"source_volume_id"`
	External ExternalID `json:"external_id,omitempty"` // the plugin's id of the snapshot; empty: not known yet
	Size     int64      `json:"size_bytes,omitempty"`  // as VolumeSnapshot.Size
	Taken    time.Time  `json:"creation_time,omitzero"`
	Ready    bool       `json:"ready_to_use,omitempty"`
}

// Key returns the key of the record. A group snapshot has a bucket of its own.
func (s VolumeSnapshot) Key() Key {
	if s.IsGroup() {
		return s.SnapshotName().GroupKey()
	}
	return s.SnapshotName().Key()
}

// IsGroup reports whether s is a group snapshot.
func (s SnapshotSpec) IsGroup() bool { return len(s.Volumes) > 0 }

// MemberID returns the snapshot id of the volume's member in the group snapshot.
func (s SnapshotSpec) MemberID(volume VolumeID) SnapshotID { return s.ID + "-" + SnapshotID(volume) }

// IDs returns the id of the snapshot, or those of the members of a group snapshot.
func (s SnapshotSpec) IDs() (ids []SnapshotID) {
	if !s.IsGroup() {
		return []SnapshotID{s.ID}
	}
	for _, volume := range s.Volumes {
		ids = append(ids, s.MemberID(volume))
	}
	return ids
}

// Each returns the snapshot of each volume: the members of a group snapshot, or the snapshot itself.
func (s VolumeSnapshot) Each() []GroupMember {
	if s.IsGroup() {
		return s.Members
	}
	return []GroupMember{{s.Volume, s.Source, s.External, s.Size, s.Taken, s.State == SnapshotReady}}
}

// Externals returns the ids that the plugin has given the snapshot or its members, also those in Unusable.
func (s VolumeSnapshot) Externals() (ids []ExternalID) {
	for _, m := range s.Each() {
		if m.External != "" {
			ids = append(ids, m.External)
		}
	}
	return append(ids, s.Unusable...)
}

// VolumeKeys returns the volumes of the snapshot, in the order in which they are locked.
func (s VolumeSnapshot) VolumeKeys() (keys []VolumeKey) {
	for _, m := range s.Each() {
		keys = append(keys, VolumeKey{s.Plugin, m.Source})
	}
	slices.SortFunc(keys, func(a, b VolumeKey) int { return cmp.Compare(a.External, b.External) })
	return keys
}

// snapshots returns the members of a group snapshot that its plugin has named, as snapshots.
func (s VolumeSnapshot) snapshots() (list []VolumeSnapshot) {
	for _, m := range s.Members {
		if m.External == "" {
			continue
		}
		one := VolumeSnapshot{
			SnapshotSpec: SnapshotSpec{
				Namespace: s.Namespace, ID: s.MemberID(m.Volume), Volume: m.Volume, Secrets: s.Secrets,
			},
			Plugin: s.Plugin, Node: s.Node, Source: m.Source, State: s.State, External: m.External, Size: m.Size,
			Taken: m.Taken, Group: s.External, CreateIndex: s.CreateIndex, ModifyIndex: s.ModifyIndex, Since: s.Since,
		}
		if s.State == SnapshotProcessing && m.Ready {
			one.State = SnapshotReady
		}
		list = append(list, one)
	}
	return list
}
