package registry

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// AccessMode is who may use a volume, and how (CSI VolumeCapability.AccessMode), in the words of job files.
type AccessMode string

const (
	SingleNodeWriter       AccessMode = "single-node-writer"
	SingleNodeReaderOnly   AccessMode = "single-node-reader-only"
	MultiNodeReaderOnly    AccessMode = "multi-node-reader-only"
	MultiNodeSingleWriter  AccessMode = "multi-node-single-writer"
	MultiNodeMultiWriter   AccessMode = "multi-node-multi-writer"
	SingleNodeSingleWriter AccessMode = "single-node-single-writer"
	SingleNodeMultiWriter  AccessMode = "single-node-multi-writer"
)

// AccessModes lists all seven.
var AccessModes = []AccessMode{
	SingleNodeWriter, SingleNodeReaderOnly, MultiNodeReaderOnly, MultiNodeSingleWriter, MultiNodeMultiWriter,
	SingleNodeSingleWriter, SingleNodeMultiWriter,
}

// ReaderOnly says whether the mode never allows a write.
func (m AccessMode) ReaderOnly() bool { return m == SingleNodeReaderOnly || m == MultiNodeReaderOnly }

// AttachmentMode is what a task sees of a volume (CSI VolumeCapability.access_type).
type AttachmentMode string

const (
	FileSystem  AttachmentMode = "file-system"
	BlockDevice AttachmentMode = "block-device"
)

// Flags is a list of mount flags as one comparable value. Their order counts, as it does for mount(8). They may be
// sensitive (CSI MountVolume.mount_flags), so they print as their number.
type Flags string

// FlagsOf joins flags. A flag has no line break: config refuses it.
func FlagsOf(flags []string) Flags { return Flags(strings.Join(flags, "\n")) }

// List is the flags again; none is nil.
func (f Flags) List() []string {
	if f == "" {
		return nil
	}
	return strings.Split(string(f), "\n")
}

func (f Flags) String() string   { return fmt.Sprintf("%d mount flags", len(f.List())) }
func (f Flags) GoString() string { return f.String() }

// Usage is how an alloc uses a volume. Two usages are the same if they are equal with ==.
type Usage struct {
	Access     AccessMode     `json:"access_mode"`
	Attachment AttachmentMode `json:"attachment_mode"`
	ReadOnly   bool           `json:"read_only,omitempty"`
	FSType     string         `json:"fs_type,omitempty"`     // empty: the plugin chooses
	MountFlags Flags          `json:"mount_flags,omitempty"` // may be sensitive
	MountGroup string         `json:"mount_group,omitempty"` // MountVolume.volume_mount_group: a group id; empty: none
}

// Staging is the part of u that the staging mount depends on: read-only may differ from publish to publish.
func (u Usage) Staging() Usage {
	u.ReadOnly = false
	return u
}

func (u Usage) String() string {
	s := fmt.Sprintf("%s %s", u.Access, u.Attachment)
	if u.ReadOnly {
		s += " read-only"
	}
	if u.FSType != "" {
		s += " " + u.FSType
	}
	if u.MountFlags != "" {
		s += " with " + u.MountFlags.String()
	}
	if u.MountGroup != "" {
		s += " for group " + u.MountGroup
	}
	return s
}

// Capability of a volume: one pair of modes that it was made for (volume file's capability block).
type VolumeCapability struct {
	Access     AccessMode     `json:"access_mode"`
	Attachment AttachmentMode `json:"attachment_mode"`
}

// Topology is a set of segments (CSI Topology.segments).
type Topology map[string]string

// VolumeSpec is a volume as a person asks for it: the content of a volume file.
type VolumeSpec struct {
	Namespace    Namespace          `json:"namespace"`
	ID           VolumeID           `json:"id"`
	Name         string             `json:"name"`                   // CreateVolumeRequest.name; defaults to the id
	Plugin       PluginID           `json:"plugin_id"`              //
	External     ExternalID         `json:"external_id,omitempty"`  // register: required; create: the plugin's answer
	CapacityMin  int64              `json:"capacity_min,omitempty"` // bytes; 0: none
	CapacityMax  int64              `json:"capacity_max,omitempty"` // bytes; 0: none
	Capabilities []VolumeCapability `json:"capabilities"`           // at least one
	FSType       string             `json:"fs_type,omitempty"`      // mount_options
	MountFlags   Flags              `json:"mount_flags,omitempty"`  // mount_options; may be sensitive
	MountGroup   string             `json:"mount_group,omitempty"`  // mount_options: the group id that files belong to; empty: none
	Parameters   map[string]string  `json:"parameters,omitempty"`   // CreateVolumeRequest.parameters
	Context      map[string]string  `json:"context,omitempty"`      // volume_context; create: the plugin's answer
	Secrets      map[string]Secret  `json:"secrets,omitempty"`      // references only, never values
	Required     []Topology         `json:"required,omitempty"`     // topology_request.required
	Preferred    []Topology         `json:"preferred,omitempty"`    // topology_request.preferred
	// At most one of these is set: what the volume is filled from (volume_content_source).
	CloneID       VolumeID   `json:"clone_id,omitempty"`          // a volume of this namespace and plugin, by our name for it
	CloneExternal ExternalID `json:"clone_external_id,omitempty"` // a volume, by the plugin's id
	SnapshotID    ExternalID `json:"snapshot_id,omitempty"`       // a snapshot, by the plugin's id
}

