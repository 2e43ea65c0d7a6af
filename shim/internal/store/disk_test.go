package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// tmpfs mounts a small file system.
func tmpfs(t *testing.T, size int) string {
	t.Helper()
	dir := t.TempDir()
	err := unix.Mount("holdfast-test", dir, "tmpfs", 0, fmt.Sprintf("size=%d,mode=0700", size))
	if errors.Is(err, unix.EPERM) {
		t.Skip("a full disk needs a file system of its own, and mounting one needs root")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

// fill uses all free space of the file system.
func fill(t *testing.T, dir string) (release func()) {
	t.Helper()
	name := filepath.Join(dir, "filler")
	file, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for err == nil {
		_, err = file.Write(make([]byte, pageSize))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
	return func() {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
}

// A full disk refuses new records each time, and nothing is written. Releases continue for hundreds of steps, also
// after a restart. When there is space again, new records are stored without a restart.
func TestFullDisk(t *testing.T) {
	dir := tmpfs(t, 8<<20)
	s := start(t, Options{Path: filepath.Join(dir, "shim.db")})
	defer func() { s.stop(t) }()
	commit := func(c registry.Change) error {
		_, err := registrytest.Write(t.Context(), s, c)
		return err
	}
	release := func() {}
	count := 0
	for ; ; count++ {
		a := alloc(fmt.Sprint("a", count))
		a.Job = strings.Repeat("x", 2000)
		err := commit(puts(a))
		if errors.Is(err, registry.ErrExhausted) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if count == 100 {
			release = fill(t, dir)
		}
	}
	if count <= 100 {
		t.Fatalf("refused after %d", count)
	}
	s.stop(t)
	s = start(t, Options{Path: s.path}) // a shim that starts on a full disk
	before := s.Index()
	for range 20 {
		if err := commit(puts(alloc("new"))); !errors.Is(err, registry.ErrExhausted) {
			t.Fatalf("something new on a full disk: %v", err)
		}
	}
	if s.Index() != before {
		t.Error("a refused commit has changed the index")
	}
	for i := range count {
		a := alloc(fmt.Sprint("a", i))
		a.State = registry.AllocReleasing
		step := puts(a, registry.Intent{Volume: registry.VolumeKey{Plugin: "p", External: "v"},
			RPC: registry.NodeUnpublishRPC, Attempt: uint64(i)})
		if err := commit(step); err != nil {
			t.Fatalf("release %d of %d on a full disk: %v", i, count, err)
		}
		done := registry.Change{
			Put:    []registry.Record{registry.Operation{ID: registry.OperationID(fmt.Sprint(i))}},
			Delete: []registry.Key{a.Key()}, Events: []registry.Event{{Kind: registry.EventReleased}},
		}
		if err := commit(done); err != nil {
			t.Fatalf("release %d of %d on a full disk: %v", i, count, err)
		}
	}
	if got := stored(s.Store); got != 0 {
		t.Errorf("%d allocs are left", got)
	}
	release()
	if err := commit(puts(alloc("new"))); err != nil {
		t.Errorf("with room again: %v", err)
	}
}

// Without room for an empty file, Open fails. A later Open creates it.
func TestNoRoomAtAll(t *testing.T) {
	dir := tmpfs(t, 1<<20)
	release := fill(t, dir)
	if _, err := Open(t.Context(), Options{Path: filepath.Join(dir, "shim.db")}); !errors.Is(err,
		registry.ErrExhausted) {
		t.Errorf("no room: %v", err)
	}
	release()
	start(t, Options{Path: filepath.Join(dir, "shim.db")}).stop(t)
}

// On a read-only file system, the generation of the file opens it for reading, and commits are refused. A new
// generation cannot be stored. Once the file system is writable, the store stops, so that the shim starts over.
func TestReadOnlyFileSystem(t *testing.T) {
	path := statePath(t)
	dir := filepath.Dir(path)
	s := start(t, Options{Path: path})
	s.must(t, puts(alloc("a")))
	own := s.Generation()
	s.stop(t)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	mountReadOnly(t, dir)
	if _, err := Open(t.Context(), Options{Path: path}); !errors.Is(err, registry.ErrUnavailable) ||
		!strings.Contains(err.Error(), "mount it for writing") {
		t.Errorf("a new generation: %v", err)
	}
	if _, err := Open(t.Context(), Options{Path: path, Generation: own + 1}); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("a higher generation: %v", err)
	}
	back, err := Open(t.Context(), Options{Path: path, Generation: own})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Open(ended(t), Options{Path: path, Generation: own}); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("a second opener: %v", err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- back.Run(t.Context()) }()
	put := func() error {
		_, err := registrytest.Write(t.Context(), back, puts(alloc("b")))
		return err
	}
	for range 3 {
		if err := put(); !errors.Is(err, registry.ErrExhausted) || !strings.Contains(err.Error(), "read-only") {
			t.Errorf("a commit: %v", err)
		}
	}
	if n := stored(back); n != 1 {
		t.Errorf("%d allocs are read", n)
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != string(before) {
		t.Errorf("the file was changed: %v", err)
	}
	if err := unix.Unmount(dir, 0); !errors.Is(err, unix.EBUSY) {
		t.Errorf("the file is not open where it was mounted: %v", err) // else this test proves nothing
	}
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	if err := put(); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("a commit when it can be written to again: %v", err)
	}
	if err := <-stopped; !errors.Is(err, registry.ErrUnavailable) || !strings.Contains(err.Error(), "start over") {
		t.Errorf("the store has stopped for %v", err)
	}
	if err := back.Close(); err != nil {
		t.Error(err)
	}
	next := start(t, Options{Path: path})
	next.must(t, puts(alloc("b")))
	next.stop(t)
}

// mountReadOnly makes a directory read-only until the test ends.
func mountReadOnly(t *testing.T, dir string) {
	t.Helper()
	err := unix.Mount(dir, dir, "", unix.MS_BIND, "")
	if errors.Is(err, unix.EPERM) {
		t.Skip("mounting needs root")
	}
	if err == nil {
		t.Cleanup(func() {
			if err := unix.Unmount(dir, 0); err != nil {
				t.Error(err)
			}
		})
		err = unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")
	}
	if err != nil {
		t.Fatal(err)
	}
}

// ended returns a context that has ended.
func ended(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

// A copy that is made during commits is an intact file of one index.
func TestSnapshot(t *testing.T) {
	s := start(t, Options{Path: statePath(t)})
	defer s.stop(t)
	for i := range 50 {
		s.must(t, puts(alloc(fmt.Sprint("a", i))))
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 100 {
			if _, err := registrytest.Write(t.Context(), s, puts(alloc(fmt.Sprint("b", i)))); err != nil {
				t.Error(err)
			}
		}
	}()
	for range 5 {
		path := statePath(t)
		file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		at, err := s.Snapshot(t.Context(), file)
		if err != nil {
			t.Fatal(err)
		}
		if err := file.Close(); err != nil {
			t.Fatal(err)
		}
		copied := start(t, Options{Path: path})
		if n := stored(copied.Store); copied.Index() != at || registry.Seq(n) != at {
			t.Errorf("copy of index %d has index %d and %d allocs", at, copied.Index(), n)
		}
		copied.stop(t)
	}
	<-done
	if _, err := s.Snapshot(t.Context(), brokenPipe{}); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("snapshot to a broken pipe: %v", err)
	}
}

type brokenPipe struct{}

func (brokenPipe) Write([]byte) (int, error) { return 0, io.ErrClosedPipe }
