package csi

import (
	"context"

	"holdfast/registry"
)

// Private holds values that must not appear in the error of a call, and that the call itself does not carry.
type Private struct {
	Secrets    map[string]registry.SecretValue
	Unknown    bool // the volume has secrets that could not be resolved: the plugin's text is withheld, not its code
	MountFlags registry.Flags
	Contexts   []map[string]string
}

// PrivateFunc returns values to redact that are not in the request. It is called only if the plugin has returned a
// text.
type PrivateFunc func(context.Context) Private

// asFunc is a PrivateFunc that returns p.
func (p Private) asFunc(context.Context) Private { return p }

// CreateRequest is CreateVolumeRequest.
type CreateRequest struct {
	Name         string                          `json:"name"`
	CapacityMin  int64                           `json:"capacity_min,omitempty"` // both 0: no capacity_range
	CapacityMax  int64                           `json:"capacity_max,omitempty"`
	Capabilities []registry.VolumeCapability     `json:"capabilities"`
	FSType       string                          `json:"fs_type,omitempty"`     // of each file-system capability
	MountFlags   registry.Flags                  `json:"mount_flags,omitempty"` // of each file-system capability
	Parameters   map[string]string               `json:"parameters,omitempty"`
	Mutable      map[string]string               `json:"mutable_parameters,omitempty"`
	Required     []registry.Topology             `json:"required,omitempty"`  // requisite
	Preferred    []registry.Topology             `json:"preferred,omitempty"` // both empty: no requirements
	Source       registry.Source                 `json:"source,omitzero"`     // volume_content_source
	Secrets      map[string]registry.SecretValue `json:"-"`
}

// Created is CreateVolumeResponse.volume as the plugin sent it, unchecked. It is the zero value if the answer has no
// volume.
type Created struct {
	VolumeID   string
	Capacity   int64
	Context    map[string]string
	Accessible []registry.Topology
	Source     registry.Source
}

// DeleteRequest is DeleteVolumeRequest.
type DeleteRequest struct {
	VolumeID registry.ExternalID             `json:"volume_id"`
	Secrets  map[string]registry.SecretValue `json:"-"`
	Private  Private                         `json:"-"`
}

// AttachRequest is ControllerPublishVolumeRequest.
type AttachRequest struct {
	VolumeID      registry.ExternalID             `json:"volume_id"`
	Node          registry.NodeID                 `json:"node_id"`
	Usage         registry.Usage                  `json:"usage"` // its ReadOnly is readonly
	VolumeContext map[string]string               `json:"volume_context,omitempty"`
	Secrets       map[string]registry.SecretValue `json:"-"`
}

// DetachRequest is ControllerUnpublishVolumeRequest. Node is never empty, because that would mean "from all nodes".
type DetachRequest struct {
	VolumeID registry.ExternalID             `json:"volume_id"`
	Node     registry.NodeID                 `json:"node_id"`
	Secrets  map[string]registry.SecretValue `json:"-"`
	Private  Private                         `json:"-"`
}

// ValidateRequest is ValidateVolumeCapabilitiesRequest.
type ValidateRequest struct {
	VolumeID      registry.ExternalID             `json:"volume_id"`
	VolumeContext map[string]string               `json:"volume_context,omitempty"`
	Capabilities  []registry.VolumeCapability     `json:"capabilities"`
	FSType        string                          `json:"fs_type,omitempty"`
	MountFlags    registry.Flags                  `json:"mount_flags,omitempty"`
	Parameters    map[string]string               `json:"parameters,omitempty"`
	Mutable       map[string]string               `json:"mutable_parameters,omitempty"`
	Secrets       map[string]registry.SecretValue `json:"-"`
}

// ExpandRequest is ControllerExpandVolumeRequest.
type ExpandRequest struct {
	VolumeID registry.ExternalID             `json:"volume_id"`
	Range    registry.CapacityRange          `json:"capacity_range"`
	Usage    registry.Usage                  `json:"usage,omitzero"` // volume_capability; zero: not sent
	Secrets  map[string]registry.SecretValue `json:"-"`
	Private  Private                         `json:"-"`
}

