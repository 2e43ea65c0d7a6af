package config

import (
	"slices"

	"holdfast/hooks"
	"holdfast/registry"
)

// requests holds the volume blocks of a group.
type requests struct {
	csi        []hooks.VolumeRequest
	carried    []string         // names of volumes of other types
	blocks     map[string]block // of all volumes, by name
	unexpanded bool             // a dynamic block may make others
}

// find returns the CSI request of that name, if any.
func (r *requests) find(name string) (hooks.VolumeRequest, bool) {
	i := slices.IndexFunc(r.csi, func(v hooks.VolumeRequest) bool { return string(v.Name) == name })
	if i < 0 {
		return hooks.VolumeRequest{}, false
	}
	return r.csi[i], true
}

// requests reads the volume blocks of a group.
func (f *file) requests(group *fields, facts groupFacts) *requests {
	asked := &requests{blocks: map[string]block{}, unexpanded: slices.Contains(group.unexpanded, "volume")}
	for _, b := range group.all("volume") {
		name, ok := f.label(b)
		if !ok {
			continue
		}
		if _, exists := asked.blocks[name]; exists {
			f.errorf(b.head, "give each volume a name of its own", "the group has two volumes named %q", name)
			continue
		}
		asked.blocks[name] = b
		f.request(asked, b, facts)
	}
	f.checkTogether(asked)
	return asked
}

var volumeStanza = &stanza{
	name: "volume",
	doc:  "A volume block of a group. A volume of type host is passed on as it is written.",
	fields: []field{
		{name: "type", kind: isChoice, required: true, words: []string{"csi", "host"},
			doc: "Which volumes the block asks for."},
		{name: "source", kind: isText, doc: "The ID of a volume. Required without ephemeral."},
		{name: "read_only", kind: isBool, fallback: false, doc: "Uses the volume without the right to write."},
		{name: "access_mode", kind: isChoice, words: words(registry.AccessModes...),
			doc: "Who may use the volume at the same time. " +
				"Required without ephemeral; an inline volume has single-node-writer."},
		{name: "attachment_mode", kind: isChoice, words: words(attachmentModes...),
			doc: "Whether the task sees a directory or a device. " +
				"Required without ephemeral; an inline volume has file-system."},
		{name: "per_alloc", kind: isBool, fallback: false,
			doc: "Every alloc uses a volume of its own, whose ID is the source with the index of the alloc: " +
				"`data[0]`."},
		{name: "sticky", kind: isBool, fallback: false, doc: "For host volumes only."},
		{name: "mount_options", kind: isBlock, block: optionsStanza, doc: "How the file system is mounted."},
		{name: "ephemeral", kind: isBlock, block: ephemeralStanza, doc: "Makes the volume an inline one."},
		{name: "create", kind: isBlock, block: createStanza,
			doc: "Creates the volume with the first alloc that uses it."},
	},
}

// request reads one volume block and adds it to asked.
func (f *file) request(asked *requests, b block, facts groupFacts) {
	in := f.fields(b, volumeStanza)
	in.need("type")
	switch kind := oneOf[string](in, "type"); kind {
	case "host":
		if inline, ok := in.one("ephemeral"); ok {
			f.errorf(inline.head, `use type = "csi"`, "a volume of the host cannot be an inline one")
		}
		asked.carried = append(asked.carried, b.labels[0])
		return
	case "":
		return
	}
	f.checkNames(b, volumeStanza)
	v := hooks.VolumeRequest{Name: registry.RequestName(b.labels[0]), Type: "csi"}
	switch inline, ok := in.one("ephemeral"); {
	case ok:
		v.Ephemeral, v.Usage = f.inline(in, inline)
	case in.lacks("ephemeral") && !in.misspelt("ephemeral"): // otherwise one error would cause four reports
		f.stored(in, &v)
	}
	if create, ok := in.one("create"); ok {
		v.Create = f.create(create, v)
	}
	v.Usage.ReadOnly = in.isTrue("read_only")
	if options, ok := in.one("mount_options"); ok {
		f.mountOptions(options, &v.Usage)
		if v.Usage.Attachment == registry.BlockDevice {
			f.errorf(options.head, "remove it", "a block device has no mount options")
		}
	}
	f.checkUse(in, v, facts)
	asked.csi = append(asked.csi, v)
}

// stored reads the fields of a volume block for a persistent volume.
func (f *file) stored(in *fields, v *hooks.VolumeRequest) {
	if !in.has("source") {
		f.errorf(in.head, `add source = "id of a volume", or for a volume that lives as long as its alloc `+
			`ephemeral { plugin_id = ... }`, "volume has no source")
	}
	in.need("access_mode", "attachment_mode")
	v.Source = string(parsed(in, "source", registry.ParseVolumeID))
	v.PerAlloc = in.isTrue("per_alloc")
	v.Usage.Access = oneOf[registry.AccessMode](in, "access_mode")
	v.Usage.Attachment = oneOf[registry.AttachmentMode](in, "attachment_mode")
}

var attachmentModes = []registry.AttachmentMode{registry.FileSystem, registry.BlockDevice}
