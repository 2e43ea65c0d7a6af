package registry_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// viewOf returns the view of a log in memory. It stays as it is.
func viewOf(t *testing.T, log *registrytest.Log) (view registry.View) {
	t.Helper()
	must(t, log.View(t.Context(), func(v registry.View) error { view = v; return nil }))
	return view
}

// with returns the view of a new state with the records.
func with(t *testing.T, records ...registry.Record) registry.View {
	t.Helper()
	log := registrytest.NewLog(now)
	registrytest.Put(t, log, records...)
	return viewOf(t, log)
}

func TestBucketsAreComplete(t *testing.T) {
	for _, rt := range registry.RecordTypes {
		r := registrytest.Record(t, rt.Bucket, 1)
		if k := r.Key(); k.Bucket != rt.Bucket || rt.Bucket.Type().Bucket != rt.Bucket {
			t.Errorf("a record of %s has the key %v", rt.Bucket, k)
		}
		if _, err := os.Stat("../shim/internal/" + rt.Owner); err != nil {
			t.Errorf("the owner of bucket %s is not a package of the shim: %v", rt.Bucket, err)
		}
		for _, x := range rt.Indexes {
			if !slices.ContainsFunc(registry.Indexes, func(o registry.Index) bool { return o.Bucket == x.Bucket }) {
				t.Errorf("Indexes lacks %s", x.Bucket)
			}
		}
		second := registry.Indexed(registry.Indexed(r, 0, 3), 3, 5)
		create, modify := registry.IndexesOf(second)
		if want := registry.Seq(5); create != 3 || modify != want && rt.Bucket != registry.BucketRequests {
			t.Errorf("a changed record of %s has the indexes %d, %d", rt.Bucket, create, modify)
		}
	}
}

// Ids that begin alike, or that together make the same text, are different ids.
func TestPrefixesAreNotIDs(t *testing.T) {
	key := registry.VolumeKey{Plugin: "p", External: "vol"}
	var records []registry.Record
	for n, k := range []registry.VolumeKey{key, {Plugin: "p", External: "vol-2"}, {Plugin: "p", External: "vo"},
		{Plugin: "pv", External: "ol"}, {Plugin: "p-2", External: "vol"}} {
		alloc := registry.AllocID("alloc" + fmt.Sprint(n))
		records = append(records,
			registry.Claim{Volume: k, Alloc: alloc, Request: "r"}, registry.Ref{Volume: k, Alloc: alloc, Request: "r"},
			registry.Claim{Volume: k, Alloc: alloc + "-x", Request: "r"},
			registry.Ref{Volume: k, Alloc: alloc + "-x", Request: "r"}, registry.Staging{Volume: k, Boot: k.String()},
			registry.Attachment{Volume: k, Node: "n"}, registry.Attachment{Volume: k, Node: "n-2"},
			registry.Intent{Volume: k, Hash: k.String()},
			registry.Instance{InstanceKey: registry.InstanceKey{Role: "r", Plugin: k.Plugin, Alloc: alloc, Task: "t"}})
	}
	v := with(t, records...)
	claims, refs, attached := v.Claims(key), v.Refs(key), v.Attachments(key)
	if len(claims) != 2 || len(refs) != 2 || len(attached) != 2 || claims[1].Volume != key || refs[1].Volume != key ||
		attached[1].Volume != key {
		t.Errorf("records of %s are %v, %v and %v", key, claims, refs, attached)
	}
	if c := v.ClaimsOf("alloc0"); len(c) != 1 || c[0].Alloc != "alloc0" {
		t.Errorf("claims of alloc0 are %+v", c)
	}
	if s, _ := v.Staging(key); s.Boot != key.String() {
		t.Errorf("staging is %+v", s)
	}
	if i, _ := v.Intent(key); i.Hash != key.String() {
		t.Errorf("intent is %+v", i)
	}
	if is := v.Instances("r", "p"); len(is) != 3 {
		t.Errorf("instances of p are %+v", is)
	}
	if len(v.Instances("r", "")) != 0 || len(v.Claims(registry.VolumeKey{Plugin: "p"})) != 0 ||
		len(v.ClaimsOf("")) != 0 {
		t.Error("an empty id finds records")
	}
}

