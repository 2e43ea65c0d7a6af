package store

import (
	"errors"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"
	"pgregory.net/rapid"

	"holdfast/registry"
)

const bucketVolumeNames = "volumes_by_name"

// created returns a volume that was created under a name.
func created(id, name string) registry.Volume {
	spec := registry.VolumeSpec{Namespace: "n", ID: registry.VolumeID(id), Plugin: "p", Name: name}
	return registry.Volume{VolumeSpec: spec, Created: true, State: registry.VolumeReady}
}

// raw changes a closed file with bbolt, and updates checksums and tallies.
func raw(t rapid.TB, path string, change func(*transaction) error) {
	t.Helper()
	db, err := bolt.Open(path, fileMode, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	err = db.Update(func(tx *bolt.Tx) error {
		w := newTransaction(tx)
		return errors.Join(change(w), w.writeTallies())
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestWrongIndexEntriesAreFound adds and removes entries of an index. Check reports a missing and an extra entry. A
// lookup by an entry without its volume finds damage.
func TestWrongIndexEntriesAreFound(t *testing.T) {
	entry := func(id, name string) []byte { return []byte(registry.IndexKeys(created(id, name))[0].Path) }
	with := func(change func(*transaction) error) *running {
		path := statePath(t)
		s := start(t, Options{Path: path})
		s.must(t, puts(created("a", "one")))
		s.stop(t)
		raw(t, path, change)
		return start(t, Options{Path: path})
	}
	for what, change := range map[string]func(*transaction) error{
		"does not list": func(w *transaction) error { return w.delete(bucketVolumeNames, entry("a", "one")) },
		"2 entries instead of": func(w *transaction) error {
			return w.put(bucketVolumeNames, entry("b", "one"), indexText)
		},
	} {
		found := with(change).Check()
		if len(found) == 0 || !strings.Contains(found[0].Error(), what) ||
			!strings.Contains(found[0].Error(), bucketVolumeNames) {
			t.Errorf("%s: found %q", what, found)
		}
	}
	s := with(func(w *transaction) error { return w.put(bucketVolumeNames, entry("gone", "one"), indexText) })
	err := s.View(t.Context(), func(v registry.View) error { v.VolumesNamed("p", "one"); return nil })
	if !errors.Is(err, registry.ErrDamaged) {
		t.Errorf("a volume that is listed and not there: %v", err)
	}
}