// Source is what a new volume is filled from (CSI VolumeContentSource). At most one field is set; the zero value is an empty volume.
type Source struct {
	Volume   ExternalID `json:"volume,omitempty"`
	Snapshot ExternalID `json:"snapshot,omitempty"`
}

func (s Source) String() string {
	switch {
	case s.Volume != "":
		return fmt.Sprintf("volume %q", s.Volume)
	case s.Snapshot != "":
		return fmt.Sprintf("snapshot %q", s.Snapshot)
	}
	return "nothing"
}

// VolumeName is the volume for people.
func (s VolumeSpec) VolumeName() VolumeName { return VolumeName{s.Namespace, s.ID} }

// Supports says whether the volume was made for the pair of modes.
func (s VolumeSpec) Supports(c VolumeCapability) bool { return slices.Contains(s.Capabilities, c) }

// VolumeState is how far a volume's life has come.
type VolumeState string

const (
	VolumeCreating VolumeState = "creating" // an intent for CreateVolume is open: it goes on by itself
	VolumeReady    VolumeState = "ready"
	VolumeDeleting VolumeState = "deleting" // an intent for DeleteVolume is or was open: nothing new may claim it
	// VolumeUncertain: CreateVolume has ended, the plugin may have made the volume, and it cannot be used. Volume.Failure says why. Nothing
	// goes on by itself until a person creates it again, deletes it or deregisters it; an open intent says that somebody has.
	VolumeUncertain VolumeState = "uncertain"
)

// Failure is how a call for a volume ended.
type Failure struct {
	RPC    RPC       `json:"rpc,omitempty"`
	Code   string    `json:"code,omitempty"`   // as CallError.Code
	Detail string    `json:"detail,omitempty"` // for people: bounded and redacted
	Since  time.Time `json:"since,omitzero"`
}

// Volume is a volume that Holdfast knows.
type Volume struct {
	VolumeSpec
	State       VolumeState  `json:"state"`
	Created     bool         `json:"created,omitempty"`    // by CreateVolume, so that DeleteVolume is ours to send
	Unattached  bool         `json:"unattached,omitempty"` // its plugin's controller said that it attaches nothing: an absent one is not waited for
	Ephemeral   bool         `json:"ephemeral,omitempty"`  // inline: made by the publish of its one owner, and gone with it; neither attached nor staged
	Owner       AllocID      `json:"owner,omitempty"`      // of an ephemeral volume
	Capacity    int64        `json:"capacity,omitempty"`   // bytes; 0: not known
	Expansion   Expansion    `json:"expansion,omitzero"`
	Health      VolumeHealth `json:"health,omitzero"`
	Accessible  []Topology   `json:"accessible_topology,omitempty"`
	Source      Source       `json:"source,omitzero"`  // what CreateVolume was asked to fill it from
	Failure     Failure      `json:"failure,omitzero"` // why its creation gave no volume that can be used; zero: it did
	CreateIndex Seq          `json:"create_index"`
	ModifyIndex Seq          `json:"modify_index"`
	Since       time.Time    `json:"since,omitzero"`
}

// VolumeKey is the volume for CSI. It is not complete before the plugin has named the volume.
func (v Volume) VolumeKey() VolumeKey { return VolumeKey{v.Plugin, v.External} }

// CreatedAs says whether the volume was created, or is being created, under the name at the plugin's controller: CreateVolumeRequest.name.
func (v Volume) CreatedAs(plugin PluginID, name string) bool {
	return v.Created && v.Plugin == plugin && v.Name == name
}

// InlineID is what the inline volume of an alloc's request is called.
func InlineID(alloc AllocID, request RequestName) VolumeID {
	return VolumeID(string(request) + "@" + string(alloc))
}

// InlineOf says whether the volume is an inline one of the alloc, and called so.
func (v Volume) InlineOf(alloc AllocID) bool {
	return v.Ephemeral && v.Owner == alloc && strings.HasSuffix(string(v.ID), string(InlineID(alloc, "")))
}

// Secret says where a secret's value is to be had: from an environment variable or a file of the shim's machine, or from the
// host by name. It is resolved for each call and never stored. There is no literal.
type Secret struct {
	Env      string `json:"env,omitempty"`
	File     string `json:"file,omitempty"`
	Callback string `json:"callback,omitempty"`
}

// SecretValue is a secret's value in memory. It prints as *** by value and by pointer.
type SecretValue string

func (SecretValue) String() string               { return "***" }
func (SecretValue) GoString() string             { return "***" }
func (SecretValue) MarshalJSON() ([]byte, error) { return []byte(`"***"`), nil }
func (SecretValue) MarshalText() ([]byte, error) { return []byte("***"), nil }
func (SecretValue) Format(f fmt.State, _ rune)   { _, _ = f.Write([]byte("***")) }

// Reveal is the value, for the one place that hands it to a plugin.
func (v SecretValue) Reveal() string { return string(v) }
