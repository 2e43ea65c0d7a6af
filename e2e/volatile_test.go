package e2e

import (
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

// volatileDisk is a file system of its own on a loop device: it can be full, or lose its power. The device is in memory: however busy the
// disks of this machine are, a power cut is over long before the kernel writes back what nobody has flushed (30 s).
type testDisk struct {
	t     *testing.T
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
	d := &testDisk{t: t, dir: filepath.Join(dir, "d"), image: filepath.Join(memory, "image")}
	t.Cleanup(func() {
		d.unmount()
		unmount(t, memory)
		if err := os.RemoveAll(dir); err != nil {
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

// mount mounts the image; the loop device ends with the mount.
func (d *testDisk) mount() {
	d.t.Helper()
	d.run("mount", "-o", "loop", d.image, d.dir)
	d.run("mount", "--make-private", d.dir)
}

// unmount takes away the file system and whatever is mounted on it.
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

// cut copies what is on the device at this moment: what the file system has not written to it yet is not in the copy. The device has to be at
// rest: it still is what was copied when the copy is done.
func (d *testDisk) cut() (copied string) {
	d.t.Helper()
	copied = d.image + ".cut"
	for range 20 {
		d.run("cp", "--sparse=always", d.image, copied)
		if err := exec.Command("cmp", "-s", d.image, copied).Run(); err == nil {
			return copied
		}
	}
	d.t.Fatal("the device is never at rest")
	return ""
}

// powerUp mounts what was on the device when its power was cut.
func (d *testDisk) powerUp(copied string) {
	d.t.Helper()
	d.unmount()
	if err := os.Rename(copied, d.image); err != nil {
		d.t.Fatal(err)
	}
	d.mount()
}

// fill takes the room that is left. free gives it back.
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
