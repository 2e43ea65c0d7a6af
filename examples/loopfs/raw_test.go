package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"holdfast/examples/loopfs/internal/disk"
	mounttable "holdfast/internal/mount"
)

// deviceAt is the number of the block device at a path.
func deviceAt(t *testing.T, path string) mounttable.Number {
	t.Helper()
	n, err := mounttable.NumberOf(path)
	if err != nil || !n.Block {
		t.Errorf("%s is no block device: %+v, %v", path, n, err)
	}
	return n
}

var pattern = bytes.Repeat([]byte("holdfast"), 512)

func writeDevice(t *testing.T, path string, offset int64) error {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_, err = f.WriteAt(pattern, offset)
	return errors.Join(err, f.Sync())
}

func expectPattern(t *testing.T, path string, offset int64) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	got := make([]byte, len(pattern))
	if _, err := f.ReadAt(got, offset); err != nil || !bytes.Equal(got, pattern) {
		t.Errorf("%s holds %.16q at %d, %v", path, got, offset, err)
	}
}

func TestRawVolume(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop")
	raw := blockOf(multi)
	id, s := p.create("a", raw).VolumeId, m.staging("s")
	one, two, three := m.target("one"), m.target("two"), m.target("three")

	step(t, "publish before stage", p.publish(id, s, one, raw, false), codes.FailedPrecondition)
	step(t, "stage as a file system", p.stage(id, s, multi), codes.FailedPrecondition)
	for range 2 {
		step(t, "stage", p.stage(id, s, raw), codes.OK)
		step(t, "publish", p.publish(id, s, one, raw, false), codes.OK)
	}
	step(t, "publish elsewhere", p.publish(id, s, two, raw, false), codes.OK)
	if a, b := deviceAt(t, one), deviceAt(t, two); a != b {
		t.Errorf("two publishes have two devices: %+v and %+v", a, b)
	}
	if err := writeDevice(t, one, 16<<20-4096); err != nil { // the very end
		t.Error(err)
	}
	expectPattern(t, two, 16<<20-4096)

	step(t, "publish read-only", p.publish(id, s, three, raw, true), codes.OK)
	step(t, "publish read-only there", p.publish(id, s, two, raw, true), codes.AlreadyExists)
	expectPattern(t, three, 16<<20-4096)
	if err := writeDevice(t, three, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("a write to a read-only publish: %v", err)
	}
	for _, at := range []string{one, three, s} {
		usage, inodes, err := p.stats(id, at)
		if err != nil || usage.GetTotal() != 16<<20 || inodes != nil {
			t.Errorf("stats at %s: %v, %v, %v", at, usage, inodes, err)
		}
	}

	before := m.mounted()
	p.kill()
	p = m.start("csi", "--backend", "loop")
	if after := m.mounted(); !slices.Equal(before, after) {
		t.Errorf("mounted were %q, are %q", before, after)
	}
	expectPattern(t, one, 16<<20-4096)
	step(t, "publish again", p.publish(id, s, one, raw, false), codes.OK)
	step(t, "unstage while published", p.unstage(id, s), codes.FailedPrecondition)
	step(t, "delete while published", p.delete(id), codes.FailedPrecondition)
	for range 2 {
		for _, target := range []string{one, two, three} {
			step(t, "unpublish", p.unpublish(id, target), codes.OK)
			expectGone(t, target)
		}
	}
	if left := m.loops(); len(left) != 2 { // one for writing, one for reading
		t.Errorf("a staged volume has the devices %q", left)
	}
	for range 2 {
		step(t, "unstage", p.unstage(id, s), codes.OK)
	}
	m.awaitNoLoops()

	step(t, "stage again", p.stage(id, s, raw), codes.OK)
	step(t, "publish again", p.publish(id, s, one, raw, false), codes.OK)
	expectPattern(t, one, 16<<20-4096)
	step(t, "unpublish", p.unpublish(id, one), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
	step(t, "delete", p.delete(id), codes.OK)
	if left := m.volumeFiles(); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}

func TestRawVolumeForReading(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop")
	id, s, target := p.create("a", blockOf(writer)).VolumeId, m.staging("s"), m.target("t")
	step(t, "stage", p.stage(id, s, blockOf(reader)), codes.OK)
	step(t, "publish", p.publish(id, s, target, blockOf(reader), false), codes.OK)
	if err := writeDevice(t, target, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("a write by a reader: %v", err)
	}
	step(t, "second target", p.publish(id, s, m.target("x"), blockOf(reader), true), codes.FailedPrecondition)
	step(t, "unpublish", p.unpublish(id, target), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
}

// A directory, or a file with something in it, is no place for a device, and stays.
func TestRawTargets(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop")
	raw := blockOf(writer)
	id, s, dir, link := p.create("a", raw).VolumeId, m.staging("s"), m.staging("dir"), m.target("link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	step(t, "stage", p.stage(id, s, raw), codes.OK)
	step(t, "publish at a directory", p.publish(id, s, dir, raw, false), codes.InvalidArgument)
	step(t, "publish at a link", p.publish(id, s, link, raw, false), codes.InvalidArgument)
	if _, err := os.Readlink(link); err != nil {
		t.Error(err)
	}
	if st, err := os.Stat(dir); err != nil || !st.IsDir() {
		t.Errorf("the directory: %v", err)
	}
	step(t, "unstage", p.unstage(id, s), codes.OK)
}

// A volume for both uses is used as the one or the other at a time; a raw user's data never become a file system's.
func TestRawOrMounted(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop")
	made, err := p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "a", VolumeCapabilities: []*csi.VolumeCapability{writer, blockOf(writer)},
	})
	if err != nil {
		t.Fatal(err)
	}
	id, s, s2, target := made.Volume.VolumeId, m.staging("s"), m.staging("s2"), m.target("t")
	step(t, "stage raw", p.stage(id, s, blockOf(writer)), codes.OK)
	step(t, "stage mounted beside it", p.stage(id, s2, writer), codes.AlreadyExists)
	step(t, "publish mounted", p.publish(id, s, target, writer, false), codes.FailedPrecondition)
	step(t, "publish", p.publish(id, s, target, blockOf(writer), false), codes.OK)
	if out, err := exec.Command("mkfs.ext4", "-q", target).CombinedOutput(); err != nil { // as a raw user may
		t.Fatalf("%v: %s", err, out)
	}
	step(t, "unpublish", p.unpublish(id, target), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
	step(t, "stage mounted", p.stage(id, s2, writer), codes.OK)
	write(t, s2, "kept")
	step(t, "stage raw beside it", p.stage(id, s, blockOf(writer)), codes.AlreadyExists)
	step(t, "unstage", p.unstage(id, s2), codes.OK)

	step(t, "stage raw", p.stage(id, s, blockOf(writer)), codes.OK)
	step(t, "publish", p.publish(id, s, target, blockOf(writer), false), codes.OK)
	if err := errors.Join(writeDevice(t, target, 0), writeDevice(t, target, 4096)); err != nil {
		t.Error(err)
	}
	step(t, "unpublish", p.unpublish(id, target), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
	step(t, "stage mounted over data", p.stage(id, s2, writer), codes.FailedPrecondition)
	step(t, "stage raw", p.stage(id, s, blockOf(writer)), codes.OK)
	step(t, "publish", p.publish(id, s, target, blockOf(writer), false), codes.OK)
	expectPattern(t, target, 0)
	step(t, "unpublish", p.unpublish(id, target), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
}

// Somebody took the device away from under a publish: the target can still be taken down, and the volume be staged
// again.
func TestRawDeviceTakenAway(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop")
	raw := blockOf(writer)
	id, s, target := p.create("a", raw).VolumeId, m.staging("s"), m.target("t")
	step(t, "stage", p.stage(id, s, raw), codes.OK)
	step(t, "publish", p.publish(id, s, target, raw, false), codes.OK)
	f, err := os.Open(target)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0); err != nil {
		t.Fatal(err)
	}
	f.Close()
	m.awaitNoLoops()
	step(t, "publish again", p.publish(id, s, target, raw, false), codes.FailedPrecondition)
	_, _, err = p.stats(id, target)
	step(t, "stats", err, codes.OK)
	step(t, "unpublish", p.unpublish(id, target), codes.OK)
	expectGone(t, target)
	step(t, "unstage", p.unstage(id, s), codes.OK)
	step(t, "stage", p.stage(id, s, raw), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
}
