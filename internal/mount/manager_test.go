package mount

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/registry"
)

// newManager returns a manager of a run and a state directory below a new one.
func newManager(t *testing.T) (*Manager, hooks.Layout) {
	t.Helper()
	dir := tempDir(t)
	l := hooks.Layout{Run: dir + "/run", State: dir + "/state"}
	must(t, errors.Join(os.Mkdir(l.Run, 0o700), os.Mkdir(l.State, 0o700)))
	m, err := NewManager(l)
	must(t, err)
	return m, l
}

// volumeAt mounts a tmpfs at a new directory.
func volumeAt(t *testing.T, at string) string {
	t.Helper()
	mountTmpfs(t, mkdir(t, at))
	return at
}

func TestManagerRefusesForeignPaths(t *testing.T) {
	m, l := newManager(t)
	foreign := volumeAt(t, l.Run+"-foreign")
	mkdir(t, foreign, "sub")
	volume := l.MountRoot() + "/plugin"
	must(t, m.MakeDir(volume))
	for _, path := range []string{
		foreign, foreign + "/sub", l.MountRoot() + "/../../run-foreign", l.Run + "/t/../../run-foreign",
		l.Run + "x/t/a",
		l.Run + "/shim-1-2", l.MountRoot(), l.Run, "/", "", "relative", l.Database(),
	} {
		_, cleared := m.ClearSocket(t.Context(), path)
		_, users := m.Users([]string{path})
		_, inspected := m.Inspect(t.Context(), path)
		_, _, part := m.HasPart(volume, path)
		for what, err := range map[string]error{
			"MakeDir": m.MakeDir(path), "RemoveDir": m.RemoveDir(path), "RemoveSocketDir": m.RemoveSocketDir(path),
			"ClearSocket": cleared,
			"Users":       users, "Inspect": inspected, "Unmount": m.Unmount(t.Context(), path), "HasPart": part,
			"MountPart at":   m.MountPart(t.Context(), volume, "a", path, true),
			"UnmountPart":    m.UnmountPart(t.Context(), path),
			"MountPart from": m.MountPart(t.Context(), path, "a", volume+"/x/v", true),
		} {
			if !errors.Is(err, registry.ErrInternal) {
				t.Errorf("%s(%q): %v", what, path, err)
			}
		}
	}
	if err := m.RemoveSocketDir(volume); err == nil {
		t.Error("a directory of volumes was removed as one of sockets")
	}
	if !exists(t, foreign+"/sub") || !exists(t, volume) {
		t.Error("something was removed")
	}
}

func TestFullFileSystemIsExhausted(t *testing.T) {
	m, l := newManager(t)
	must(t, m.Share())
	must(t, unix.Mount("small", l.MountRoot(), "tmpfs", 0, "nr_inodes=2"))
	must(t, m.MakeDir(l.MountRoot()+"/a"))
	for what, err := range map[string]error{"MakeDir": m.MakeDir(l.MountRoot() + "/b"), "Share": m.Share()} {
		if !errors.Is(err, registry.ErrExhausted) || !errors.Is(err, unix.ENOSPC) {
			t.Errorf("%s: %v", what, err)
		}
	}
	must(t, m.RemoveDir(l.MountRoot()+"/a")) // releases still work
}

func TestShareMakesBothRootsShared(t *testing.T) {
	m, l := newManager(t)
	for range 2 {
		must(t, m.Share())
	}
	for _, dir := range []string{l.Run, l.MountRoot()} {
		if at, found, err := At(dir); err != nil || !found || !at.Shared() {
			t.Errorf("%s: %v %v %v", dir, at, found, err)
		}
	}
	if mounts, err := Below(filepath.Dir(l.Run)); err != nil || len(mounts) != 2 {
		t.Errorf("%d mounts, %v", len(mounts), err)
	}
}

func TestManagerClearsSockets(t *testing.T) {
	m, l := newManager(t)
	k := registry.TaskKey{Alloc: "a", Task: "t"}
	must(t, m.MakeDir(l.SocketDir(k)))
	cleared := func(want bool) {
		t.Helper()
		if served, err := m.ClearSocket(t.Context(), l.Socket(k)); served != want || err != nil ||
			exists(t, l.Socket(k)) != want {
			t.Errorf("served %v, %v", served, err)
		}
	}
	cleared(false)
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: l.Socket(k), Net: "unix"})
	must(t, err)
	listener.SetUnlinkOnClose(false)
	cleared(true)
	must(t, m.SweepSocketDirs(nil)) // a process serves the socket
	cleared(true)
	must(t, listener.Close())
	must(t, m.SweepSocketDirs(map[string]bool{l.SocketDir(k): true}))
	cleared(false)
	write(t, "", l.SocketDir(k), "left")
	must(t, m.SweepSocketDirs(nil))
	if exists(t, l.SocketDir(k)) {
		t.Error("the directory is still there")
	}
}

