package store

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// A file that no store created is refused with the reason, and is not changed.
func TestRefusedFiles(t *testing.T) {
	for name, c := range map[string]struct {
		make func(t *testing.T, path string) error
		kind error
		text string
	}{
		"symbolic link": {func(t *testing.T, path string) error {
			if err := os.Rename(path, path+".real"); err != nil {
				return err
			}
			return os.Symlink(path+".real", path)
		}, registry.ErrDenied, "symbolic link"},
		"dangling link": {func(t *testing.T, path string) error {
			_ = os.Remove(path)
			return os.Symlink("/nowhere", path)
		}, registry.ErrDenied, "symbolic link"},
		"fifo": {func(t *testing.T, path string) error {
			_ = os.Remove(path)
			return unix.Mkfifo(path, 0o600)
		}, registry.ErrDenied, "not a regular file"},
		"directory": {func(t *testing.T, path string) error {
			_ = os.Remove(path)
			return os.Mkdir(path, 0o700)
		}, registry.ErrDenied, "is a directory"},
		"hard link": {func(t *testing.T, path string) error {
			return os.Link(path, path+".other")
		}, registry.ErrDenied, "2 hard links"},
		"readable by all": {func(t *testing.T, path string) error {
			return os.Chmod(path, 0o644)
		}, registry.ErrDenied, "chmod 600"},
		"open directory": {func(t *testing.T, path string) error {
			return os.Chmod(filepath.Dir(path), 0o755)
		}, registry.ErrDenied, "chmod 700"},
		"another's file": {func(t *testing.T, path string) error {
			return chown(t, path)
		}, registry.ErrDenied, "belongs to uid 4711"},
		"something else": {func(t *testing.T, path string) error {
			return os.WriteFile(path, []byte(strings.Repeat("text", 5000)), 0o600)
		}, registry.ErrDamaged, "not a"},
		"another's schema": {foreignFile, registry.ErrDamaged, "bucket meta is missing"},
	} {
		t.Run(name, func(t *testing.T) {
			path := statePath(t)
			start(t, Options{Path: path}).stop(t)
			if err := c.make(t, path); err != nil {
				t.Fatal(err)
			}
			before, _ := os.Lstat(path)
			s, err := Open(within(t, time.Minute), Options{Path: path})
			if err == nil {
				_ = s.Close()
			}
			if !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v", err)
			}
			if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) ||
				before.Mode() != after.Mode() {
				t.Errorf("the file was touched: %v", err)
			}
		})
	}
}

func chown(t *testing.T, path string) error {
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away")
	}
	return os.Chown(path, 4711, -1)
}

// foreignFile creates an intact bbolt file of another application.
func foreignFile(_ *testing.T, path string) error {
	if err := os.Remove(path); err != nil {
		return err
	}
	db, err := bolt.Open(path, 0o600, nil)
	if err != nil {
		return err
	}
	return db.Close()
}

// The file of an interrupted creation is discarded. Processes that open a missing file at the same time open the same
// file, one after the other.
func TestFirstCreation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "b", "shim.db")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+".new", []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			s, err := Open(t.Context(), Options{Path: path})
			if err != nil {
				t.Error(err)
				return
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	s := start(t, Options{Path: path})
	defer s.stop(t)
	if s.Generation() != 5 {
		t.Errorf("generation %d after four openers", s.Generation())
	}
	entries, _ := os.ReadDir(filepath.Dir(path))
	info, err := os.Stat(path)
	if err != nil || len(entries) != 1 || info.Mode().Perm() != 0o600 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

// A lower generation cannot open the file. The same generation opens it without a write. A generation that was
// overtaken while the file was open cannot write.
func TestGenerations(t *testing.T) {
	path := statePath(t)
	s := start(t, Options{Path: path, Generation: 7, Boot: "boot"})
	s.must(t, puts(alloc("a")))
	s.stop(t)
	if _, err := Open(t.Context(), Options{Path: path, Generation: 6}); !errors.Is(err, registry.ErrFenced) {
		t.Errorf("lower generation: %v", err)
	}
	before, _ := os.ReadFile(path)
	same := start(t, Options{Path: path, Generation: 7, Boot: "boot"})
	same.stop(t)
	if after, _ := os.ReadFile(path); string(before) != string(after) {
		t.Error("opening under the file's own generation has changed the file")
	}

	old := start(t, Options{Path: path})
	raiseBehindItsBack(t, old.Store)
	_, err := registrytest.Write(t.Context(), old, puts(alloc("b")))
	if !errors.Is(err, registry.ErrFenced) {
		t.Errorf("commit of an older generation: %v", err)
	}
	if err := <-old.ended; !errors.Is(err, registry.ErrFenced) {
		t.Errorf("Run of an older generation: %v", err)
	}
	_ = old.Close()
	s = start(t, Options{Path: path})
	defer s.stop(t)
	if got := stored(s.Store); got != 1 {
		t.Errorf("%d allocs are stored", got)
	}
}

// raiseBehindItsBack raises the generation in spite of the lock, by sharing the open file that holds it.
func raiseBehindItsBack(t *testing.T, s *Store) {
	t.Helper()
	fd, err := unix.Dup(int(s.file.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	db, err := bolt.Open(s.path, 0o600, &bolt.Options{
		OpenFile: func(string, int, os.FileMode) (*os.File, error) { return os.NewFile(uintptr(fd), s.path), nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bolt.Tx) error { return newTransaction(tx).setMeta(metaGeneration, s.generation+1) })
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

// If the file is removed, replaced or cut off while it is open, the store stops at the next commit at the latest.
// Reading the file returns an error and does not crash.
func TestFileChangedUnderUs(t *testing.T) {
	for name, harm := range map[string]func(path string) error{
		"removed": os.Remove,
		"replaced": func(path string) error {
			whole, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			return errors.Join(os.WriteFile(path+".copy", whole, 0o600), os.Rename(path+".copy", path))
		},
		"emptied": func(path string) error { return os.Truncate(path, 0) },
		"cut off": func(path string) error { return os.Truncate(path, 2*pageSize) },
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, Options{Path: statePath(t)})
			s.must(t, puts(alloc("a")))
			if err := harm(s.path); err != nil {
				t.Fatal(err)
			}
			viewed := s.View(t.Context(), func(v registry.View) error { _ = v.Allocs(); return nil })
			if viewed != nil && !errors.Is(viewed, registry.ErrDamaged) {
				t.Errorf("View: %v", viewed)
			}
			_, err := registrytest.Write(t.Context(), s, puts(alloc("b")))
			if !errors.Is(err, registry.ErrDamaged) {
				t.Errorf("Commit: %v", err)
			}
			if err := <-s.ended; !errors.Is(err, registry.ErrDamaged) {
				t.Errorf("Run: %v", err)
			}
		})
	}
}
