package controller

import (
	"context"

	"holdfast/registry"
)

// Driver is what controller needs of a controller plugin. Calls for one volume are never concurrent. Every error of a call that
// was or may have been sent is a *registry.CallError or is treated as one of unknown outcome.
type Driver interface {
	Create(context.Context, registry.InstanceKey, CreateRequest) (Created, error)
	Delete(context.Context, registry.InstanceKey, DeleteRequest) error
	// Attach returns the publish context.
	Attach(context.Context, registry.InstanceKey, AttachRequest) (map[string]string, error)
	Detach(context.Context, registry.InstanceKey, DetachRequest) error
	Validate(context.Context, registry.InstanceKey, ValidateRequest) (Validated, error)
	Expand(context.Context, registry.InstanceKey, ExpandRequest) (Expanded, error)
}

// Node is the node's half of an expansion. Whoever calls Grow holds the volume's lane.
type Node interface {
	// Grow has the node see to an expansion that is pending, if the volume is where it can. What the plugin refuses for certain is recorded,
	// and no error.
	Grow(ctx context.Context, call registry.Call, key registry.VolumeKey) error
	// Grows says whether Grow would have something to do.
	Grows(view registry.View, v registry.Volume) bool
}

// Plugins answers which instance of a plugin is the active one.
type Plugins interface {
	// Await waits for a healthy instance until ctx ends.
	Await(context.Context, registry.Role, registry.PluginID) (registry.Instance, error)
	Find(registry.Role, registry.PluginID) (registry.Instance, bool)
}

// Secrets resolves references to secrets, for one call.
type Secrets interface {
	Resolve(context.Context, map[string]registry.Secret) (map[string]registry.SecretValue, error)
}

// CreateRequest is CreateVolumeRequest.
type CreateRequest struct {
	Name         string                          `json:"name"`
	CapacityMin  int64                           `json:"capacity_min,omitempty"` // capacity_range.required_bytes; both 0: no range
	CapacityMax  int64                           `json:"capacity_max,omitempty"` // capacity_range.limit_bytes
	Capabilities []registry.VolumeCapability     `json:"capabilities"`
	FSType       string                          `json:"fs_type,omitempty"`     // of each file-system capability
	MountFlags   registry.Flags                  `json:"mount_flags,omitempty"` // of each file-system capability
	Parameters   map[string]string               `json:"parameters,omitempty"`
	Required     []registry.Topology             `json:"required,omitempty"`  // accessibility_requirements.requisite
	Preferred    []registry.Topology             `json:"preferred,omitempty"` // both empty: accessibility_requirements is not sent
	Source       registry.Source                 `json:"source,omitzero"`     // volume_content_source
	Secrets      map[string]registry.SecretValue `json:"-"`
}

// Created is CreateVolumeResponse.volume as the plugin sent it: nothing in it has been checked. Without a volume in the answer it
// is the zero value.
type Created struct {
	VolumeID   string
	Capacity   int64
	Context    map[string]string
	Accessible []registry.Topology
	Source     registry.Source
}

// Private is what must not appear in the error of a call, though the call does not carry it.
type Private struct {
	MountFlags registry.Flags
	Contexts   []map[string]string
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

// DetachRequest is ControllerUnpublishVolumeRequest. Node is never empty: that would mean "from all nodes".
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

// Expanded is ControllerExpandVolumeResponse, unchecked.
type Expanded struct {
	Capacity int64
	Node     bool // the node has to see to it too
}

// Validated is ValidateVolumeCapabilitiesResponse.
type Validated struct {
	Confirmed []registry.VolumeCapability // what the plugin confirmed; empty: nothing
	Message   string                      // bounded and redacted
}