func TestUnmountNamesUsers(t *testing.T) {
	m, l := newManager(t)
	vol := volumeAt(t, l.MountRoot()+"/p/stage/v")
	must(t, unix.Mount("second", vol, "tmpfs", 0, "size=64k"))
	h := holdOn(t, false, "cwd:"+vol)
	err := m.Unmount(t.Context(), vol)
	want := fmt.Sprintf("process %d (%q) has its working directory in %s: stop that first", h.pid, "exe", vol)
	wantErr(t, err, registry.ErrConflict, want)
	wantErr(t, err, ErrBusy, "")
	h.end()
	f, err := os.Open(vol) // this process is not named
	must(t, err)
	wantErr(t, m.Unmount(t.Context(), vol), registry.ErrConflict, "losetup")
	must(t, f.Close())
	for range 3 { // the first two unmount a stacked mount each, the third finds none
		must(t, m.Unmount(t.Context(), vol))
	}
	if mounts, err := m.Mounts(l.MountRoot()); err != nil || len(mounts) > 0 {
		t.Errorf("left: %v, %v", mounts, err)
	}
}

// publishedPart returns the target of a published volume, and the mount point of a part of it.
func publishedPart(t *testing.T) (m *Manager, l hooks.Layout, target, at string) {
	t.Helper()
	m, l = newManager(t)
	c := registry.ClaimKey{Volume: registry.VolumeKey{Plugin: "p", External: "v"}, Alloc: "a", Request: "r"}
	target, at = l.Target(c, registry.Tree{Host: l.PluginRoot("p")}).Host, l.Part(c, "a/b")
	return m, l, volumeAt(t, target), at
}

func TestManagerMountsParts(t *testing.T) {
	m, _, target, at := publishedPart(t)
	has := func(wantHas, wantMounted bool) {
		t.Helper()
		if has, mounted, err := m.HasPart(target, at); has != wantHas || mounted != wantMounted || err != nil {
			t.Errorf("has %v, mounted %v, %v", has, mounted, err)
		}
	}
	has(false, false)
	wantErr(t, m.MountPart(t.Context(), target, "a/b", at, false), registry.ErrNotFound, "make it")
	must(t, os.Symlink("/", target+"/out"))
	wantErr(t, m.MountPart(t.Context(), target, "out/etc", at, false), registry.ErrDenied, "sub_path")
	must(t, os.Chmod(target, 0o777))
	must(t, m.MountPart(t.Context(), target, "a/b", at, true))
	has(true, true)
	var st unix.Stat_t
	if err := unix.Stat(target+"/a/b", &st); err != nil || st.Mode != unix.S_IFDIR|0o777 {
		t.Errorf("mode %o, %v: it depends on the umask", st.Mode, err)
	}
	wantErr(t, m.MountPart(t.Context(), target, "a/b", at, true), registry.ErrConflict, "holdfast doctor")
	h := holdOn(t, false, "cwd:"+at)
	wantErr(t, m.UnmountPart(t.Context(), at), registry.ErrConflict, fmt.Sprintf("process %d", h.pid))
	h.end()
	must(t, os.RemoveAll(target+"/a")) // a user of the whole volume may remove it
	has(false, true)
	must(t, m.UnmountPart(t.Context(), at))
	has(false, false)
	must(t, unix.Mount("", target, "tmpfs", unix.MS_REMOUNT, "nr_inodes=3"))
	wantErr(t, m.MountPart(t.Context(), target, "x/y/z", at, true), registry.ErrExhausted, "make room")
	must(t, m.UnmountPart(t.Context(), at))
}

// Two volumes may be directories of one file system. A part of one volume is not a part of the other.
func TestPartOfAnotherVolumeIsNone(t *testing.T) {
	m, _, target, at := publishedPart(t)
	pool := volumeAt(t, filepath.Dir(m.layout.State)+"/pool")
	mkdir(t, pool, "v1/a")
	mkdir(t, pool, "v2/a")
	must(t, unix.Mount(pool+"/v2", target, "", unix.MS_BIND, ""))
	must(t, m.MountPart(t.Context(), target, "a", at, false))
	if has, _, err := m.HasPart(target, at); !has || err != nil {
		t.Errorf("its own: %v, %v", has, err)
	}
	must(t, unix.Mount(pool+"/v1", target, "", unix.MS_BIND, ""))
	if has, mounted, err := m.HasPart(target, at); has || !mounted || err != nil {
		t.Errorf("a part of another volume: %v, %v, %v", has, mounted, err)
	}
	must(t, m.UnmountPart(t.Context(), at))
}

// If there is no answer in time, the outcome is uncertain, and the call may be repeated.
func TestHungHelperIsUncertain(t *testing.T) {
	m, l, target, at := publishedPart(t)
	must(t, os.MkdirAll(at, 0o700))
	f, err := os.Open(filepath.Dir(at))
	must(t, err)
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_EX)) // as a hung process of an earlier shim does
	for _, err := range []error{m.MountPart(t.Context(), target, "a", at, true), m.UnmountPart(t.Context(), at)} {
		if !errors.Is(err, registry.ErrUncertain) || !errors.Is(err, ErrHeld) || exists(t, target+"/a") {
			t.Errorf("%v", err)
		}
	}
	must(t, f.Close())
	must(t, m.UnmountPart(t.Context(), at))
	m.helper.Command = []string{"/bin/sleep", "100"}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	found, err := m.Inspect(ctx, l.MountRoot()+"/v")
	if !errors.Is(err, registry.ErrUncertain) || len(found) > 0 {
		t.Errorf("Inspect: %v, %v", found, err)
	}
	if err := m.Unmount(ctx, target); err == nil {
		t.Error("Unmount succeeded")
	}
	reap(t, &m.helper)
	if !slices.Contains(raw(t, target), target) {
		t.Error("it was unmounted")
	}
}
