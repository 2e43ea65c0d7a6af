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

// Key returns the key of the attachment's record.
func (k AttachmentKey) Key() Key {
	return Key{BucketAttachments, PathOf(k.Volume.Plugin, string(k.Volume.External), string(k.Node))}
}

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
	Done int64 `json:"done,omitempty"` // capacity in bytes that NodeExpandVolume is done with
	// Refused is the code with which the plugin refused, or that is assumed of a call whose end was not awaited. The
	// plugin is asked again when the volume is mounted anew.
	Refused string `json:"refused,omitempty"`
	// At is the path at which the plugin was asked last, on the host. It is asked nowhere else while the volume stays
	// mounted there.
	At string `json:"at,omitempty"`
	// What the plugin answered last. Empty: nothing was wrong.
	RPC    RPC    `json:"rpc,omitempty"`
	Code   string `json:"code,omitempty"`
	Detail string `json:"detail,omitempty"` // bounded and redacted
}