func TestInstancesAreInOrder(t *testing.T) {
	log := registrytest.NewLog(now)
	of := func(role registry.Role, plugin registry.PluginID, alloc registry.AllocID) registry.Instance {
		return registry.Instance{InstanceKey: key(role, plugin, alloc)}
	}
	registrytest.Put(t, log, of("r", "p", "old"), of("r", "q", "x"))
	registrytest.Put(t, log, of("r", "p", "both-2"), of("r", "p", "both-1"), of("q", "p", "x"))
	registrytest.Put(t, log, of("r", "p", "new"), of("r", "p", "old"))
	var names []string
	v := viewOf(t, log)
	for _, i := range append(v.AllInstances(), v.Instances("r", "p")...) {
		names = append(names, fmt.Sprint(i.Role, " ", i.Plugin, " ", i.Alloc))
	}
	same(t, "instances", names, "q p x", "r p new", "r p both-1", "r p both-2", "r p old", "r q x",
		"r p new", "r p both-1", "r p both-2", "r p old")
}

// Volumes are found by their name, their key, the name that they were created under, and their alloc.
func TestVolumesAreFound(t *testing.T) {
	long := strings.Repeat("x", 500) // longer than a name may be by the CSI specification
	volume := func(id registry.VolumeID, name string, change func(*registry.Volume)) registry.Volume {
		v := registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "n", ID: id, Plugin: "p", Name: name,
			External: registry.ExternalID("ext-" + id)}, Created: true}
		if change != nil {
			change(&v)
		}
		return v
	}
	inline := func(owner registry.AllocID) func(*registry.Volume) {
		return func(v *registry.Volume) { v.Created, v.Ephemeral, v.Owner = false, true, owner }
	}
	v := with(t, volume("a", "name", nil), volume("b", "name", func(v *registry.Volume) { v.External = "" }),
		volume("c", "nam", nil), volume("d", long+"1", nil), volume("e", long+"2", nil),
		volume("f", "name", func(v *registry.Volume) { v.Created = false }),
		volume("g", "ame", func(v *registry.Volume) { v.Plugin = "pn" }),
		volume("r@a", "name", inline("a")), volume("s@a", "", inline("a")), volume("r@b@a", "", inline("b@a")),
		volume("q@a", "", func(v *registry.Volume) { v.Created = false }))
	ids := func(volumes []registry.Volume) (ids []string) {
		for _, v := range volumes {
			ids = append(ids, string(v.ID))
		}
		return ids
	}
	same(t, "all", ids(v.Volumes()), "a", "b", "c", "d", "e", "f", "g", "q@a", "r@a", "s@a", "r@b@a")
	for name, want := range map[string][]string{"name": {"a", "b"}, "nam": {"c"}, "na": nil, "": nil, "ame": nil,
		long: nil, long + "1": {"d"}, long + "2": {"e"}} {
		same(t, "created as "+name, ids(v.VolumesNamed("p", name)), want...)
	}
	for alloc, want := range map[registry.AllocID][]string{"a": {"r@a", "s@a"}, "b@a": {"r@b@a"}, "": nil, "@a": nil} {
		same(t, "inline volumes of "+string(alloc), ids(v.VolumesOf(alloc)), want...)
	}
	for _, want := range v.Volumes() {
		byName, _ := v.Volume(want.VolumeName())
		byKey, found := v.VolumeByKey(want.VolumeKey())
		if byName.ID != want.ID || found != (want.External != "") || found && byKey.ID != want.ID {
			t.Errorf("volume %s: found %s by its name and %s by its key", want.ID, byName.ID, byKey.ID)
		}
	}
}
