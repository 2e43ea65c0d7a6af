package config

import (
	"slices"
	"strings"

	"github.com/hashicorp/hcl/v2/hclsyntax"

	"holdfast/registry"
)

// specStanza declares a volume file, which has no block of its own.
var specStanza = &stanza{
	name: "a volume file",
	doc:  "A volume file describes one volume, to be created or registered.",
	fields: []field{
		{name: "id", kind: isText, required: true, doc: "The ID by which jobs name the volume."},
		{name: "namespace", kind: isText, fallback: string(registry.DefaultNamespace), doc: "The namespace of the ID."},
		{name: "name", kind: isText, doc: "The name that the plugin gets. Without it, the ID."},
		{name: "type", kind: isText, fallback: "csi", doc: "Always csi."},
		{name: "plugin_id", kind: isText, required: true, doc: "The plugin that has the volume."},
		{name: "external_id", kind: isText, doc: "The plugin's ID of a volume that exists, to register it."},
		{name: "snapshot_id", kind: isText,
			doc: "The snapshot that the new volume is filled from: its ID in the namespace, or the plugin's ID."},
		{name: "clone_id", kind: isText, doc: "The ID of a volume that the new volume is filled from."},
		{name: "clone_external_id", kind: isText, doc: "The plugin's ID of such a volume."},
		{name: "node", kind: isText, doc: "The node of a cluster that is to have the volume, for a plugin with " +
			"controller_scope = \"node\". Without it, the node that is asked to create it."},
		{name: "capacity_min", kind: isSize, doc: "The least size of a new volume."},
		{name: "capacity_max", kind: isSize, doc: "The greatest size of a new volume."},
		{name: "access_mode", kind: isChoice, words: words(registry.AccessModes...),
			doc: "With attachment_mode, the same as one capability."},
		{name: "attachment_mode", kind: isChoice, words: words(attachmentModes...),
			doc: "With access_mode, the same as one capability."},
		{name: "parameters", kind: isMap, doc: "Parameters of a new volume, as the plugin documents them."},
		{name: "mutable_parameters", kind: isMap,
			doc: "Parameters that the plugin can modify later, as it documents them."},
		{name: "context", kind: isMap, doc: "The volume context of a volume that is registered."},
		secretsField,
		{name: "capability", kind: isBlock, block: capabilityStanza,
			doc: "A way in which the volume can be used. At least one is required."},
		{name: "mount_options", kind: isBlock, block: optionsStanza, doc: "How the file system is mounted."},
		{name: "topology_request", kind: isBlock, block: topologyStanza,
			doc: "Where the volume is to be accessible."},
	},
	carriedBlocks: topLevel,
}

var capabilityStanza = &stanza{
	name: "capability",
	fields: []field{
		{name: "access_mode", kind: isChoice, required: true, words: words(registry.AccessModes...),
			doc: "Who may use the volume at the same time."},
		{name: "attachment_mode", kind: isChoice, required: true, words: words(attachmentModes...),
			doc: "Whether tasks see a directory or a device."},
	},
}

var (
	topologyStanza = &stanza{
		name: "topology_request",
		fields: []field{
			{name: "required", kind: isBlock, block: topologiesStanza,
				doc: "The volume must be accessible from one of these. A registered volume is taken to be."},
			{name: "preferred", kind: isBlock, block: topologiesStanza,
				doc: "The plugin tries these first, in this order."},
		},
	}
	topologiesStanza = &stanza{
		name:   "required, preferred",
		fields: []field{{name: "topology", kind: isBlock, block: segmentsStanza, doc: "One or several topologies."}},
	}
	segmentsStanza = &stanza{
		name: "topology",
		fields: []field{{name: "segments", kind: isMap,
			doc: "The segments of one topology, as the plugin documents them. The block may be repeated."}},
	}
)

// volume reads a volume file.
func (f *file) volume() *registry.VolumeSpec {
	f.kind = "a volume file"
	in := f.open(f.block, specStanza)
	if kind := in.text("type"); kind != "csi" {
		f.errorf(in.rangeOf("type"), `use type = "csi"; host volumes are the orchestrator's own`,
			"a volume of type %q is not a CSI volume", kind)
	}
	spec := &registry.VolumeSpec{
		Namespace: parsed(in, "namespace", registry.ParseNamespace),
		ID:        parsed(in, "id", registry.ParseVolumeID),
		Plugin:    parsed(in, "plugin_id", registry.ParsePluginID),
		External:  parsed(in, "external_id", registry.ParseExternalID),
		Node:      parsed(in, "node", registry.ParseNodeName),
		Context:   in.stringMap("context"),
	}
	in.contentOf(spec)
	spec.Name = string(spec.ID)
	if in.has("name") {
		spec.Name = parsed(in, "name", registry.ParseCreateName)
	}
	spec.Capabilities = f.capabilities(in)
	if options, ok := in.one("mount_options"); ok {
		f.volumeOptions(options, spec)
	}
	spec.Required, spec.Preferred = f.topologies(in)
	spec.Secrets = in.secretReferences()
	f.checkVolume(in, spec)
	return spec
}

// contentOf reads the size, the source and the parameters of a new volume.
func (f *fields) contentOf(spec *registry.VolumeSpec) {
	spec.CloneID = parsed(f, "clone_id", parseCloneID)
	spec.CloneExternal = parsed(f, "clone_external_id", registry.ParseExternalID)
	spec.SnapshotID = parsed(f, "snapshot_id", registry.ParseExternalID)
	spec.CapacityMin, spec.CapacityMax = f.capacity("capacity_min"), f.capacity("capacity_max")
	spec.Parameters, spec.Mutable = f.stringMap("parameters"), f.stringMap("mutable_parameters")
}

