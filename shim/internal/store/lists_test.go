package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"holdfast/registry"
)

// created is a volume that was created under a name.
func created(id, name string) registry.Volume {
	spec := registry.VolumeSpec{Namespace: "n", ID: registry.VolumeID(id), Plugin: "p", Name: name}
	return registry.Volume{VolumeSpec: spec, Created: true, State: registry.VolumeReady}
}

// raw changes a closed file with nothing but bbolt, and what seals values.
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

// unlist makes the file that of a build that has never listed names.
func unlist(w *transaction) error {
	meta := bucketOf(w.tx, bucketMeta)
	return errors.Join(w.tx.DeleteBucket([]byte(bucketVolumeNames)), meta.Delete([]byte(metaNamed)), meta.Delete([]byte(metaTally+bucketVolumeNames)))
}

// withoutNames has change, which opens the file and closes it, change it as a build does that knows nothing of the list of names: all that belongs to
// that list is afterwards as it was.
func withoutNames(t rapid.TB, path string, change func()) {
	t.Helper()
	entries, notes := map[string]string{}, map[string]string{}
	raw(t, path, func(w *transaction) error {
		for _, name := range []string{metaNamed, metaTally + bucketVolumeNames} {
			notes[name] = string(bucketOf(w.tx, bucketMeta).Get([]byte(name)))
		}
		return bucketOf(w.tx, bucketVolumeNames).ForEach(func(key, value []byte) error { entries[string(key)] = string(value); return nil })
	})
	change()
	raw(t, path, func(w *transaction) error {
		errs := []error{unlist(w)}
		list, err := w.tx.CreateBucket([]byte(bucketVolumeNames))
		if err != nil {
			return err
		}
		for key, value := range entries {
			errs = append(errs, list.Put([]byte(key), []byte(value)))
		}
		for name, value := range notes {
			errs = append(errs, bucketOf(w.tx, bucketMeta).Put([]byte(name), []byte(value)))
		}
		return errors.Join(errs...)
	})
}

