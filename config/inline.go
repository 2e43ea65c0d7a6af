package config

import (
	"holdfast/hooks"
	"holdfast/registry"
)

var ephemeralStanza = &stanza{
	name: "ephemeral",
	doc: "An inline volume belongs to its alloc: its plugin makes it when the alloc starts. The volume block then " +
		"has no source and no per_alloc.",
	fields: []field{
		{name: "plugin_id", kind: isText, required: true, doc: "The plugin that makes the volume."},
		{name: "context", kind: isMap,
			doc: "The volume context, as the plugin documents it. It must not hold references that are known at " +
				"run time only."},
		secretsField,
	},
}

// inline reads the ephemeral block and the usage of a volume block. The usage defaults to a file system for a
// single-node writer. The plugin receives the values as written, so a run-time reference is an error.
func (f *file) inline(volume *fields, b block) (*hooks.Ephemeral, registry.Usage) {
	if volume.given("source") {
		f.errorf(volume.rangeOf("source"), "remove source, or the ephemeral block",
			"an inline volume has no source: its plugin makes it")
	}
	if volume.isTrue("per_alloc") {
		f.errorf(volume.rangeOf("per_alloc"), "remove per_alloc", "every alloc has an inline volume of its own")
	}
	in := f.open(b, ephemeralStanza)
	in.constant = true
	e := &hooks.Ephemeral{
		Plugin: parsed(in, "plugin_id", registry.ParsePluginID), Context: in.stringMap("context"),
		Secrets: in.secretReferences(),
	}
	f.checkSize(in, "context", e.Context)
	u := registry.Usage{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem}
	if volume.has("access_mode") {
		u.Access = oneOf[registry.AccessMode](volume, "access_mode")
	}
	if volume.has("attachment_mode") {
		u.Attachment = oneOf[registry.AttachmentMode](volume, "attachment_mode")
	}
	if u.Access != "" && !singleNode(u.Access) {
		f.errorf(volume.rangeOf("access_mode"), "use single-node-writer, or leave it out",
			"an inline volume is never on several nodes: it belongs to its alloc")
	}
	return e, u
}