// parseCloneID reads clone_id, which names a volume of the same namespace.
func parseCloneID(s string) (registry.VolumeID, error) {
	id, err := registry.ParseVolumeID(s)
	if err != nil {
		return id, registry.Invalid("%w; clone_id is the id of a volume here: if this is the plugin's own id for it, "+
			"write clone_external_id", err)
	}
	return id, nil
}

// volumeOptions reads the default mount options, which a job may override. They apply to file systems only. Nomad's
// volume files set them for block devices too, so that is a warning and not an error.
func (f *file) volumeOptions(b block, spec *registry.VolumeSpec) {
	var u registry.Usage
	f.mountOptions(b, &u)
	spec.FSType, spec.MountFlags, spec.MountGroup, spec.Ownership = u.FSType, u.MountFlags, u.MountGroup, u.Ownership
	mounted := func(c registry.VolumeCapability) bool { return c.Attachment != registry.BlockDevice }
	if len(spec.Capabilities) > 0 && !slices.ContainsFunc(spec.Capabilities, mounted) {
		f.warnf(b.head, "remove it, or add a capability with file-system",
			"mount_options has no effect: the volume is never anything but a block device")
	}
}

func (f *file) checkVolume(in *fields, spec *registry.VolumeSpec) {
	if spec.CapacityMax > 0 && spec.CapacityMax < spec.CapacityMin {
		f.errorf(in.rangeOf("capacity_max"), "raise it, or lower capacity_min",
			"capacity_max is smaller than capacity_min")
	}
	sources := slices.DeleteFunc([]string{"clone_id", "clone_external_id", "snapshot_id"}, func(name string) bool {
		return !in.given(name)
	})
	if len(sources) > 1 {
		f.errorf(in.rangeOf(sources[0]), "keep one of them", "a volume is filled from one source, not from %s",
			strings.Join(sources, " and "))
	}
	if spec.ID != "" && spec.CloneID == spec.ID {
		f.errorf(in.rangeOf("clone_id"), "name another volume", "volume %q cannot be its own source", spec.ID)
	}
	f.checkSize(in, "parameters", spec.Parameters)
	f.checkSize(in, "mutable_parameters", spec.Mutable)
	f.checkSize(in, "context", spec.Context)
}

// capabilities reads the capability blocks. The older form, two modes at the top level, is one capability.
func (f *file) capabilities(in *fields) []registry.VolumeCapability {
	blocks := in.all("capability")
	switch {
	case len(blocks) > 0 && (in.given("access_mode") || in.given("attachment_mode")):
		f.errorf(in.rangeOf("access_mode"), "move them into a capability block",
			"modes at the top level and capability blocks exclude each other")
	case len(blocks) == 0 && (in.has("access_mode") || in.has("attachment_mode")):
		body := &hclsyntax.Body{Attributes: hclsyntax.Attributes{}}
		for _, mode := range capabilityStanza.fields {
			if attr := f.body.Attributes[mode.name]; attr != nil {
				body.Attributes[mode.name] = attr
			}
		}
		blocks = []block{{kind: "capability", body: body, ctx: f.ctx, head: f.head}}
	case in.lacks("capability"):
		f.errorf(f.head, `add capability { access_mode = "single-node-writer" attachment_mode = "file-system" }, `+
			`each on a line of its own`, "a volume has at least one capability")
	}
	var list []registry.VolumeCapability
	for _, b := range blocks {
		modes := f.open(b, capabilityStanza)
		c := registry.VolumeCapability{
			Access:     oneOf[registry.AccessMode](modes, "access_mode"),
			Attachment: oneOf[registry.AttachmentMode](modes, "attachment_mode"),
		}
		if slices.Contains(list, c) && c.Access != "" && c.Attachment != "" {
			f.errorf(b.head, "remove one of the two", "this capability is given twice")
		}
		list = append(list, c)
	}
	return list
}

// topologies reads topology_request.
func (f *file) topologies(volume *fields) (required, preferred []registry.Topology) {
	b, ok := volume.one("topology_request")
	if !ok {
		return nil, nil
	}
	in := f.open(b, topologyStanza)
	return f.topologyList(in, "required"), f.topologyList(in, "preferred")
}

// topologyList reads one topology per segments block. A topology block may contain several segments blocks.
func (f *file) topologyList(request *fields, name string) []registry.Topology {
	b, ok := request.one(name)
	if !ok {
		return nil
	}
	var list []registry.Topology
	for _, inner := range f.open(b, topologiesStanza).all("topology") {
		in := f.open(inner, segmentsStanza)
		found := in.stringMaps("segments")
		if len(found) == 0 && !f.unsure(inner) {
			f.errorf(inner.head, `add segments { zone = "a" }`, "a topology has segments")
		}
		for _, segments := range found {
			list = append(list, segments)
		}
	}
	return list
}

// capacity reads a number of bytes, given as a number or as a string such as "10GiB".
func (f *fields) capacity(name string) int64 {
	f.declared(name, isSize)
	s, ok := f.primitive(name)
	if !ok {
		return 0
	}
	n, err := registry.ParseSize(s)
	if err != nil {
		f.errorf(f.rangeOf(name), `write bytes, or a number with a unit: "10GiB" (2^30), "10GB" (10^9)`, "%s %v", name,
			err)
	}
	return n
}
