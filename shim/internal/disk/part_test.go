package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// parted is a disk on which a volume is published, and where a part of it has its place.
func parted(t *testing.T) (d *Disk, l hooks.Layout, target, at string) {
	t.Helper()
	d, l = newDisk(t)
	d.Helper = []string{"/proc/self/exe", "-look"}
	c := registry.ClaimKey{Volume: registry.VolumeKey{Plugin: "p", External: "v"}, Alloc: "a", Request: "r"}
	target, at = l.Target(c, registry.Tree{Host: l.PluginRoot("p")}).Host, l.Part(c, "a/b")
	tmpfs(t, target, "size=1m")
	return d, l, target, at
}

func TestParts(t *testing.T) {
	d, l, target, at := parted(t)
	has := func(wantHas, wantMounted bool) {
		t.Helper()
		if has, mounted, err := d.HasPart(target, at); has != wantHas || mounted != wantMounted || err != nil {
			t.Errorf("has %v, mounted %v, %v", has, mounted, err)
		}
	}
	has(false, false)
	err := d.MountPart(t.Context(), target, "a/b", at, false)
	if !errors.Is(err, registry.ErrNotFound) || !strings.Contains(err.Error(), "make it") {
		t.Errorf("a missing one: %v", err)
	}
	must(t, d.MountPart(t.Context(), target, "a/b", at, true))
	has(true, true)
	must(t, os.WriteFile(at+"/file", []byte("x"), 0o600))
	if !exists(target + "/a/b/file") {
		t.Error("it is not a part of the volume")
	}
	if err := d.MountPart(t.Context(), target, "a/b", at, true); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("a second time: %v", err)
	}
	pid, end := user(t, at)
	err = d.UnmountPart(t.Context(), at)
	if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), fmt.Sprintf("process %d (cat) works in %s", pid, at)) {
		t.Errorf("a used one: %v", err)
	}
	has(true, true)
	end()
	must(t, os.RemoveAll(target+"/a")) // by whoever has all of the volume
	has(false, true)
	must(t, d.UnmountPart(t.Context(), at))
	has(false, false)
	must(t, d.MountPart(t.Context(), target, "a/b", at, true))
	tmpfs(t, target, "size=64k") // the volume is another one by now
	has(false, true)
	must(t, unix.Unmount(target, 0))
	has(true, true)
	must(t, unix.Unmount(target, 0))
	has(false, true)
	for range 2 {
		must(t, d.UnmountPart(t.Context(), at))
		has(false, false)
	}
	if exists(filepath.Dir(at)) || exists(l.MountRoot()+"/parts/x") {
		t.Error("its directory is left")
	}
}

// A link in a volume that is a directory of a larger file system does not lead to what lies beside it.
func TestPartsStayInTheirVolume(t *testing.T) {
	d, l, target, at := parted(t)
	must(t, unix.Unmount(target, 0))
	pool := filepath.Dir(l.Run) + "/pool"
	tmpfs(t, pool, "size=1m")
	must(t, os.MkdirAll(pool+"/v1/in", 0o755))
	must(t, os.MkdirAll(pool+"/v2/secret", 0o755))
	must(t, unix.Mount(pool+"/v1", target, "", unix.MS_BIND, ""))
	for name, to := range map[string]string{"up": "../v2", "abs": pool + "/v2", "root": "/", "self": "in/../in"} {
		must(t, os.Symlink(to, pool+"/v1/"+name))
	}
	for _, path := range []string{"up", "up/secret", "abs", "root/etc", "up/new", "in/../up"} {
		if err := d.MountPart(t.Context(), target, path, at, true); !errors.Is(err, registry.ErrDenied) {
			t.Errorf("%s: %v", path, err)
		}
	}
	if exists(pool + "/v2/new") {
		t.Error("a directory was made in another volume")
	}
	must(t, d.MountPart(t.Context(), target, "self", at, true))
	if has, _, err := d.HasPart(target, at); !has || err != nil {
		t.Errorf("%v, %v", has, err)
	}
	must(t, d.UnmountPart(t.Context(), at))
	must(t, unix.Mount(pool+"/v2", target, "", unix.MS_BIND, "")) // of the same file system, and another volume
	must(t, d.MountPart(t.Context(), target, "secret", at, true))
	must(t, unix.Unmount(target, 0))
	if has, mounted, err := d.HasPart(target, at); has || !mounted || err != nil {
		t.Errorf("a part of another volume: %v, %v, %v", has, mounted, err)
	}
	must(t, d.UnmountPart(t.Context(), at))
	must(t, unix.Unmount(target, 0))
	must(t, unix.Unmount(pool, 0))
}

func TestPartsAreRefused(t *testing.T) {
	d, l, target, at := parted(t)
	socket := filepath.Dir(l.Socket(registry.TaskKey{})) + "/x/v"
	for _, c := range [][2]string{
		{"/tmp", at}, {target, "/tmp/x/v"}, {target, socket}, {socket, at}, {target, l.MountRoot() + "/../../x/v"}, {"", at},
	} {
		if err := d.MountPart(t.Context(), c[0], "a", c[1], true); !errors.Is(err, registry.ErrInternal) {
			t.Errorf("%q: %v", c, err)
		}
	}
	for _, path := range []string{"/tmp/x/v", "", l.MountRoot()} {
		if err := d.UnmountPart(t.Context(), path); !errors.Is(err, registry.ErrInternal) {
			t.Errorf("%q: %v", path, err)
		}
		if _, _, err := d.HasPart(target, path); !errors.Is(err, registry.ErrInternal) {
			t.Errorf("%q: %v", path, err)
		}
	}
	must(t, unix.Mount("", target, "tmpfs", unix.MS_REMOUNT, "nr_inodes=2"))
	if err := d.MountPart(t.Context(), target, "a/b/c", at, true); !errors.Is(err, registry.ErrExhausted) {
		t.Errorf("a full volume: %v", err)
	}
	must(t, d.UnmountPart(t.Context(), at))
}

// Who is at a part, in whichever process, has it to himself: another shim is told so, and nobody takes it for gone.
func TestPartsThatHang(t *testing.T) {
	d, _, target, at := parted(t)
	must(t, os.MkdirAll(at, 0o700))
	f, err := os.Open(filepath.Dir(at))
	must(t, err)
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	for _, err := range []error{d.MountPart(t.Context(), target, "a", at, true), d.UnmountPart(t.Context(), at)} {
		if !errors.Is(err, registry.ErrUncertain) || !errors.Is(err, mount.ErrHeld) || exists(target+"/a") {
			t.Errorf("%v", err)
		}
	}
	must(t, f.Close())
	must(t, d.UnmountPart(t.Context(), at))
	d.Helper = []string{"/bin/sleep", "100"}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := d.MountPart(ctx, target, "a", at, true); !errors.Is(err, registry.ErrUncertain) || !errors.Is(err, mount.ErrHung) {
		t.Errorf("%v", err)
	}
	d.Helper = nil
	if d.MountPart(t.Context(), target, "a", at, true) == nil || d.UnmountPart(t.Context(), at) == nil {
		t.Error("without a helper")
	}
}
