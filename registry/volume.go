package registry

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// AccessMode says which nodes may read or write a volume (CSI VolumeCapability.AccessMode), in the terms of job files.
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

// AccessModes lists all access modes.
var AccessModes = []AccessMode{
	SingleNodeWriter, SingleNodeReaderOnly, MultiNodeReaderOnly, MultiNodeSingleWriter, MultiNodeMultiWriter,
	SingleNodeSingleWriter, SingleNodeMultiWriter,
}

// ReaderOnly reports whether the mode allows no write.
func (m AccessMode) ReaderOnly() bool { return m == SingleNodeReaderOnly || m == MultiNodeReaderOnly }

// AttachmentMode says how a task sees a volume (CSI VolumeCapability.access_type).
type AttachmentMode string

const (
	FileSystem  AttachmentMode = "file-system"
	BlockDevice AttachmentMode = "block-device"
)

// Flags is a list of mount flags as one comparable value. Their order matters, as for mount(8). They may be sensitive
// (CSI MountVolume.mount_flags), so only their number is printed.
type Flags string

// FlagsOf joins flags. A flag must not contain a line break; package config refuses such flags.
func FlagsOf(flags []string) Flags { return Flags(strings.Join(flags, "\n")) }

// List returns the flags, or nil if there are none.
func (f Flags) List() []string {
	if f == "" {
		return nil
	}
	return strings.Split(string(f), "\n")
}

func (f Flags) String() string   { return fmt.Sprintf("%d mount flags", len(f.List())) }
func (f Flags) GoString() string { return f.String() }

// Usage says how an alloc uses a volume. It is comparable.
type Usage struct {
	Access     AccessMode     `json:"access_mode"`
	Attachment AttachmentMode `json:"attachment_mode"`
	ReadOnly   bool           `json:"read_only,omitempty"`
	FSType     string         `json:"fs_type,omitempty"`     // empty: the plugin chooses
	MountFlags Flags          `json:"mount_flags,omitempty"` // may be sensitive
	MountGroup string         `json:"mount_group,omitempty"` // MountVolume.volume_mount_group: a group id; empty: none
	Ownership  Ownership      `json:"ownership,omitzero"`
}

// Ownership is the owner, group and mode of a volume's files, which Holdfast sets before their first use. It is
// comparable. The zero value changes nothing.
type Ownership struct {
	Owner     string `json:"owner,omitempty"` // user ID; empty: unchanged
	Group     string `json:"group,omitempty"` // group ID; empty: unchanged
	Mode      string `json:"mode,omitempty"`  // of the root directory, octal; empty: unchanged
	Recursive bool   `json:"recursive,omitempty"`
}

func (o Ownership) String() string {
	var words []string
	for _, w := range [][2]string{{"owner", o.Owner}, {"group", o.Group}, {"mode", o.Mode}} {
		if w[1] != "" {
			words = append(words, w[0]+" "+w[1])
		}
	}
	if o.Recursive {
		words = append(words, "recursive")
	}
	return strings.Join(words, ", ")
}

// Over returns o with its empty fields taken from other.
func (o Ownership) Over(other Ownership) Ownership {
	return Ownership{cmp.Or(o.Owner, other.Owner), cmp.Or(o.Group, other.Group), cmp.Or(o.Mode, other.Mode),
		o.Recursive || other.Recursive}
}

// OwnershipResult is the result of setting an Ownership.
type OwnershipResult string

const (
	OwnershipSet      OwnershipResult = "set"
	OwnershipNotEmpty OwnershipResult = "left as it is: the volume has files, and ownership is not recursive"
	OwnershipReadOnly OwnershipResult = "left as it is: the volume is mounted read-only"
)

// Staging returns the part of u that the staging mount depends on. Publishes of one staging may differ in ReadOnly.
func (u Usage) Staging() Usage {
	u.ReadOnly, u.Ownership = false, Ownership{}
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
	if u.Ownership != (Ownership{}) {
		s += " with " + u.Ownership.String()
	}
	return s
}

// VolumeCapability is a pair of modes that a volume was made for (a capability block of the volume file).
type VolumeCapability struct {
	Access     AccessMode     `json:"access_mode"`
	Attachment AttachmentMode `json:"attachment_mode"`
}

