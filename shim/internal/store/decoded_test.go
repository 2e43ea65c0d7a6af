package store

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"holdfast/registry"
)

func instanceOf(option string) registry.Instance {
	return registry.Instance{
		InstanceKey: registry.InstanceKey{Role: "csi-node", Plugin: "p", Alloc: "a", Task: "t"},
		Options:     map[string]string{"o": option},
	}
}

func (r *running) put(t *testing.T, record registry.Record) {
	t.Helper()
	r.change(t, registry.Change{Put: []registry.Record{record}})
}

func (r *running) change(t *testing.T, c registry.Change) {
	t.Helper()
	if _, err := r.Commit(t.Context(), func(registry.View) (registry.Change, error) { return c, nil }); err != nil {
		t.Fatal(err)
	}
}

func optionOf(v registry.View) string {
	i, _ := v.Instance(instanceOf("").InstanceKey)
	return i.Options["o"]
}

func (d *Decoded) size() (n int) {
	for _, records := range d.of {
		n += len(records)
	}
	return n
}

// TestReadersSeeTheirOwnState: what one reader has had decoded is not given to another, whose state has another value of it; nor does it come
// back once it was deleted.
func TestReadersSeeTheirOwnState(t *testing.T) {
	known := NewDecoded()
	s := start(t, Options{Path: statePath(t), Decoded: known})
	defer s.stop(t)
	s.put(t, instanceOf("old"))
	err := s.View(t.Context(), func(before registry.View) error {
		s.put(t, instanceOf("new"))
		for range 2 {
			if got := optionOf(before); got != "old" {
				t.Errorf("a reader of the old state sees %q", got)
			}
			if err := s.View(t.Context(), func(v registry.View) error {
				if got := optionOf(v); got != "new" {
					t.Errorf("a reader of the new state sees %q", got)
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
		}
		s.change(t, registry.Change{Delete: []registry.Key{instanceOf("").Key()}})
		if got := optionOf(before); got != "old" {
			t.Errorf("after it was deleted, a reader of the old state sees %q", got)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if n := known.size(); n != 0 {
		t.Errorf("%d records are kept of a state that has none", n)
	}
}

// TestARecordIsDecodedOnce: readers share it, also with the readers of a copy of the state, and the one who changes it in place is found out.
func TestARecordIsDecodedOnce(t *testing.T) {
	known := NewDecoded()
	path := statePath(t)
	s := start(t, Options{Path: path, Decoded: known})
	s.put(t, instanceOf("x"))
	s.stop(t)
	s = start(t, Options{Path: path, Decoded: known})
	defer s.stop(t)
	var first map[string]string
	for range 2 {
		if err := s.View(t.Context(), func(v registry.View) error {
			i, _ := v.Instance(instanceOf("").InstanceKey)
			if first != nil && i.Options["mark"] != "set" {
				t.Error("it was decoded again")
			}
			first = i.Options
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if err := known.Changed(); (err != nil) != (first["mark"] != "") {
			t.Errorf("%v, and the mark is %q", err, first["mark"])
		}
		first["mark"] = "set"
	}
	if err := known.Changed(); err == nil || !strings.Contains(err.Error(), "was changed in place") {
		t.Errorf("what was changed in place: %v", err)
	}
	delete(first, "mark")
}

// TestWhatIsRehearsedIsNotMigratedTwice: the migrations of a copy leave, for the state itself, those of what has changed since. Two migrations of
// one record do not take each other's work for their own.
func TestWhatIsRehearsedIsNotMigratedTwice(t *testing.T) {
	ran := map[string]int{}
	adds := func(name string) migration {
		return migration{name, func(t *transaction) error {
			return t.rewrite(string(registry.BucketAllocs), func(record fields) error {
				ran[name]++
				if _, old := record["index"]; old && name == "second" {
					record[name] = encode(true)
				}
				return nil
			})
		}}
	}
	later := schema{
		oldest: Oldest, newest: Newest + 2, readable: Oldest, forms: released.forms,
		migrations: append(slices.Clone(released.migrations), adds("first"), adds("second")),
	}
	state, copied, known := statePath(t), statePath(t), NewDecoded()
	s := start(t, Options{Path: state})
	s.must(t, puts(registry.Alloc{ID: "a", Index: 1}, registry.Alloc{ID: "b", Index: 1}))
	copyTo(t, s.Store, copied)
	s.must(t, puts(registry.Alloc{ID: "b", Index: 2}))
	s.stop(t)
	for _, run := range []struct {
		path string
		want int
	}{{copied, 2}, {state, 3}} {
		s := start(t, Options{Path: run.path, Decoded: known, schema: &later})
		if ran["first"] != run.want || ran["second"] != run.want {
			t.Errorf("after %s the migrations have seen %v records, want %d", filepath.Base(run.path), ran, run.want)
		}
		if err := s.View(t.Context(), func(v registry.View) error {
			for _, id := range []registry.AllocID{"a", "b"} {
				text := get(v.(view).tx, string(registry.BucketAllocs), []byte(registry.AllocRecord(id).Path))
				if !bytes.Contains(text, []byte(`"second":true`)) {
					t.Errorf("alloc %s is %s", id, text)
				}
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		s.stop(t)
	}
}

func copyTo(t *testing.T, s *Store, path string) {
	t.Helper()
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Snapshot(t.Context(), file); err != nil {
		t.Error(err)
	}
	if err := file.Close(); err != nil {
		t.Error(err)
	}
}

// BenchmarkVolumesWhere finds one volume of a thousand, and BenchmarkVolumes/all takes them all.
func BenchmarkVolumesWhere(b *testing.B) {
	s := start(b, Options{Path: statePath(b), Decoded: NewDecoded()})
	defer s.stop(b)
	for i := range 1000 {
		spec := registry.VolumeSpec{Namespace: "default", ID: registry.VolumeID(fmt.Sprint("v", i)), Name: fmt.Sprint("name-", i), Plugin: "disk"}
		v := registry.Volume{VolumeSpec: spec, State: registry.VolumeReady, Created: true}
		if _, err := s.Commit(b.Context(), func(registry.View) (registry.Change, error) { return puts(v), nil }); err != nil {
			b.Fatal(err)
		}
	}
	for name, find := range map[string]func(registry.View) []registry.Volume{
		"one": func(v registry.View) []registry.Volume {
			return v.VolumesWhere(func(v registry.Volume) bool { return v.Name == "name-500" })
		},
		"all": registry.View.Volumes,
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				err := s.View(b.Context(), func(v registry.View) error {
					if len(find(v)) == 0 {
						b.Error("nothing is found")
					}
					return nil
				})
				if err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
