package controller

import (
	"strings"
	"testing"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// The plugin's list is read to its end, even if a token expires. The result says which volumes have a record.
func TestVolumesOfAPluginAreListedToTheirEnd(t *testing.T) {
	d := open(t, of(registry.ListVolumes), ready())
	d.pages = map[string]csi.Page{
		"": {Entries: []csi.Entry{{Volume: "a", Capacity: 1}}, Next: "2"},
		"2": {Entries: []csi.Entry{
			{Volume: "a", Capacity: 1}, {Volume: key.External, Nodes: []registry.NodeID{"i-1"}}}},
	}
	d.faults = []fault{{}, failed("ABORTED")}
	list, err := d.External(t.Context(), key.Plugin)
	if err != nil || len(list) != 2 || list[0].Name.ID != "" || list[1].Name != name || len(list[1].Nodes) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
	d.expect("ListVolumes", "ListVolumes 2", "ListVolumes", "ListVolumes 2")
	d.pages["2"] = csi.Page{Next: "2"}
	wantErr(t, "an endless list", errOf(d.External(t.Context(), key.Plugin)), nil, "no end")
	d.pages[""] = csi.Page{Entries: make([]csi.Entry, maxListed+1)}
	wantErr(t, "a huge list", errOf(d.External(t.Context(), key.Plugin)), nil, "more than")
	d.pages[""] = csi.Page{Entries: []csi.Entry{{Volume: registry.ExternalID(strings.Repeat("x", maxListedBytes))}}}
	wantErr(t, "a huge id", errOf(d.External(t.Context(), key.Plugin)), nil, "larger than")
	_, err = open(t, of()).External(t.Context(), key.Plugin)
	wantErr(t, "without the capability", err, nil, "LIST_VOLUMES")
}

// An adopted volume is as its plugin describes it, by the best call that the plugin has.
func TestAdoptedVolumeIsAsItsPluginDescribesIt(t *testing.T) {
	entry := csi.Entry{Volume: "vol-x", Capacity: 7, Context: map[string]string{"pool": "p"},
		Accessible: []registry.Topology{{"zone": "a"}}}
	lies, negative := entry, entry
	lies.Volume, negative.Capacity = "vol-y", -1
	file := registry.VolumeSpec{Namespace: "default", ID: "x", Plugin: key.Plugin, External: "vol-x",
		Capabilities: spec().Capabilities}
	const validate = "ValidateVolumeCapabilities vol-x"
	get, get1 := []registry.Capability{registry.GetVolume}, []string{"ControllerGetVolume vol-x"}
	lists := []registry.Capability{registry.ListVolumes}
	for what, c := range map[string]struct {
		caps  []registry.Capability
		entry csi.Entry
		fault string
		calls []string
		err   string
		file  func(*registry.VolumeSpec)
	}{
		"GET_VOLUME": {[]registry.Capability{registry.GetVolume, registry.ListVolumes}, entry, "",
			[]string{"ControllerGetVolume vol-x", validate}, "", nil},
		"LIST_VOLUMES":    {lists, entry, "", []string{"ListVolumes", validate}, "", nil},
		"neither":         {nil, csi.Entry{}, "", []string{validate}, "", nil},
		"not found":       {get, entry, "NOT_FOUND", get1, "has no volume", nil},
		"not listed":      {lists, lies, "", []string{"ListVolumes"}, "has no volume", nil},
		"another":         {get, lies, "", get1, "vol-y", nil},
		"a negative size": {get, negative, "", get1, "-1", nil},
		"a file of more": {get, entry, "", []string{"ControllerGetVolume vol-x", validate}, "",
			func(s *registry.VolumeSpec) { s.FSType, s.Context = "ext4", entry.Context }},
		"a file instead": {
			nil, csi.Entry{Context: entry.Context, Accessible: entry.Accessible}, "", []string{validate}, "",
			func(s *registry.VolumeSpec) { s.Context, s.Required = entry.Context, entry.Accessible }},
		"another context": {get, entry, "", get1, "remove context", func(s *registry.VolumeSpec) {
			s.Context = map[string]string{"pool": "q"}
		}},
		"another size": {get, entry, "", get1, "remove capacity_min",
			func(s *registry.VolumeSpec) { s.CapacityMin = 8 }},
	} {
		t.Run(what, func(t *testing.T) {
			d := open(t, of(c.caps...))
			d.described, d.pages = c.entry, map[string]csi.Page{"": {Entries: []csi.Entry{{Volume: "other"}, c.entry}}}
			if c.fault != "" {
				d.faults = []fault{failed(c.fault)}
			}
			file := file
			if c.file != nil {
				c.file(&file)
			}
			v, err := d.Adopt(t.Context(), file)
			wantErr(t, "", err, nil, c.err)
			d.expect(c.calls...)
			if c.err != "" {
				return
			}
			if v.Capacity != c.entry.Capacity || v.Context["pool"] != c.entry.Context["pool"] ||
				len(v.Accessible) != len(c.entry.Accessible) || v.Created || v.State != registry.VolumeReady {
				t.Errorf("%+v", v)
			}
			noErr(t, "the same again", errOf(d.Adopt(t.Context(), file)))
			d.expect()
		})
	}
}
