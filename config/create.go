package config

import (
	"slices"

	"holdfast/hooks"
	"holdfast/registry"
)

var createStanza = &stanza{
	name: "create",
	doc: "The volume named by source is created before the first alloc that uses it starts. A volume that exists " +
		"under that ID is used as it is. The volume block gives the capability and the mount options. Maps must " +
		"not hold references that are known at run time only.",
	fields: slices.Concat(
		specFields("plugin_id", "snapshot_id", "clone_id", "clone_external_id", "capacity_min", "capacity_max",
			"parameters", "mutable_parameters", "name"),
		[]field{secretsField},
		specFields("topology_request"),
		[]field{{name: "on_stop", kind: isChoice, words: []string{"keep", "delete"}, fallback: "keep",
			doc: "With delete, the plugin deletes the volume once the last alloc that uses it has ended, unless the " +
				"volume existed before. A restart keeps the volume. After a change of the group, the next alloc " +
				"gets a new volume."}},
	),
}

// specFields returns fields of a volume file.
func specFields(names ...string) (fields []field) {
	for _, d := range specStanza.fields {
		if slices.Contains(names, d.name) {
			fields = append(fields, d)
		}
	}
	return fields
}

// create reads a create block.
func (f *file) create(b block, v hooks.VolumeRequest) *hooks.Create {
	if v.Ephemeral != nil {
		f.errorf(b.head, "keep one of them", "an inline volume is created by its ephemeral block")
	}
	in := f.open(b, createStanza)
	in.constant = true
	spec := &registry.VolumeSpec{
		ID:     registry.VolumeID(v.Source),
		Name:   parsed(in, "name", registry.ParseCreateName),
		Plugin: parsed(in, "plugin_id", registry.ParsePluginID),
	}
	in.contentOf(spec)
	if v.PerAlloc && in.given("name") {
		f.errorf(in.rangeOf("name"), "remove it, or per_alloc", "the volumes of several allocs cannot have one name")
	}
	if v.PerAlloc {
		spec.ID = "" // it differs from every clone_id by its index
	}
	spec.Required, spec.Preferred = f.topologies(in)
	spec.Secrets = in.secretReferences()
	f.checkVolume(in, spec)
	return &hooks.Create{
		Plugin: spec.Plugin, Name: spec.Name, CapacityMin: spec.CapacityMin, CapacityMax: spec.CapacityMax,
		Parameters: spec.Parameters, Mutable: spec.Mutable, Secrets: spec.Secrets, Required: spec.Required,
		Preferred: spec.Preferred, CloneID: spec.CloneID, CloneExternal: spec.CloneExternal,
		SnapshotID: spec.SnapshotID,
		Delete:     oneOf[string](in, "on_stop") == "delete",
	}
}
