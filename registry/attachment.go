package registry

// Attachment records that a volume is attached to a node by ControllerPublishVolume, or may be. Nodes share it.
type Attachment struct {
	Volume         VolumeKey         `json:"volume"`
	Name           VolumeName        `json:"name"` // for people
	Node           NodeName          `json:"node"`
	NodeID         NodeID            `json:"node_id"`                   // the node as the plugin calls it
	State          Mark              `json:"state,omitempty"`           // of ControllerPublishVolume
	Usage          Usage             `json:"usage,omitzero"`            // as sent with ControllerPublishVolume
	PublishContext map[string]string `json:"publish_context,omitempty"` // as ControllerPublishVolume answered it
	CreateIndex    Seq               `json:"create_index"`
	ModifyIndex    Seq               `json:"modify_index"`
}

// AttachmentKey names an attachment.
type AttachmentKey struct {
	Volume VolumeKey `json:"volume"`
	Node   NodeName  `json:"node"`
}

// AttachmentKey is the attachment's key.
func (a Attachment) AttachmentKey() AttachmentKey { return AttachmentKey{a.Volume, a.Node} }

// Staging records what this node has done with a volume as a whole: where it is staged, how far an expansion has come
// and what the node's plugin says of the volume. It belongs to one node.
type Staging struct {
	Volume      VolumeKey       `json:"volume"`
	Name        VolumeName      `json:"name"`               // for people
	State       Mark            `json:"state,omitempty"`    // of NodeStageVolume
	Stages      bool            `json:"stages,omitempty"`   // the plugin has STAGE_UNSTAGE_VOLUME
	Usage       Usage           `json:"usage,omitzero"`     // as sent with NodeStageVolume
	Path        Tree            `json:"path,omitzero"`      // the staging path
	Mounts      bool            `json:"mounts,omitempty"`   // something was mounted at Path after NodeStageVolume
	Boot        string          `json:"boot,omitempty"`     // boot ID under which the volume was staged
	Expanded    NodeExpansion   `json:"expanded,omitzero"`  //
	Condition   VolumeCondition `json:"condition,omitzero"` // while the volume is mounted on this node
	CreateIndex Seq             `json:"create_index"`
	ModifyIndex Seq             `json:"modify_index"`
}

// NodeExpansion is what one node has done of the expansions of a volume, or refused. The zero value: nothing.
type NodeExpansion struct {
	Done  int64         `json:"done,omitempty"` // capacity in bytes that NodeExpandVolume has made
	Range CapacityRange `json:"range,omitzero"` // that the plugin was asked for last
	// Refused is the code with which the plugin refused Range, or that is assumed of a call whose end was not awaited.
	// The plugin is asked again when the volume is mounted anew. What the controller says later does not change it.
	Refused string `json:"refused,omitempty"`
	// At is the path at which the plugin was asked last, on the host. It is asked nowhere else while the volume stays
	// mounted there.
	At string `json:"at,omitempty"`
	// What the plugin answered last. Empty: nothing was wrong.
	RPC    RPC    `json:"rpc,omitempty"`
	Code   string `json:"code,omitempty"`
	Detail string `json:"detail,omitempty"` // bounded and redacted
}

// neverRetried is the answer after which the node's plugin is not asked again before the volume is mounted anew (CSI
// NodeExpandVolume).
const neverRetried = "FAILED_PRECONDITION"

// Refuses reports whether the plugin has refused to expand the volume as asked, so that it is not asked again now.
func (e NodeExpansion) Refuses(asked CapacityRange) bool {
	return e.Refused == neverRetried || e.Refused != "" && e.Range == asked
}

// Retriable reports whether the plugin may be asked again for what it refused, because a person asks for it again.
func (e NodeExpansion) Retriable() bool { return e.Refused != "" && e.Refused != neverRetried }

// Failed returns e after the plugin answered with an error.
func (e NodeExpansion) Failed(err *CallError) NodeExpansion {
	e.Refused, e.RPC, e.Code, e.Detail = err.Code, err.RPC, err.Code, err.Detail
	return e
}

// Made returns e after the plugin has made the volume as large as bytes.
func (e NodeExpansion) Made(bytes int64) NodeExpansion {
	return NodeExpansion{Done: max(e.Done, bytes), Range: e.Range}
}

// Answers reports whether the plugin has done, or finally refused, what is pending for the node.
func (e NodeExpansion) Answers(v Volume) bool {
	return v.Expansion.Pending() && (e.Done >= v.Expansion.Node.Required || e.Impossible(v))
}

// Impossible reports whether what is pending for the node can never be: its plugin refuses the size, and the plugin's
// controller has not made it either.
func (e NodeExpansion) Impossible(v Volume) bool {
	return v.Unmade() && e.Range == v.Expansion.Node && (e.Refused == "OUT_OF_RANGE" || e.Refused == "INVALID_ARGUMENT")
}
