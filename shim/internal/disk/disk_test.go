package disk

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// newDisk is a disk in two real directories. Whatever is mounted below is taken down at the end.
func newDisk(t *testing.T) (*Disk, hooks.Layout) {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	l := hooks.Layout{Run: filepath.Join(dir, "run"), State: filepath.Join(dir, "state")}
	must(t, os.Mkdir(l.Run, 0o700))
	must(t, os.Mkdir(l.State, 0o700))
	t.Cleanup(func() {
		mounts, err := mount.Below(dir)
		must(t, err)
		for _, m := range slices.Backward(mounts) {
			must(t, unix.Unmount(m.Point, 0))
		}
		must(t, os.RemoveAll(dir))
	})
	d, err := New(l)
	must(t, err)
	return d, l
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// tmpfs mounts one at a new directory.
func tmpfs(t *testing.T, at, options string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("mounts need root")
	}
	must(t, os.MkdirAll(at, 0o700))
	must(t, unix.Mount("tmpfs", at, "tmpfs", 0, options))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// Paths that are not ours, or only look so, are refused by everything that makes or removes.
func TestForeignPathsAreRefused(t *testing.T) {
	d, l := newDisk(t)
	victim := filepath.Join(filepath.Dir(l.Run), "victim")
	must(t, os.MkdirAll(filepath.Join(victim, "sub"), 0o700))
	keep := filepath.Join(l.MountRoot(), "plugin")
	must(t, d.MakeDir(keep))
	for _, path := range []string{
		victim, filepath.Join(victim, "sub"), l.MountRoot() + "/../../victim", l.Run + "/t/../../victim", l.Run + "x/t/a", l.Run + "/shim-1-2",
		l.MountRoot(), l.Run, "/", "", "relative", l.Database(),
	} {
		if err := d.MakeDir(path); err == nil {
			t.Errorf("MakeDir %q", path)
		}
		if err := d.RemoveDir(path); err == nil {
			t.Errorf("RemoveDir %q", path)
		}
		if err := d.RemoveSocketDir(path); err == nil {
			t.Errorf("RemoveSocketDir %q", path)
		}
		if _, err := d.ClearSocket(t.Context(), path); err == nil {
			t.Errorf("ClearSocket %q", path)
		}
	}
	if err := d.RemoveSocketDir(keep); err == nil {
		t.Error("a directory of volumes was removed as one of sockets")
	}
	if !exists(filepath.Join(victim, "sub")) || !exists(keep) {
		t.Error("something was removed")
	}
}

func TestDirectoriesAreMadeAndRemoved(t *testing.T) {
	d, l := newDisk(t)
	path := l.MountRoot() + "/p/stage/v"
	must(t, d.MakeDirs([]hooks.HostDir{{Path: path, Mode: 0o700}, {Path: path, Mode: 0o700}}))
	info, err := os.Stat(path)
	must(t, err)
	if info.Mode().Perm() != 0o700 {
		t.Errorf("mode %v", info.Mode())
	}
	if err := d.RemoveDir(l.MountRoot() + "/p"); err == nil {
		t.Error("a directory that is not empty was removed")
	}
	must(t, d.RemoveDir(path))
	must(t, d.RemoveDir(path)) // is gone
	if exists(path) {
		t.Error("it is still there")
	}
}

// A link that a plugin has put in the way is not followed.
func TestLinksAreNotFollowed(t *testing.T) {
	d, l := newDisk(t)
	victim := t.TempDir()
	must(t, os.Mkdir(filepath.Join(victim, "v"), 0o700))
	must(t, d.MakeDir(l.MountRoot()+"/p"))
	must(t, os.Symlink(victim, l.MountRoot()+"/p/stage"))
	if err := d.MakeDir(l.MountRoot() + "/p/stage/new"); err == nil || exists(filepath.Join(victim, "new")) {
		t.Errorf("MakeDir followed a link: %v", err)
	}
	if err := d.RemoveDir(l.MountRoot() + "/p/stage/v"); err == nil || !exists(filepath.Join(victim, "v")) {
		t.Errorf("RemoveDir followed a link: %v", err)
	}
	dirs, err := d.Dirs(l.MountRoot())
	if want := []string{l.MountRoot() + "/p"}; err != nil || !slices.Equal(dirs, want) {
		t.Errorf("Dirs: %v, %v", dirs, err)
	}
}

// What is mounted is neither listed, nor entered, nor removed.
func TestMountsAreNeverEntered(t *testing.T) {
	d, l := newDisk(t)
	root := l.MountRoot()
	must(t, d.MakeDir(root+"/p/publish/empty"))
	must(t, d.MakeDir(root+"/p/stage"))
	tmpfs(t, root+"/p/stage/v", "size=64k")
	must(t, os.MkdirAll(root+"/p/stage/v/inside", 0o700))
	tmpfs(t, root+"/p/stage/v/inside/deep", "size=64k")
	must(t, os.WriteFile(root+"/p/file", nil, 0o600))
	dirs, err := d.Dirs(root)
	must(t, err)
	slices.Sort(dirs)
	if want := []string{root + "/p", root + "/p/publish", root + "/p/publish/empty", root + "/p/stage"}; !slices.Equal(dirs, want) {
		t.Errorf("Dirs: %v", dirs)
	}
	if err := d.RemoveDir(root + "/p/stage/v"); !errors.Is(err, mount.ErrMounted) {
		t.Errorf("RemoveDir of a mount: %v", err)
	}
	if err := d.RemoveDir(root + "/p/stage/v/inside"); !errors.Is(err, mount.ErrMounted) {
		t.Errorf("RemoveDir inside a mount: %v", err)
	}
	if err := d.MakeDir(root + "/p/stage/v/new"); !errors.Is(err, mount.ErrMounted) || exists(root+"/p/stage/v/new") {
		t.Errorf("MakeDir inside a mount: %v", err)
	}
	below, err := d.Below(root)
	if want := []string{root + "/p/stage/v", root + "/p/stage/v/inside/deep"}; err != nil || !slices.Equal(below, want) {
		t.Errorf("Below: %v, %v", below, err)
	}
	for path, want := range map[string]bool{root + "/p/stage/v": true, root + "/p/stage": false, root + "/none": false} {
		if got, err := d.Mounted(path); err != nil || got != want {
			t.Errorf("Mounted %s: %v, %v", path, got, err)
		}
	}
}

// Children come before their parents, so that who removes in this order removes all.
func TestDirsListsChildrenFirst(t *testing.T) {
	d, l := newDisk(t)
	must(t, d.MakeDir(l.MountRoot()+"/a/b/c"))
	must(t, d.MakeDir(l.MountRoot()+"/a/d"))
	dirs, err := d.Dirs(l.MountRoot())
	must(t, err)
	for _, dir := range dirs {
		must(t, d.RemoveDir(dir))
	}
	if entries, err := os.ReadDir(l.MountRoot()); err != nil || len(entries) > 0 || len(dirs) != 4 {
		t.Errorf("left %v of %v, %v", entries, dirs, err)
	}
	if dirs, err := d.Dirs(l.MountRoot() + "/none"); err != nil || len(dirs) > 0 {
		t.Errorf("of none: %v, %v", dirs, err)
	}
}

func TestDirsOfADirectoryThatIsRemovedMeanwhile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gone")
	must(t, os.Mkdir(path, 0o700))
	open, err := os.Open(path)
	must(t, err)
	must(t, os.Remove(path))
	if dirs, err := appendDirs([]string{"other"}, open); err != nil || !slices.Equal(dirs, []string{"other"}) {
		t.Errorf("%v, %v", dirs, err)
	}
}

