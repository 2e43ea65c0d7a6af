package config

import (
	"slices"
	"strings"

	"github.com/hashicorp/hcl/v2/hclsyntax"

	"holdfast/registry"
)

var specShape = shape{
	attrs: []string{
		"id", "namespace", "name", "type", "plugin_id", "external_id", "snapshot_id", "clone_id", "clone_external_id",
		"capacity_min", "capacity_max",
		"access_mode", "attachment_mode", "parameters", "context", "secrets",
	},
	blocks: []string{"capability", "mount_options", "topology_request", "parameters", "context", "secrets", "variable",
		"variables", "locals"},
}

// volume reads a volume file.
func (f *file) volume() *registry.VolumeSpec {
	f.kind = "a volume file"
	at := f.open(f.block, specShape)
	at.need("id", "plugin_id")
	if at.has("type") {
		f.checkType(at)
	}
	spec := &registry.VolumeSpec{
		Namespace: registry.DefaultNamespace, ID: parsed(at, "id", registry.ParseVolumeID),
		Plugin:        parsed(at, "plugin_id", registry.ParsePluginID),
		External:      parsed(at, "external_id", registry.ParseExternalID),
		CloneID:       parsed(at, "clone_id", parseCloneID),
		CloneExternal: parsed(at, "clone_external_id", registry.ParseExternalID),
		SnapshotID:    parsed(at, "snapshot_id", registry.ParseExternalID),
		CapacityMin:   at.capacity("capacity_min"), CapacityMax: at.capacity("capacity_max"),
		Parameters: at.stringMap("parameters"), Context: at.stringMap("context"),
	}
	if at.has("namespace") {
		spec.Namespace = parsed(at, "namespace", registry.ParseNamespace)
	}
	if spec.Name = string(spec.ID); at.has("name") {
		spec.Name = parsed(at, "name", registry.ParseCreateName)
	}
	spec.Capabilities = f.capabilities(at)
	if options, ok := at.one("mount_options"); ok {
		f.volumeOptions(options, spec)
	}
	spec.Required, spec.Preferred = f.topologies(at)
	spec.Secrets = at.secretReferences()
	f.checkVolume(at, spec)
	return spec
}

// parseCloneID reads clone_id, which names a volume of the same namespace.
func parseCloneID(s string) (registry.VolumeID, error) {
	id, err := registry.ParseVolumeID(s)
	if err != nil {
		return id, registry.Invalid("%w; clone_id is the id of a volume here: if this is the plugin's own id for it, write clone_external_id", err)
	}
	return id, nil
}

// volumeOptions reads the default mount options, which a job may override. They apply to file systems only. Nomad's
// volume files set them for block devices too, so that is a warning and not an error.
func (f *file) volumeOptions(b block, spec *registry.VolumeSpec) {
	o := f.mountOptions(b)
	spec.FSType, spec.MountFlags, spec.MountGroup = o.fsType, o.flags, o.group
	mounted := func(c registry.VolumeCapability) bool { return c.Attachment != registry.BlockDevice }
	if len(spec.Capabilities) > 0 && !slices.ContainsFunc(spec.Capabilities, mounted) {
		f.warnf(b.head, "remove it, or add a capability with file-system",
			"mount_options has no effect: the volume is never anything but a block device")
	}
}

func (f *file) checkType(at *fields) {
	if kind, ok := at.text("type"); ok && kind != "csi" {
		f.errorf(at.at("type"), `use type = "csi"; host volumes are the orchestrator's own`,
			"a volume of type %q is not a CSI volume", kind)
	}
}

func (f *file) checkVolume(at *fields, spec *registry.VolumeSpec) {
	if spec.CapacityMax > 0 && spec.CapacityMax < spec.CapacityMin {
		f.errorf(at.at("capacity_max"), "raise it, or lower capacity_min", "capacity_max is smaller than capacity_min")
	}
	sources := slices.DeleteFunc([]string{"clone_id", "clone_external_id", "snapshot_id"}, func(name string) bool {
		return !at.has(name)
	})
	if len(sources) > 1 {
		f.errorf(at.at(sources[0]), "keep one of them", "a volume is filled from one source, not from %s",
			strings.Join(sources, " and "))
	}
	if spec.ID != "" && spec.CloneID == spec.ID {
		f.errorf(at.at("clone_id"), "name another volume", "volume %q cannot be its own source", spec.ID)
	}
	f.checkSize(at, "parameters", spec.Parameters)
	f.checkSize(at, "context", spec.Context)
}

// capabilities reads the capability blocks. The older form, two modes at the top level, is one capability.
func (f *file) capabilities(at *fields) []registry.VolumeCapability {
	blocks := at.all("capability")
	old := at.has("access_mode") || at.has("attachment_mode")
	switch {
	case old && len(blocks) > 0:
		f.errorf(at.at("access_mode"), "move them into a capability block",
			"modes at the top level and capability blocks exclude each other")
	case old:
		body := &hclsyntax.Body{Attributes: hclsyntax.Attributes{}}
		for _, name := range capabilityShape.attrs {
			if attr := f.body.Attributes[name]; attr != nil {
				body.Attributes[name] = attr
			}
		}
		blocks = []block{{kind: "capability", body: body, ctx: f.ctx, head: f.head}}
	case len(blocks) == 0:
		f.errorf(f.head, `add capability { access_mode = "single-node-writer" attachment_mode = "file-system" }, each on a line of its own`, "a volume has at least one capability")
	}
	var list []registry.VolumeCapability
	for _, b := range blocks {
		c := f.capability(b)
		if slices.Contains(list, c) {
			f.errorf(b.head, "remove one of the two", "this capability is given twice")
		}
		list = append(list, c)
	}
	return list
}

var capabilityShape = shape{attrs: []string{"access_mode", "attachment_mode"}}

func (f *file) capability(b block) registry.VolumeCapability {
	at := f.open(b, capabilityShape)
	at.need("access_mode", "attachment_mode")
	return registry.VolumeCapability{
		Access:     oneOf(at, "access_mode", registry.AccessModes),
		Attachment: oneOf(at, "attachment_mode", attachmentModes),
	}
}

// topologies reads topology_request.
func (f *file) topologies(volume *fields) (required, preferred []registry.Topology) {
	b, ok := volume.one("topology_request")
	if !ok {
		return nil, nil
	}
	at := f.open(b, shape{blocks: []string{"required", "preferred"}})
	return f.topologyList(at, "required"), f.topologyList(at, "preferred")
}

// topologyList reads one topology per segments block. A topology block may contain several segments blocks.
func (f *file) topologyList(request *fields, name string) []registry.Topology {
	b, ok := request.one(name)
	if !ok {
		return nil
	}
	var list []registry.Topology
	for _, inner := range f.open(b, shape{blocks: []string{"topology"}}).all("topology") {
		at := f.open(inner, shape{attrs: []string{"segments"}, blocks: []string{"segments"}})
		found := at.stringMaps("segments")
		if len(found) == 0 {
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
	s, ok := f.text(name)
	if !ok {
		return 0
	}
	n, err := registry.ParseSize(s)
	if err != nil {
		f.errorf(f.at(name), `write bytes, or a number with a unit: "10GiB" (2^30), "10GB" (10^9)`, "%s %v", name, err)
	}
	return n
}
