package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	mounttable "holdfast/internal/mount"
)

var pattern = bytes.Repeat([]byte("holdfast"), 512)

func writeDevice(t *testing.T, path string, offset int64) error {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	_, err = f.WriteAt(pattern, offset)
	return errors.Join(err, f.Sync())
}

func expectPattern(t *testing.T, path string, offset int64) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	got := make([]byte, len(pattern))
	if _, err := f.ReadAt(got, offset); err != nil || !bytes.Equal(got, pattern) {
		t.Errorf("%s holds %.16q at %d, %v", path, got, offset, err)
	}
}

// Publishes of a raw volume share one device, read-only ones another that nobody can write to.
func TestRawVolume(t *testing.T) {
	m, p := runLoopfs(t, loopBackend)
	raw, end := blockOf(multi), int64(16<<20-4096)
	id, s, dir := p.create("a", raw).VolumeId, m.staging("s"), m.staging("dir")
	one, two, three := m.target("one"), m.target("two"), m.target("three")

	step(t, "publish before stage", p.publish(id, s, one, raw, false), codes.FailedPrecondition)
	step(t, "stage as a file system", p.stage(id, s, multi), codes.FailedPrecondition)
	for range 2 {
		p.bringUp(id, s, one, raw)
	}
	step(t, "publish elsewhere", p.publish(id, s, two, raw, false), codes.OK)
	step(t, "publish at a directory", p.publish(id, s, dir, raw, false), codes.InvalidArgument)
	a, errA := mounttable.NumberOf(one)
	b, errB := mounttable.NumberOf(two)
	if !a.Block || a != b || errA != nil || errB != nil {
		t.Errorf("devices %+v, %v and %+v, %v; want one block device", a, errA, b, errB)
	}
	must(t, writeDevice(t, one, end))
	expectPattern(t, two, end)
	step(t, "publish read-only", p.publish(id, s, three, raw, true), codes.OK)
	step(t, "publish read-only there", p.publish(id, s, two, raw, true), codes.AlreadyExists)
	expectPattern(t, three, end)
	if err := writeDevice(t, three, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("write to a read-only publish: %v", err)
	}
	for _, at := range []string{one, three, s} {
		if usage, inodes, err := p.stats(id, at); err != nil || usage.GetTotal() != 16<<20 || inodes != nil {
			t.Errorf("stats at %s: %v, %v, %v", at, usage, inodes, err)
		}
	}

	p.kill()
	p = m.start("csi", "--backend", "loop")
	expectPattern(t, one, end)
	p.bringUp(id, s, one, raw)
	step(t, "unstage while published", p.unstage(id, s), codes.FailedPrecondition)
	step(t, "delete while published", p.delete(id), codes.FailedPrecondition)
	for range 2 {
		for _, target := range []string{one, two, three} {
			step(t, "unpublish", p.unpublish(id, target), codes.OK)
			expectGone(t, target)
		}
	}
	if left := m.loops(); len(left) != 2 {
		t.Errorf("a staged volume has the devices %q", left)
	}
	for range 2 {
		step(t, "unstage", p.unstage(id, s), codes.OK)
	}
	m.awaitNoLoops()

	p.bringUp(id, s, one, blockOf(reader))
	expectPattern(t, one, end)
	if err := writeDevice(t, one, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("write by a reader: %v", err)
	}
	step(t, "second target of a reader", p.publish(id, s, two, blockOf(reader), true), codes.FailedPrecondition)
	p.takeDown(id, s, one)
	step(t, "delete", p.delete(id), codes.OK)
	m.expectNoVolumes()
}

// A device that something has open during an unstage stays with the volume if that is staged again, also after an
// unstage on a full disk, which keeps the old record. Its number must not go to another volume, whose bytes would then
// be at the target of this one.
func TestRawVolumeKeepsItsDevice(t *testing.T) {
	m, p := runLoopfs(t, loopBackend)
	raw := blockOf(multi)
	a, b := p.create("a", raw).VolumeId, p.create("b", raw).VolumeId
	record := filepath.Join(m.data, "volumes", a, "meta.json")
	stageA, stageB, one, two, node := m.staging("a"), m.staging("b"), m.target("one"), m.target("two"), m.target("node")
	for _, full := range []bool{false, true} {
		p.bringUp(a, stageA, one, raw)
		old, err := os.ReadFile(record)
		must(t, err)
		device, err := mounttable.NumberOf(one)
		must(t, err)
		must(t, unix.Mknod(node, unix.S_IFBLK|0o600, int(unix.Mkdev(device.Major, device.Minor))))
		user, err := os.Open(node)
		must(t, err)
		must(t, os.Remove(node))
		p.takeDown(a, stageA, one)
		if full {
			must(t, os.WriteFile(record, old, 0o600))
		}
		step(t, "stage", p.stage(a, stageA, raw), codes.OK)
		must(t, user.Close())
		step(t, "publish", p.publish(a, stageA, one, raw, false), codes.OK)
		p.bringUp(b, stageB, two, raw)
		must(t, writeDevice(t, one, 0))
		expectPattern(t, filepath.Join(m.data, "volumes", a, "image"), 0)
		p.takeDown(a, stageA, one)
		p.takeDown(b, stageB, two)
	}
}
