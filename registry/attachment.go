package registry

// Attachment records that a volume is, or may be, attached to a node by ControllerPublishVolume. Nodes share it.
type Attachment struct {
	Volume         VolumeKey         `json:"volume"`
	Name           VolumeName        `json:"name"` // for people
	Node           NodeName          `json:"node"`
	NodeID         NodeID            `json:"node_id"`                   // the plugin's ID of the node
	State          Mark              `json:"state,omitempty"`           // of ControllerPublishVolume
	Usage          Usage             `json:"usage,omitzero"`            // as sent with ControllerPublishVolume
	PublishContext map[string]string `json:"publish_context,omitempty"` // as ControllerPublishVolume answered it
	Detaching      Detaching         `json:"detaching,omitzero"`        // desired state: detached
	CreateIndex    Seq               `json:"create_index"`
	ModifyIndex    Seq               `json:"modify_index"`
}

// Detaching records that an operator wants the volume detached. The zero value means that no operator does.
type Detaching struct {
	Forced
	Confirmed bool `json:"confirmed,omitempty"` // by the operator: a failed call is skipped
}

// AttachmentKey names an attachment.
type AttachmentKey struct {
	Volume VolumeKey `json:"volume"`
	Node   NodeName  `json:"node"`
}

// AttachmentKey returns the attachment's key.
func (a Attachment) AttachmentKey() AttachmentKey { return AttachmentKey{a.Volume, a.Node} }

// Staging records the state of a volume on one node: its staging path, the progress of its expansion and its condition.
// It belongs to that node.
type Staging struct {
	Volume      VolumeKey     `json:"volume"`
	Name        VolumeName    `json:"name"`               // for people
	State       Mark          `json:"state,omitempty"`    // of NodeStageVolume
	Stages      bool          `json:"stages,omitempty"`   // the plugin has STAGE_UNSTAGE_VOLUME
	Usage       Usage         `json:"usage,omitzero"`     // as sent with NodeStageVolume
	Path        Tree          `json:"path,omitzero"`      // the staging path
	Mounts      bool          `json:"mounts,omitempty"`   // something was mounted at Path after NodeStageVolume
	Server      TaskKey       `json:"server,omitzero"`    // the task that serves the mount (FUSE); zero: the kernel
	Boot        string        `json:"boot,omitempty"`     // boot ID under which the volume was staged
	Expanded    NodeExpansion `json:"expanded,omitzero"`  //
	Condition   Condition     `json:"condition,omitzero"` // while the volume is mounted on this node
	CreateIndex Seq           `json:"create_index"`
	ModifyIndex Seq           `json:"modify_index"`
}

// NodeExpansion is the progress of a volume's expansions on one node. The zero value means that none was tried.
type NodeExpansion struct {
	Done  int64         `json:"done,omitempty"` // capacity in bytes that NodeExpandVolume has reached
	Range CapacityRange `json:"range,omitzero"` // of the last request
	// Refused is the code with which the plugin refused Range, or the assumed code of a call that was abandoned. Later
	// answers of the controller do not change Refused. When the volume is next mounted, the plugin is asked again.
	Refused string `json:"refused,omitempty"`
	// At is the path of the last request, on the host. Requests name no other path while the volume stays mounted
	// there.
	At string `json:"at,omitempty"`
	// RPC, Code and Detail are the plugin's last error; empty: none.
	RPC    RPC    `json:"rpc,omitempty"`
	Code   string `json:"code,omitempty"`
	Detail string `json:"detail,omitempty"` // bounded and redacted
}

// neverRetried is the code after which NodeExpandVolume is not repeated before the volume is mounted again (CSI spec).
const neverRetried = "FAILED_PRECONDITION"

// Refuses reports whether the plugin has refused the request, so it is not repeated now.
func (e NodeExpansion) Refuses(asked CapacityRange) bool {
	return e.Refused == neverRetried || e.Refused != "" && e.Range == asked
}

// Retriable reports whether a refused request may be repeated on an operator's request.
func (e NodeExpansion) Retriable() bool { return e.Refused != "" && e.Refused != neverRetried }

// WithError returns e with the error of the plugin.
func (e NodeExpansion) WithError(err *CallError) NodeExpansion {
	e.Refused, e.RPC, e.Code, e.Detail = err.Code, err.RPC, err.Code, err.Detail
	return e
}

// Expanded returns e after the plugin expanded the volume to a size in bytes.
func (e NodeExpansion) Expanded(bytes int64) NodeExpansion {
	return NodeExpansion{Done: max(e.Done, bytes), Range: e.Range}
}

// Mounting returns e for the first mount on the node, which begins now: what other nodes have expanded before is
// expanded in it.
func (e NodeExpansion) Mounting(v Volume) NodeExpansion {
	e.Done = max(e.Done, v.Expansion.NodeDone)
	return e
}

// Answers reports whether the plugin completed, or refused for good, the expansion that is pending on the node.
func (e NodeExpansion) Answers(v Volume) bool {
	return v.Expansion.Pending() && (e.Done >= v.Expansion.Node.Required || e.Impossible(v))
}

// Impossible reports whether the pending expansion can never succeed: the node's plugin refuses the size, and the
// controller has not expanded the volume either.
func (e NodeExpansion) Impossible(v Volume) bool {
	return v.ExpandsOnNodeOnly() && e.Range == v.Expansion.Node &&
		(e.Refused == "OUT_OF_RANGE" || e.Refused == "INVALID_ARGUMENT")
}