func TestFullDiskIsExhausted(t *testing.T) {
	d, l := newDisk(t)
	tmpfs(t, l.MountRoot(), "size=64k,nr_inodes=4")
	var err error
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		if err = d.MakeDir(l.MountRoot() + "/" + name); err != nil {
			break
		}
	}
	if !errors.Is(err, registry.ErrExhausted) || !errors.Is(err, unix.ENOSPC) {
		t.Errorf("got %v", err)
	}
	must(t, d.RemoveDir(l.MountRoot()+"/a")) // releases still work
}

func TestSockets(t *testing.T) {
	d, l := newDisk(t)
	k := registry.TaskKey{Alloc: "a", Task: "t"}
	must(t, d.MakeDir(l.SocketDir(k)))
	if answers, err := d.ClearSocket(t.Context(), l.Socket(k)); answers || err != nil {
		t.Errorf("none: %v, %v", answers, err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: l.Socket(k), Net: "unix"})
	must(t, err)
	listener.SetUnlinkOnClose(false)
	if answers, err := d.ClearSocket(t.Context(), l.Socket(k)); !answers || err != nil || !exists(l.Socket(k)) {
		t.Errorf("served: %v, %v", answers, err)
	}
	must(t, listener.Close())
	if answers, err := d.ClearSocket(t.Context(), l.Socket(k)); answers || err != nil || exists(l.Socket(k)) {
		t.Errorf("stale: %v, %v", answers, err)
	}
	must(t, os.WriteFile(filepath.Join(l.SocketDir(k), "left"), nil, 0o600))
	must(t, d.RemoveSocketDir(l.SocketDir(k)))
	if exists(l.SocketDir(k)) {
		t.Error("the directory is still there")
	}
}

// A full disk keeps Share from its test, and says nothing of mounts.
func TestShareOnAFullDiskSaysThatItIsFull(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounts need root")
	}
	d, l := newDisk(t)
	must(t, d.Share())
	must(t, unix.Mount("small", l.MountRoot(), "tmpfs", 0, "nr_inodes=2"))
	t.Cleanup(func() { must(t, unix.Unmount(l.MountRoot(), 0)) })
	must(t, os.WriteFile(filepath.Join(l.MountRoot(), "filler"), nil, 0o600))
	if err := d.Share(); !errors.Is(err, registry.ErrExhausted) {
		t.Errorf("shared on a full disk: %v", err)
	}
}

// After Share both roots are shared mounts, and Share may be called again.
func TestShareMakesBothRootsShared(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounts need root")
	}
	d, l := newDisk(t)
	must(t, d.Share())
	must(t, d.Share())
	for _, dir := range []string{l.Run, l.MountRoot()} {
		if m, found, err := mount.At(dir); err != nil || !found || !m.Shared() {
			t.Errorf("%s: %v %v %v", dir, m, found, err)
		}
	}
	mounts, err := mount.Below(filepath.Dir(l.Run))
	if err != nil || len(mounts) != 2 {
		t.Errorf("%d mounts, %v", len(mounts), err)
	}
}