// VolumeSpec is the content of a volume file.
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
	MountGroup   string             `json:"mount_group,omitempty"`  // mount_options: group ID of the files; empty: none
	Ownership    Ownership          `json:"ownership,omitzero"`     // mount_options
	Parameters   map[string]string  `json:"parameters,omitempty"`   // CreateVolumeRequest.parameters
	Context      map[string]string  `json:"context,omitempty"`      // volume_context; create: the plugin's answer
	Secrets      map[string]Secret  `json:"secrets,omitempty"`      // see Secret
	Required     []Topology         `json:"required,omitempty"`     // topology_request.required
	Preferred    []Topology         `json:"preferred,omitempty"`    // topology_request.preferred
	// Mutable holds the mutable parameters in effect.
	Mutable map[string]string `json:"mutable_parameters,omitempty"`
	// At most one of CloneID, CloneExternal and SnapshotID is set: what the volume is filled from
	// (volume_content_source). All fields keep their order, because hashes of open calls depend on it (intent.Hash).
	CloneID       VolumeID   `json:"clone_id,omitempty"`          // a volume of this namespace and plugin
	CloneExternal ExternalID `json:"clone_external_id,omitempty"` // a volume, by the plugin's id
	// If the plugin has controller_scope = "node", Node is the node that stores the volume and makes its controller
	// calls.
	Node       NodeName   `json:"node,omitempty"`
	SnapshotID ExternalID `json:"snapshot_id,omitempty"` // a snapshot of this namespace, or by the plugin's id
}

// Source says what a new volume is filled from (CSI VolumeContentSource). At most one field is set. The zero value
// stands for an empty volume.
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

// VolumeName returns the name of the volume.
func (s VolumeSpec) VolumeName() VolumeName { return VolumeName{s.Namespace, s.ID} }

// Supports reports whether the volume was made for the pair of modes.
func (s VolumeSpec) Supports(c VolumeCapability) bool { return slices.Contains(s.Capabilities, c) }

// VolumeState is the state of a volume.
type VolumeState string

const (
	VolumeCreating VolumeState = "creating" // an intent for CreateVolume is open: it continues by itself
	VolumeReady    VolumeState = "ready"
	VolumeDeleting VolumeState = "deleting" // an intent for DeleteVolume is or was open: nothing new may claim it
	// VolumeUncertain: CreateVolume has ended, and the plugin may have made the volume. It cannot be used;
	// Volume.Failure says why. A person has to create it again, delete it or deregister it. An open intent means that a
	// person has done so.
	VolumeUncertain VolumeState = "uncertain"
)

// Failure says how a call for a volume failed.
type Failure struct {
	RPC    RPC       `json:"rpc,omitempty"`
	Code   string    `json:"code,omitempty"`   // as CallError.Code
	Detail string    `json:"detail,omitempty"` // for people: bounded and redacted
	Since  time.Time `json:"since,omitzero"`
}

// Origin names the create block of a job that has made a volume.
type Origin struct {
	Job     string      `json:"job"`
	Group   string      `json:"group"`
	Request RequestName `json:"request"` // the volume block
}

// Volume is a volume that Holdfast knows.
type Volume struct {
	VolumeSpec
	State      VolumeState  `json:"state"`
	Created    bool         `json:"created,omitempty"`    // by CreateVolume, so Holdfast may send DeleteVolume
	Unattached bool         `json:"unattached,omitempty"` // the plugin's controller does not attach volumes
	Ephemeral  bool         `json:"ephemeral,omitempty"`  // inline: exists while its owner has it published
	Owner      AllocID      `json:"owner,omitempty"`      // of an ephemeral volume
	Capacity   int64        `json:"capacity,omitempty"`   // bytes; 0: not known
	Expansion  Expansion    `json:"expansion,omitzero"`
	Health     VolumeHealth `json:"health,omitzero"`
	Accessible []Topology   `json:"accessible_topology,omitempty"`
	Source     Source       `json:"source,omitzero"`       // what CreateVolume was asked to fill it from
	SourceSize int64        `json:"source_size,omitempty"` // bytes of the source as the creation began; 0: unknown
	Failure    Failure      `json:"failure,omitzero"`      // why its creation gave no usable volume; zero: no failure
	Origin     Origin       `json:"origin,omitzero"`       // zero: no job has made it
	Owned      Ownership    `json:"owned,omitzero"`        // last ownership that was set, or skipped because of files
	// DeleteWith is the released alloc with which the volume is deleted. DeleteVolume is repeated until the volume is
	// gone.
	DeleteWith  AllocID   `json:"delete_with,omitempty"`
	CreateIndex Seq       `json:"create_index"`
	ModifyIndex Seq       `json:"modify_index"`
	Since       time.Time `json:"since,omitzero"`
	// Made means that Holdfast had created the volume before it was registered, so Holdfast may delete it.
	Made bool `json:"made,omitempty"`
	// Modification is a change of mutable parameters whose outcome is not known; zero: there is none.
	Modification Modification `json:"modification,omitzero"`
}

