package task

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// patience is more than anything here takes: a test that needs it has failed.
const patience = 30 * time.Second

func directories(t *testing.T) *Directories {
	t.Helper()
	d, err := NewDirectories()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-ended
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		if len(d.waiting) != 0 || len(d.watcher.WatchList()) != 0 {
			t.Errorf("%d directories are waited for, %v are watched", len(d.waiting), d.watcher.WatchList())
		}
	})
	return d
}

// changed waits on a goroutine; what it returns gives true if the change came, false if patience ended.
func changed(d *Directories, socket string, limit time.Duration) (wait func() bool) {
	seen := make(chan bool, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		d.Changed(ctx, socket)
		seen <- ctx.Err() == nil
	}()
	return func() bool { return <-seen }
}

// watched waits until n directories are watched.
func watched(t *testing.T, d *Directories, n int) {
	t.Helper()
	for deadline := time.Now().Add(patience); len(d.watcher.WatchList()) != n; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d directories are watched, want %d", len(d.watcher.WatchList()), n)
		}
	}
}

// inotifies is how many inotify instances this process has, as the kernel tells.
func inotifies(t *testing.T) (n int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("no /proc: ", err)
	}
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil && strings.Contains(to, "inotify") {
			n++
		}
	}
	return n
}

// Three hundred directories are more than the kernel has inotify instances for one user.
func TestManyDirectoriesOneInotify(t *testing.T) {
	before := inotifies(t)
	d := directories(t)
	root := t.TempDir()
	var waits []func() bool
	for i := range 300 {
		dir := filepath.Join(root, fmt.Sprint(i))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		waits = append(waits, changed(d, filepath.Join(dir, "csi.sock"), patience))
	}
	watched(t, d, 300)
	if n := inotifies(t) - before; n != 1 {
		t.Errorf("%d inotify instances", n)
	}
	for i := range waits {
		if err := os.WriteFile(filepath.Join(root, fmt.Sprint(i), "csi.sock"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for i, wait := range waits {
		if !wait() {
			t.Errorf("nobody told of a change in directory %d", i)
		}
	}
	watched(t, d, 0)
}

// A directory that is removed is a change, and so is what happens in one that is made anew under its name.
func TestDirectoryMadeAnew(t *testing.T) {
	d := directories(t)
	dir := filepath.Join(t.TempDir(), "d")
	socket := filepath.Join(dir, "csi.sock")
	for round := range 5 {
		if changed(d, socket, time.Millisecond)() {
			t.Fatal("a directory that is not there changes")
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		one, two := changed(d, socket, patience), changed(d, socket, patience)
		watched(t, d, 1)
		waiters(t, d, dir, 2)
		if err := os.WriteFile(socket, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if !one() || !two() {
			t.Fatalf("round %d: a new socket was not told", round)
		}
		if err := os.Remove(socket); err != nil {
			t.Fatal(err)
		}
		watched(t, d, 0)
		gone := changed(d, socket, patience)
		watched(t, d, 1)
		if err := os.Remove(dir); err != nil {
			t.Fatal(err)
		}
		if !gone() {
			t.Fatalf("round %d: the removal was not told", round)
		}
	}
}

// waiters waits until n wait for the directory.
func waiters(t *testing.T, d *Directories, dir string, n int) {
	t.Helper()
	count := func() int {
		d.mu.Lock()
		defer d.mu.Unlock()
		if w := d.waiting[dir]; w != nil {
			return w.uses
		}
		return 0
	}
	for deadline := time.Now().Add(patience); count() != n; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d wait, want %d", count(), n)
		}
	}
}

// One that waits while the directory is removed and made again under it, beside one that comes after.
func TestWaitsForTheNewDirectoryToo(t *testing.T) {
	d := directories(t)
	dir := filepath.Join(t.TempDir(), "d")
	socket := filepath.Join(dir, "csi.sock")
	early := changed(d, socket, patience) // there is nothing to watch yet
	waiters(t, d, dir, 1)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	late := changed(d, socket, patience)
	watched(t, d, 1)
	if err := os.WriteFile(socket, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if !early() || !late() {
		t.Error("a change was not told")
	}
}

// A change that comes before anybody waits for it is found by the caller's back-off: Changed lasts no longer than its context.
func TestChangeBeforeTheWait(t *testing.T) {
	d := directories(t)
	dir := t.TempDir()
	socket := filepath.Join(dir, "csi.sock")
	if err := os.WriteFile(socket, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if changed(d, socket, 10*time.Millisecond)() {
		t.Error("a change of the past was told")
	}
}

// Closing ends Run, and whoever waits or comes afterwards waits for its context only.
func TestCloseDirectories(t *testing.T) {
	d, err := NewDirectories()
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- d.Run(context.Background()) }()
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { d.Changed(ctx, filepath.Join(dir, "csi.sock")); close(done) }()
	watched(t, d, 1)
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; err != nil {
		t.Errorf("Run returned %v", err)
	}
	cancel()
	<-done
	if changed(d, filepath.Join(dir, "csi.sock"), time.Millisecond)() {
		t.Error("a closed one tells of changes")
	}
	if err := d.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}

// Many come and go over few directories that change all the time: nobody hangs, and in the end nothing is watched.
func TestDirectoriesAtOnce(t *testing.T) {
	d := directories(t)
	root := t.TempDir()
	var wg sync.WaitGroup
	for i := range 8 {
		socket := filepath.Join(root, fmt.Sprint(i%3), "csi.sock")
		wg.Go(func() {
			for range 100 {
				_ = os.Mkdir(filepath.Dir(socket), 0o700)
				_ = os.WriteFile(socket, nil, 0o600)
				changed(d, socket, time.Millisecond)()
				_ = os.RemoveAll(filepath.Dir(socket))
			}
		})
	}
	wg.Wait()
	watched(t, d, 0)
}