// ModifyRequest is ControllerModifyVolumeRequest.
type ModifyRequest struct {
	VolumeID registry.ExternalID             `json:"volume_id"`
	Mutable  map[string]string               `json:"mutable_parameters"`
	Secrets  map[string]registry.SecretValue `json:"-"`
	Private  Private                         `json:"-"`
}

// Expanded is ControllerExpandVolumeResponse, unchecked.
type Expanded struct {
	Capacity              int64
	NodeExpansionRequired bool
}

// Validated is ValidateVolumeCapabilitiesResponse.
type Validated struct {
	Confirmed []registry.VolumeCapability // what the plugin confirmed; empty: nothing
	Message   string                      // bounded and redacted
}

// StageRequest is NodeStageVolumeRequest. Paths in requests are as the plugin sees them.
type StageRequest struct {
	VolumeID       registry.ExternalID             `json:"volume_id"`
	PublishContext map[string]string               `json:"publish_context,omitempty"`
	StagingPath    string                          `json:"-"` // staging_target_path
	Usage          registry.Usage                  `json:"usage"`
	VolumeContext  map[string]string               `json:"volume_context,omitempty"`
	Secrets        map[string]registry.SecretValue `json:"-"`
}

// UnstageRequest is NodeUnstageVolumeRequest.
type UnstageRequest struct {
	VolumeID    registry.ExternalID `json:"volume_id"`
	StagingPath string              `json:"-"` // staging_target_path
	Private     PrivateFunc         `json:"-"` // may be nil
}

// PublishRequest is NodePublishVolumeRequest.
type PublishRequest struct {
	VolumeID       registry.ExternalID             `json:"volume_id"`
	PublishContext map[string]string               `json:"publish_context,omitempty"`
	StagingPath    string                          `json:"-"`     // empty: the plugin does not stage
	TargetPath     string                          `json:"-"`     // target_path; its parent exists
	Usage          registry.Usage                  `json:"usage"` // its ReadOnly is readonly
	VolumeContext  map[string]string               `json:"volume_context,omitempty"`
	Secrets        map[string]registry.SecretValue `json:"-"`
}

// UnpublishRequest is NodeUnpublishVolumeRequest.
type UnpublishRequest struct {
	VolumeID   registry.ExternalID `json:"volume_id"`
	TargetPath string              `json:"-"` // target_path
	Private    PrivateFunc         `json:"-"` // may be nil
}

// NodeExpandRequest is NodeExpandVolumeRequest.
type NodeExpandRequest struct {
	VolumeID    registry.ExternalID             `json:"volume_id"`
	Path        string                          `json:"-"` // volume_path
	StagingPath string                          `json:"-"` // staging_target_path; empty: the plugin does not stage
	Range       registry.CapacityRange          `json:"capacity_range"`
	Usage       registry.Usage                  `json:"usage"` // volume_capability
	Secrets     map[string]registry.SecretValue `json:"-"`
	Private     Private                         `json:"-"`
}

// StatsRequest is NodeGetVolumeStatsRequest.
type StatsRequest struct {
	VolumeID    registry.ExternalID
	Path        string      // volume_path: where it is published or staged
	StagingPath string      // staging_target_path; empty: the plugin does not stage
	Private     PrivateFunc // may be nil
}

// Page is ListVolumesResponse as the plugin sent it, unchecked.
type Page struct {
	Entries []Entry
	Next    string // token; empty: it is the last
}

// Entry is a volume as its plugin describes it, unchecked.
type Entry struct {
	Volume     registry.ExternalID
	Capacity   int64 // bytes; 0: not known
	Context    map[string]string
	Accessible []registry.Topology
	Nodes      []registry.NodeID   // where it is attached
	Condition  *registry.Condition // nil: not in the answer
}