// Unwanted reports whether the volume is being deleted, or will be.
func (v Volume) Unwanted() bool { return v.State == VolumeDeleting || v.DeleteWith != "" }

// OfAnotherPlugin returns an ErrConflict: a create block names the plugin wanted, but its volume v exists already at
// another plugin.
func OfAnotherPlugin(v Volume, wanted PluginID) error {
	return Errorf(ErrConflict,
		"volume %s exists at plugin %s, but its create block names plugin %s; choose another source",
		v.VolumeName(), v.Plugin, wanted)
}

// Modification is a change of mutable parameters whose outcome is not known. The zero value means that there is none.
type Modification struct {
	Asked map[string]string `json:"asked,omitempty"` // values that may or may not be in effect
	Since time.Time         `json:"since,omitzero"`
	// Code and Detail are the plugin's last error; empty: none.
	Code   string `json:"code,omitempty"`
	Detail string `json:"detail,omitempty"` // bounded and redacted
	// Earlier are the values of earlier modifications whose outcome is not known either, oldest first.
	Earlier []map[string]string `json:"earlier,omitempty"`
}

// Open reports whether the outcome of a modification is unknown.
func (m Modification) Open() bool { return len(m.Asked) > 0 }

// maxEarlier bounds Modification.Earlier.
const maxEarlier = 8

// Full reports whether Earlier is as long as it may be. Only the same call may then follow m.
func (m Modification) Full() bool { return len(m.Earlier) >= maxEarlier }

// Then returns the modification that follows m and asks for other values. If the outcome of m is not known, its values
// become earlier ones.
func (m Modification) Then(asked map[string]string, at time.Time) Modification {
	next := Modification{Asked: asked, Since: at}
	if m.Open() {
		next.Earlier = append(slices.Clone(m.Earlier), m.Asked)
	}
	return next
}

// Refused returns the modification that is still uncertain after the plugin has refused m: the last earlier one, or
// zero.
func (m Modification) Refused() Modification {
	n := len(m.Earlier)
	if n == 0 {
		return Modification{}
	}
	return Modification{Asked: m.Earlier[n-1], Since: m.Since, Code: "UNKNOWN", Detail: "it had no certain answer",
		Earlier: slices.Clone(m.Earlier[:n-1])}
}

// VolumeKey returns the key of the volume. It has no external ID before the plugin has created the volume.
func (v Volume) VolumeKey() VolumeKey { return VolumeKey{v.Plugin, v.External} }

// CreatedAs reports whether the volume was created, or is being created, under the name at the plugin
// (CreateVolumeRequest.name).
func (v Volume) CreatedAs(plugin PluginID, name string) bool {
	return v.Created && v.Plugin == plugin && v.Name == name
}

// InlineID returns the ID of the inline volume of an alloc's request.
func InlineID(alloc AllocID, request RequestName) VolumeID {
	return VolumeID(string(request) + "@" + string(alloc))
}

// InlineOf reports whether the volume is an inline volume of the alloc.
func (v Volume) InlineOf(alloc AllocID) bool {
	return v.Ephemeral && v.Owner == alloc && strings.HasSuffix(string(v.ID), string(InlineID(alloc, "")))
}

// Secret says where the value of a secret comes from: an environment variable of the shim, a file on its machine, or a
// callback of the host. The value is read for each call. Exactly one field is set.
type Secret struct {
	Env      string `json:"env,omitempty"`
	File     string `json:"file,omitempty"`
	Callback string `json:"callback,omitempty"`
	// Literal is the value itself, as volume files of Nomad have it. The shim moves it into a file before it records
	// the volume, so no record has it.
	Literal SecretValue `json:"-"`
}

// SecretValue is the value of a secret in memory. It prints as ***.
type SecretValue string

func (SecretValue) String() string               { return "***" }
func (SecretValue) GoString() string             { return "***" }
func (SecretValue) MarshalJSON() ([]byte, error) { return []byte(`"***"`), nil }
func (SecretValue) MarshalText() ([]byte, error) { return []byte("***"), nil }
func (SecretValue) Format(f fmt.State, _ rune)   { _, _ = f.Write([]byte("***")) }

// Reveal returns the value. Only the code that sends it to a plugin calls it.
func (v SecretValue) Reveal() string { return string(v) }
