package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
	"holdfast/internal/mount/mounttest"
	"holdfast/registry"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "-look" {
		mount.LookMain()
	}
	os.Exit(mounttest.Run(m))
}

// user is a process that works in a directory until it is ended.
func user(t *testing.T, dir string) (pid int, end func()) {
	t.Helper()
	cmd := exec.Command("cat")
	cmd.Dir = dir
	in, err := cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	end = func() { in.Close(); _ = cmd.Wait() }
	t.Cleanup(end)
	return cmd.Process.Pid, end
}

func TestHeld(t *testing.T) {
	d, l := newDisk(t)
	d.Helper = []string{"/proc/self/exe", "-look"}
	vol, free := l.MountRoot()+"/p/stage/v", l.MountRoot()+"/p/stage/free"
	tmpfs(t, vol, "size=64k")
	tmpfs(t, free, "size=64k")
	must(t, unix.Mount("second", vol, "tmpfs", unix.MS_RDONLY, "size=64k"))
	pid, end := user(t, vol)

	users, err := d.Users(vol, free, l.MountRoot()+"/none")
	want := map[string][]string{vol: {fmt.Sprintf("process %d (cat) works in %s", pid, vol)}}
	if err != nil || !reflect.DeepEqual(users, want) {
		t.Errorf("Users: %q, %v", users, err)
	}
	if m, found, err := d.Mount(vol); err != nil || !found || m.Source != "second" || !m.ReadOnly() || m.FSType != "tmpfs" {
		t.Errorf("Mount: %v, %v, %v", m, found, err)
	}
	if m, found, err := d.Mount(l.MountRoot() + "/p"); err != nil || found || m != (mount.Mount{}) {
		t.Errorf("Mount of none: %v, %v, %v", m, found, err)
	}
	err = d.Unmount(vol)
	if !errors.Is(err, registry.ErrConflict) || !errors.Is(err, mount.ErrBusy) || !strings.Contains(err.Error(), want[vol][0]) {
		t.Errorf("Unmount of what is used: %v", err)
	}
	end()
	for range 3 { // two stacked ones, then nothing
		must(t, d.Unmount(vol))
	}
	must(t, d.Unmount(free))
	if below, err := d.Below(l.MountRoot()); err != nil || len(below) > 0 {
		t.Errorf("left: %v, %v", below, err)
	}
	seen, err := d.Look(t.Context(), vol, l.MountRoot()+"/none")
	if err != nil || seen[vol].Kind != mount.Directory || seen[l.MountRoot()+"/none"].Errno != unix.ENOENT {
		t.Errorf("Look: %v, %v", seen, err)
	}
}

// What is not ours is neither looked at, nor unmounted, nor asked about.
func TestHeldRefusesForeignPaths(t *testing.T) {
	d, l := newDisk(t)
	d.Helper = []string{"/proc/self/exe", "-look"}
	foreign := l.Run + "-foreign"
	tmpfs(t, foreign, "size=64k")
	for _, path := range []string{foreign, l.MountRoot(), l.MountRoot() + "/../../run-foreign", "/", "", "relative"} {
		if _, err := d.Users(path); !errors.Is(err, registry.ErrInternal) {
			t.Errorf("Users(%q): %v", path, err)
		}
		if err := d.Unmount(path); !errors.Is(err, registry.ErrInternal) {
			t.Errorf("Unmount(%q): %v", path, err)
		}
		if _, err := d.Look(t.Context(), path); !errors.Is(err, registry.ErrInternal) {
			t.Errorf("Look(%q): %v", path, err)
		}
		if _, _, err := d.Mount(path); !errors.Is(err, registry.ErrInternal) {
			t.Errorf("Mount(%q): %v", path, err)
		}
	}
	if _, found, err := mount.At(foreign); err != nil || !found {
		t.Errorf("it was unmounted: %v", err)
	}
}

// A loop device, a swap file or an export is no process: the error says where to look.
func TestHeldByNobodySaysWhereToLook(t *testing.T) {
	d, l := newDisk(t)
	d.Helper = []string{"/proc/self/exe", "-look"}
	vol := l.MountRoot() + "/v"
	tmpfs(t, vol, "size=64k")
	f, err := os.Open(vol) // the shim itself is not counted
	must(t, err)
	if err := d.Unmount(vol); !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), "losetup") {
		t.Errorf("got %v", err)
	}
	must(t, f.Close())
}

// A helper that does not answer is no answer: nobody is told that a volume is unused, or unmounted.
func TestHeldWithoutAnAnswer(t *testing.T) {
	d, l := newDisk(t)
	if _, err := d.Users(l.MountRoot() + "/v"); err == nil {
		t.Error("without a helper")
	}
	d.Helper = []string{"/bin/sleep", "100"}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if seen, err := d.Look(ctx, l.MountRoot()+"/v"); !errors.Is(err, registry.ErrUncertain) || len(seen) > 0 {
		t.Errorf("Look: %v, %v", seen, err)
	}
	if err := unanswered(fmt.Errorf("unmount: %w", mount.ErrHung)); !errors.Is(err, registry.ErrUncertain) || !errors.Is(err, mount.ErrHung) {
		t.Errorf("got %v", err)
	}
}
