package registrytest

import (
	"reflect"
	"strings"
	"testing"

	"holdfast/registry"
)

// long is longer than a name may be by the CSI specification, which nobody holds what is asked for to.
var long = strings.Repeat("x", 500)

// named is a volume that is being created.
func named(id registry.VolumeID, plugin registry.PluginID, name string) registry.Volume {
	spec := registry.VolumeSpec{Namespace: "n", ID: id, Plugin: plugin, Name: name}
	return registry.Volume{VolumeSpec: spec, Created: true, State: registry.VolumeCreating}
}

// but is a volume with one thing changed.
func but(v registry.Volume, change func(*registry.Volume)) registry.Volume {
	change(&v)
	return v
}

func register(v *registry.Volume)   { v.Created, v.External = false, "x" }
func makeInline(v *registry.Volume) { v.Created, v.Ephemeral, v.Owner = false, true, "alloc" }
func rename(v *registry.Volume)     { v.Name = "new" }

// naming is steps that give volumes a name at their plugin, or take it from them, and who has which name then: at
// plugin p, and at pn.
var naming = []struct {
	what   string
	change registry.Change
	want   string
}{
	{"creations", puts(named("b", "p", "name"), named("a", "p", "name"), named("c", "p", "nam"),
		named("d", "pn", "ame"), named("e", "p", "")),
		"name:a,b nam:c :e | ame:d"},
	{"an answer", puts(but(named("a", "p", "name"), func(v *registry.Volume) {
		v.State, v.External = registry.VolumeReady, "vol"
	})),
		"name:a,b nam:c :e | ame:d"},
	{"others", puts(but(named("f", "p", "name"), register), but(named("g", "p", "name"), makeInline)),
		"name:a,b nam:c :e | ame:d"},
	{"another name", puts(but(named("a", "p", "name"), rename)), "name:b nam:c new:a :e | ame:d"},
	{"another plugin", puts(named("a", "pn", "name")), "name:b nam:c :e | name:a ame:d"},
	{"its record is gone", registry.Change{Delete: []registry.Key{named("a", "", "").Key()}},
		"name:b nam:c :e | ame:d"},
	{"created again", puts(named("a", "p", "name")), "name:a,b nam:c :e | ame:d"},
	{"twice in one change", puts(but(named("a", "p", "name"), rename), named("a", "p", "name")),
		"name:a,b nam:c :e | ame:d"},
	{"put and deleted in one change", registry.Change{Put: []registry.Record{named("h", "p", "name")},
		Delete: []registry.Key{named("h", "", "").Key()}},
		"name:a,b nam:c :e | ame:d"},
	{"deletions", registry.Change{Delete: []registry.Key{named("a", "", "").Key(), named("e", "", "").Key()}},
		"name:b nam:c | ame:d"},
	{"its name again", puts(named("i", "p", "name")), "name:b,i nam:c | ame:d"},
	{"names that begin alike", puts(named("j", "p", long+"1"), named("k", "p", long+"2"), named("l", "p", long)),
		"name:b,i nam:c long:l long1:j long2:k | ame:d"},
}

func testVolumesNamed(t *testing.T, open Open) {
	log, reopen := open(t)
	holds := func(what, want string) {
		look(t, log, func(v registry.View) {
			if got := whoIsNamed(t, v); got != want {
				t.Errorf("%s: %q, want %q", what, got, want)
			}
		})
	}
	for _, step := range naming {
		at(t, log, step.change)
		holds(step.what, step.want)
	}
	log = reopen()
	holds("reopened", naming[len(naming)-1].want)
}

// whoIsNamed is the volumes by the names that they were created under.
func whoIsNamed(t *testing.T, v registry.View) string {
	var out []string
	for _, plugin := range []registry.PluginID{"p", "pn"} {
		if plugin == "pn" {
			out = append(out, "|")
		}
		for _, name := range []string{"name", "nam", "new", "na", "", "ame", long, long + "1", long + "2"} {
			var ids []string
			for _, volume := range v.VolumesNamed(plugin, name) {
				if known, _ := v.Volume(volume.VolumeName()); !reflect.DeepEqual(known, volume) {
					t.Errorf("by its name the volume is %+v, not %+v", volume, known)
				}
				ids = append(ids, string(volume.ID))
			}
			if len(ids) > 0 {
				out = append(out, strings.ReplaceAll(name, long, "long")+":"+strings.Join(ids, ","))
			}
		}
	}
	return strings.Join(out, " ")
}

// testVolumesOf finds the inline volumes of an alloc, in any namespace, and no volume that is only called like one.
func testVolumesOf(t *testing.T, open Open) {
	log, reopen := open(t)
	inline := func(namespace registry.Namespace, alloc registry.AllocID, request registry.RequestName) registry.Volume {
		spec := registry.VolumeSpec{Namespace: namespace, ID: registry.InlineID(alloc, request), Plugin: "p",
			External: "x"}
		return registry.Volume{VolumeSpec: spec, State: registry.VolumeReady, Ephemeral: true, Owner: alloc}
	}
	registered := but(inline("n", "a", "registered"), func(v *registry.Volume) { v.Ephemeral, v.Owner = false, "" })
	at(t, log, puts(inline("n", "a", "r"), inline("n", "a", "s"), inline("m", "a", "r"), inline("n", "b", "r"),
		inline("n", "b@a", "r"), registered,
		named("a", "p", "r@a")))
	holds := func(what string, want map[registry.AllocID]string) {
		look(t, log, func(v registry.View) {
			for alloc, want := range want {
				var got []string
				for _, volume := range v.VolumesOf(alloc) {
					if known, _ := v.Volume(volume.VolumeName()); !reflect.DeepEqual(known, volume) {
						t.Errorf("%s: by its alloc the volume is %+v, not %+v", what, volume, known)
					}
					got = append(got, string(volume.Namespace)+"/"+string(volume.ID))
				}
				if got := strings.Join(got, " "); got != want {
					t.Errorf("%s: of %q are %q, want %q", what, alloc, got, want)
				}
			}
		})
	}
	holds("put", map[registry.AllocID]string{"a": "m/r@a n/r@a n/s@a", "b": "n/r@b", "b@a": "n/r@b@a", "": "", "@a": "",
		"c": ""})
	at(t, log, registry.Change{Delete: []registry.Key{inline("n", "a", "r").Key()}})
	after := map[registry.AllocID]string{"a": "m/r@a n/s@a", "b": "n/r@b"}
	holds("deleted", after)
	log = reopen()
	holds("reopened", after)
}
