package disk

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/examples/loopfs/internal/mount"
	"holdfast/internal/installed"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// loopVolume returns a loop backend with one volume of that size.
func loopVolume(t *testing.T, size int64) (loop, ID, string) {
	t.Helper()
	need(t, LoopBackend)
	l, id := loop{testStore(t, dataDir(t))}, IDFor(Volume, "a")
	must(t, l.Make(t.Context(), id, size))
	t.Cleanup(func() { _ = l.Detach(id) }) // after a failure
	return l, id, place(t)
}

func imagePath(l loop, id ID) string { return filepath.Join(l.Path(), imageName(id)) }

// blkid returns the file system of an image, by a program that is not under test.
func blkid(t *testing.T, path string) string {
	t.Helper()
	out, err := exec.Command("blkid", "-p", "-o", "value", "-s", "TYPE", path).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && !(ok && exit.ExitCode() == 2) {
		t.Fatalf("blkid: %v", err)
	}
	return string(bytes.TrimSpace(out))
}

// One image has one loop device, or ext4 would destroy itself.
func TestOneDevicePerImage(t *testing.T) {
	b, id, one := loopVolume(t, 32<<20)
	two := place(t)
	mustMount(t, b, id, one, "ext4")
	mustMount(t, b, id, two, "ext4")
	if a, z := tableAt(t, one), tableAt(t, two); a.Minor != z.Minor {
		t.Errorf("two devices: %s and %s", a.Source, z.Source)
	}
	if _, err := b.Attach(Record{ID: id}, false); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("Attach of a mounted volume: %v", err)
	}
	must(t, mount.Unmount(one))
	mustUnmount(t, b, id, two)
}

// The first mount makes a file system. Later mounts keep it, and refuse another type. It may be smaller than its volume
// by some blocks, as that grows.
func TestFileSystemsAreMadeOnceAndStay(t *testing.T) {
	for fs, other := range map[string]string{"ext4": "xfs", "xfs": "ext4"} {
		t.Run(fs, func(t *testing.T) {
			installed.FileSystem(t, fs)
			const size = minXFSBytes + 4096
			b, id, at := loopVolume(t, size)
			if have, err := b.FileSystem(id, ""); have != "" || err != nil || blkid(t, imagePath(b, id)) != "" {
				t.Errorf("a new volume holds %q, %v", have, err)
			}
			mustMount(t, b, id, at, fs)
			if m := tableAt(t, at); m.FSType != fs {
				t.Errorf("mounted is %s, not %s", m.FSType, fs)
			}
			mustWrite(t, filepath.Join(at, "f"), "kept")
			mustUnmount(t, b, id, at)
			if have, err := b.FileSystem(id, ""); have != fs || err != nil || blkid(t, imagePath(b, id)) != fs {
				t.Errorf("the volume holds %q, %v; blkid finds %q", have, err, blkid(t, imagePath(b, id)))
			}
			err := b.Mount(t.Context(), sized(b, id), at, MountOptions{FileSystem: other})
			if status.Code(err) != codes.FailedPrecondition {
				t.Errorf("mount of %s as %s: %v", fs, other, err)
			}
			for _, more := range []int64{0, 4096, 8192, 1<<20 + 4096} {
				must(t, b.Grow(id, size+more))
				mustMount(t, b, id, at, fs)
				expectFile(t, filepath.Join(at, "f"), "kept")
				mustUnmount(t, b, id, at)
			}
		})
	}
}

// No file system is made over data, wherever in the volume they are.
func TestNoFileSystemOverData(t *testing.T) {
	for _, offset := range []int64{0, 5 << 20, 32<<20 - 1} {
		b, id, at := loopVolume(t, 32<<20)
		f, err := os.OpenFile(imagePath(b, id), os.O_RDWR, 0)
		must(t, err)
		_, err = f.WriteAt([]byte{1}, offset)
		must(t, err)
		err = b.Mount(t.Context(), sized(b, id), at, MountOptions{FileSystem: "ext4"})
		if status.Code(err) != codes.FailedPrecondition {
			t.Errorf("mount with a byte at %d: %v", offset, err)
		}
		var one [1]byte
		if _, err := f.ReadAt(one[:], offset); err != nil || one[0] != 1 {
			t.Errorf("the byte at %d is %d, %v", offset, one[0], err)
		}
		f.Close()
	}
	b, id, _ := loopVolume(t, 32<<20) // written zeros are no data
	must(t, os.WriteFile(imagePath(b, id), make([]byte, 32<<20), 0o600))
	if have, err := b.FileSystem(id, ""); have != "" || err != nil {
		t.Errorf("zeros are %q, %v", have, err)
	}
}

// The copy of a sparse image is sparse.
func TestCopyKeepsHoles(t *testing.T) {
	b, id, at := loopVolume(t, 1<<30)
	mustMount(t, b, id, at, "ext4")
	mustUnmount(t, b, id, at)
	copied := IDFor(Volume, "copy")
	must(t, b.Copy(t.Context(), id, copied, 2<<30, false))
	var from, to unix.Stat_t
	must(t, errors.Join(unix.Stat(imagePath(b, id), &from), unix.Stat(imagePath(b, copied), &to)))
	if to.Size != 2<<30 || to.Blocks > from.Blocks*5/4 {
		t.Errorf("the source has %d blocks, the copy of %d bytes %d", from.Blocks, to.Size, to.Blocks)
	}
}
