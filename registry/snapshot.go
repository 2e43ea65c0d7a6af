package registry

import "time"

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
func (n SnapshotName) Key() Key { return Key{BucketSnapshots, PathOf(n.Namespace, string(n.ID))} }

// SnapshotSpec is what a snapshot is made of.
type SnapshotSpec struct {
	Namespace  Namespace         `json:"namespace"`
	ID         SnapshotID        `json:"id"`
	Name       string            `json:"name"`                 // CreateSnapshotRequest.name; defaults to the id
	Volume     VolumeID          `json:"volume"`               // of the same namespace
	Parameters map[string]string `json:"parameters,omitempty"` // CreateSnapshotRequest.parameters
	Secrets    map[string]Secret `json:"secrets,omitempty"`    // references only, never values; none: those of the volume
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
	SnapshotFailed     SnapshotState = "failed"     // it cannot be used and may exist at the plugin; Failure has the reason
)

// Unfinished reports whether a call for the snapshot is sent until its outcome is certain.
func (s SnapshotState) Unfinished() bool {
	return s == SnapshotCreating || s == SnapshotProcessing || s == SnapshotDeleting
}

// VolumeSnapshot is a snapshot that Holdfast has made of a volume. Nodes share it. Its state is the record before each
// CSI call: a call that a process has left is repeated with the same fields.
type VolumeSnapshot struct {
	SnapshotSpec
	Plugin      PluginID      `json:"plugin"`
	Source      ExternalID    `json:"source_volume_id"` // of the volume
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

// Key returns the key of the record.
func (s VolumeSnapshot) Key() Key { return s.SnapshotName().Key() }