// namesAreFound fails the test unless volumes are found by the names that they were created under, and no others. listed: by the list.
func namesAreFound(t *testing.T, s *Store, listed bool) {
	t.Helper()
	err := s.View(t.Context(), func(v registry.View) error {
		if is := v.(view).named; is != listed {
			t.Errorf("that the list of names is true is said to be %v", is)
		}
		all := v.Volumes()
		for _, asked := range append(all, created("", "")) {
			var want []registry.Volume
			for _, r := range all {
				if r.CreatedAs(asked.Plugin, asked.Name) {
					want = append(want, r)
				}
			}
			got := v.VolumesNamed(asked.Plugin, asked.Name)
			if !slices.EqualFunc(got, want, func(a, b registry.Volume) bool { return a.VolumeName() == b.VolumeName() }) {
				t.Errorf("named %.20q are %v, not %v", asked.Name, got, want)
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// TestNamesAreListedAnew: whatever an older build has left, of the list or in place of it, the list is true once the file is open, also for a
// generation that goes on with its own file; and what is true is not made again.
func TestNamesAreListedAnew(t *testing.T) {
	older := func(changes ...registry.Change) func(*testing.T, string) {
		return func(t *testing.T, path string) {
			for _, c := range changes {
				withoutNames(t, path, func() {
					s := start(t, Options{Path: path, Generation: 7})
					s.must(t, c)
					s.stop(t)
				})
			}
		}
	}
	for what, leave := range map[string]func(t *testing.T, path string){
		"as it was left":   func(*testing.T, string) {},
		"no list":          func(t *testing.T, path string) { raw(t, path, unlist) },
		"another creation": older(puts(created("c", "one"))),
		"another name":     older(puts(created("a", "new"))),
		"a deletion":       older(registry.Change{Delete: []registry.Key{created("a", "").Key()}}),
		"something else":   older(puts(alloc("x"))),
		"several changes": older(registry.Change{Delete: []registry.Key{created("a", "").Key()}}, puts(created("a", "two")),
			puts(created("b", "one"), created("a", "one")), registry.Change{Delete: []registry.Key{created("b", "").Key()}}),
		"a list that nobody says is true": func(t *testing.T, path string) {
			raw(t, path, func(w *transaction) error { return bucketOf(w.tx, bucketMeta).Delete([]byte(metaNamed)) })
		},
		"a list of a later index": func(t *testing.T, path string) {
			raw(t, path, func(w *transaction) error {
				return errors.Join(w.delete(bucketVolumeNames, nameListKey("p", "one", created("a", "").Key().Path)), w.setMeta(metaNamed, 1000))
			})
		},
	} {
		for _, generation := range []registry.Generation{0, 7} {
			path := statePath(t)
			s := start(t, Options{Path: path, Generation: 7})
			s.must(t, puts(created("a", "one"), created("b", "two"), registry.Volume{VolumeSpec: created("x", "one").VolumeSpec}))
			s.stop(t)
			leave(t, path)
			for range 2 {
				s = start(t, Options{Path: path, Generation: generation})
				namesAreFound(t, s.Store, true)
				s.must(t, puts(created("d", "one")))
				namesAreFound(t, s.Store, true)
				s.stop(t)
			}
			before, _ := os.ReadFile(path)
			start(t, Options{Path: path, Generation: s.Generation()}).stop(t)
			if after, _ := os.ReadFile(path); string(after) != string(before) {
				t.Errorf("%s: a generation that goes on with its own file has written to it", what)
			}
		}
	}
}

// TestNamesOfGoldens: files of all schemas are from before there was a list, and get one as they are opened.
func TestNamesOfGoldens(t *testing.T) {
	for n := range len(tested.migrations) + 1 {
		s := start(t, Options{Path: goldenCopy(t, n), schema: &tested})
		namesAreFound(t, s.Store, true)
		if err := s.View(t.Context(), func(v registry.View) error {
			for _, volume := range v.Volumes() {
				if volume.Created && len(v.VolumesNamed(volume.Plugin, volume.Name)) != 1 {
					t.Errorf("schema %d: volume %s is not found by its name", n, volume.VolumeName())
				}
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		s.stop(t)
	}
}

// TestMigrationRenames: what a migration makes of volumes is listed, in the same transaction.
func TestMigrationRenames(t *testing.T) {
	path := statePath(t)
	s := start(t, Options{Path: path})
	s.must(t, puts(created("a", "one"), created("b", "two")))
	s.stop(t)
	later := released
	later.newest++
	later.migrations = append(later.migrations[:len(later.migrations):len(later.migrations)], migration{"renames", func(w *transaction) error {
		return w.rewrite(string(registry.BucketVolumes), func(record fields) error { record["name"] = encode("new"); return nil })
	}})
	s = start(t, Options{Path: path, schema: &later})
	namesAreFound(t, s.Store, true)
	s.stop(t)
}

// TestLyingListIsFound: Check tells what the list of names lacks, and what it has too much.
func TestLyingListIsFound(t *testing.T) {
	entry := func(id, name string) []byte { return nameListKey("p", name, created(id, "").Key().Path) }
	for what, lie := range map[string]func(*transaction) error{
		"does not list":        func(w *transaction) error { return w.delete(bucketVolumeNames, entry("a", "one")) },
		"2 entries instead of": func(w *transaction) error { return w.put(bucketVolumeNames, entry("b", "one"), listed) },
	} {
		path := statePath(t)
		s := start(t, Options{Path: path})
		s.must(t, puts(created("a", "one")))
		s.stop(t)
		raw(t, path, lie)
		s = start(t, Options{Path: path})
		var found []string
		for err := range s.Check() {
			found = append(found, err.Error())
		}
		if len(found) == 0 || !strings.Contains(found[0], what) || !strings.Contains(found[0], bucketVolumeNames) {
			t.Errorf("%s: found %q", what, found)
		}
	}
	path := statePath(t)
	s := start(t, Options{Path: path})
	s.must(t, puts(created("a", "one")))
	s.stop(t)
	raw(t, path, func(w *transaction) error { return w.put(bucketVolumeNames, entry("gone", "one"), listed) })
	s = start(t, Options{Path: path})
	err := s.View(t.Context(), func(v registry.View) error { v.VolumesNamed("p", "one"); return nil })
	if !errors.Is(err, registry.ErrDamaged) {
		t.Errorf("a volume that is listed and not there: %v", err)
	}
}

// TestNamesInAReadOnlyFile: where the list cannot be made true, nobody reads it and nobody calls that damage.
func TestNamesInAReadOnlyFile(t *testing.T) {
	for what, leave := range map[string]func(t *testing.T, path string){
		"none": func(t *testing.T, path string) { raw(t, path, unlist) },
		"one that is not true": func(t *testing.T, path string) {
			withoutNames(t, path, func() {
				s := start(t, Options{Path: path, Generation: 7})
				s.must(t, puts(created("a", "two"), created("c", "one")))
				s.stop(t)
			})
		},
	} {
		t.Run(what, func(t *testing.T) {
			path := statePath(t)
			s := start(t, Options{Path: path, Generation: 7})
			s.must(t, puts(created("a", "one"), created("b", "two")))
			s.stop(t)
			leave(t, path)
			mountReadOnly(t, filepath.Dir(path))
			s = start(t, Options{Path: path, Generation: 7})
			namesAreFound(t, s.Store, false)
			_, err := s.Commit(t.Context(), func(registry.View) (registry.Change, error) { return puts(created("d", "one")), nil })
			if !errors.Is(err, registry.ErrExhausted) {
				t.Errorf("a commit: %v", err)
			}
			if wrong := s.CheckRecords(); len(wrong) > 0 {
				t.Error(wrong)
			}
			s.stop(t)
			if err := unix.Mount("", filepath.Dir(path), "", unix.MS_REMOUNT|unix.MS_BIND, ""); err != nil {
				t.Fatal(err)
			}
			s = start(t, Options{Path: path, Generation: 7})
			namesAreFound(t, s.Store, true)
			s.stop(t)
		})
	}
}

// TestListsStayWhereNothingOfThemChanges: a commit that changes neither key nor name of a volume writes no page of the lists.
func TestListsStayWhereNothingOfThemChanges(t *testing.T) {
	s := start(t, Options{Path: statePath(t)})
	defer s.stop(t)
	var all registry.Change
	for i := range 200 { // too many to lie in the page that names the buckets
		v := created(fmt.Sprint("v", i), fmt.Sprint("name-", i))
		v.External = registry.ExternalID(fmt.Sprint("vol-", i))
		all.Put = append(all.Put, v)
	}
	s.must(t, all)
	roots := func() (at [2]uint64) {
		if err := s.View(t.Context(), func(v registry.View) error {
			for i, list := range []string{bucketVolumeKeys, bucketVolumeNames} {
				at[i] = uint64(bucketOf(v.(view).tx, list).Root())
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
		return at
	}
	before := roots()
	v := all.Put[7].(registry.Volume)
	v.State, v.Capacity = registry.VolumeDeleting, 4711
	s.must(t, puts(v))
	if after := roots(); after != before || slices.Contains(before[:], 0) {
		t.Errorf("the lists lay at %v and lie at %v", before, after)
	}
	v.Name = "new"
	s.must(t, puts(v))
	if after := roots(); after[0] != before[0] || after[1] == before[1] {
		t.Errorf("after a new name the lists lie at %v, before at %v", after, before)
	}
	v.Created = false
	s.must(t, puts(v))
	if n, _, err := s.Count(bucketVolumeNames); err != nil || n[0] != len(all.Put)-1 {
		t.Errorf("%v names are listed of %d, %v", n, len(all.Put)-1, err)
	}
	namesAreFound(t, s.Store, true)
}

// TestKeyOfAListIsTooLong: what no list could name is refused, alone: the store goes on.
func TestKeyOfAListIsTooLong(t *testing.T) {
	s := start(t, Options{Path: statePath(t)})
	defer s.stop(t)
	v := created("a", strings.Repeat("n", 2*bolt.MaxKeySize))
	s.must(t, puts(v)) // of its name the list has the beginning
	namesAreFound(t, s.Store, true)
	v.External = registry.ExternalID(strings.Repeat("x", bolt.MaxKeySize))
	_, err := s.Commit(t.Context(), func(registry.View) (registry.Change, error) { return puts(v), nil })
	if !errors.Is(err, registry.ErrInternal) || !strings.Contains(err.Error(), bucketVolumeKeys) {
		t.Errorf("a key that is too long: %v", err)
	}
	s.must(t, puts(created("b", "two")))
}

// TestKilledWhileNamesAreListed kills a process at each write and sync of the transaction that makes the list, or lets that fail: the next process
// makes it.
func TestKilledWhileNamesAreListed(t *testing.T) {
	struck := 0
	for _, fault := range []string{"pwrite64:signal=KILL", "fdatasync:signal=KILL", "pwrite64:error=ENOSPC", "fdatasync:error=EIO"} {
		for n := 1; n <= 6; n++ {
			path := statePath(t)
			s := start(t, Options{Path: path})
			var all registry.Change
			for i := range 300 {
				all.Put = append(all.Put, created(fmt.Sprint("v", i), fmt.Sprint("name-", i)))
			}
			s.must(t, all)
			s.stop(t)
			raw(t, path, unlist)
			said := injected(t, path, fmt.Sprintf("%s:when=%d", fault, n))
			if len(said["open"]) == 0 {
				struck++
			}
			s = start(t, Options{Path: path})
			namesAreFound(t, s.Store, true)
			s.stop(t)
		}
	}
	if struck < 4 {
		t.Errorf("only %d of the faults have struck while the file was opened", struck)
	}
}

// TestNamesAreListedOnAFullDisk: out of the reserve.
func TestNamesAreListedOnAFullDisk(t *testing.T) {
	dir := tmpfs(t, 8<<20)
	path := filepath.Join(dir, "shim.db")
	s := start(t, Options{Path: path})
	for i := range 10 {
		var c registry.Change
		for j := range 200 {
			c.Put = append(c.Put, created(fmt.Sprint("v", i, "-", j), fmt.Sprint("name-", i, "-", j)))
		}
		s.must(t, c)
	}
	s.stop(t)
	raw(t, path, unlist)
	fill(t, dir)
	s = start(t, Options{Path: path})
	_, err := s.Commit(t.Context(), func(registry.View) (registry.Change, error) { return puts(alloc("new")), nil })
	if err != nil && !errors.Is(err, registry.ErrExhausted) {
		t.Error(err)
	}
	namesAreFound(t, s.Store, true)
	s.must(t, registry.Change{Delete: []registry.Key{created("v0-0", "").Key()}})
	namesAreFound(t, s.Store, true)
	s.stop(t)
}
