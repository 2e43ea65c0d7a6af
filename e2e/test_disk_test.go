package e2e

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"holdfast/internal/installed"
)

// testDisk is a file system on a loop device. It can be full or lose its power. The device is in memory, so a power cut
// takes less time than the kernel waits before it writes back data (30 s).
type testDisk struct {
	t     *testing.T
	kind  string // ext4 or xfs
	dir   string // where it is mounted
	image string // the device's content
}

// newDisk makes a file system of a type and a size.
func newDisk(t *testing.T, kind string, size string) *testDisk {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("loop devices need root")
	}
	installed.FileSystem(t, kind)
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		t.Fatal(err)
	}
	memory := filepath.Join(dir, "memory")
	d := &testDisk{t: t, kind: kind, dir: filepath.Join(dir, "d"), image: filepath.Join(memory, "image")}
	t.Cleanup(func() {
		d.unmount()
		// the loop device ends later if the mount namespace of another test still has the file system
		if err := errors.Join(unix.Unmount(memory, unix.MNT_DETACH), os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	for _, name := range []string{memory, d.dir} {
		if err := os.Mkdir(name, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	d.run("mount", "-t", "tmpfs", "-o", "size=2g,mode=700", "none", memory)
	d.run("truncate", "-s", size, d.image)
	d.run("mkfs."+kind, "-q", d.image)
	d.mount()
	return d
}

func (d *testDisk) run(name string, args ...string) {
	d.t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		d.t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
}

// mount mounts the image. The loop device ends with the mount. The mount namespace of another test may still have the
// file system that powerUp has unmounted: without nouuid, XFS would refuse the copy beside it.
func (d *testDisk) mount() {
	d.t.Helper()
	options := "loop"
	if d.kind == "xfs" {
		options += ",nouuid"
	}
	d.run("mount", "-o", options, d.image, d.dir)
	d.run("mount", "--make-private", d.dir)
}

// unmount unmounts the file system and everything mounted on it.
func (d *testDisk) unmount() {
	d.t.Helper()
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(d.dir))
	if err != nil {
		d.t.Error(err)
	}
	for _, m := range slices.Backward(mounts) {
		unmount(d.t, m.Mountpoint)
	}
}

// cut copies the content of the device, without what the file system has not written yet. It repeats the copy until the
// device did not change meanwhile.
func (d *testDisk) cut() (copied string) {
	d.t.Helper()
	copied = d.image + ".cut"
	err := waitFor(d.t.Context(), "the device is at rest", func() bool {
		d.run("cp", "--sparse=always", d.image, copied)
		return exec.Command("cmp", "-s", d.image, copied).Run() == nil
	})
	if err != nil {
		d.t.Fatal(err)
	}
	return copied
}

// powerUp mounts the content that the device had when its power was cut.
func (d *testDisk) powerUp(copied string) {
	d.t.Helper()
	d.unmount()
	if err := os.Rename(copied, d.image); err != nil {
		d.t.Fatal(err)
	}
	d.mount()
}

// fill uses up all space; free returns it.
func (d *testDisk) fill() (free func()) {
	d.t.Helper()
	name := filepath.Join(d.dir, "filler")
	file, err := os.Create(name)
	if err != nil {
		d.t.Fatal(err)
	}
	for _, n := range []int{1 << 20, 4096, 1} {
		for err = nil; err == nil; {
			_, err = file.Write(make([]byte, n))
		}
	}
	if !strings.Contains(err.Error(), unix.ENOSPC.Error()) {
		d.t.Fatal(err)
	}
	_ = file.Close()
	return func() {
		if err := os.Remove(name); err != nil {
			d.t.Fatal(err)
		}
	}
}
