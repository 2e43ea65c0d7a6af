package disk

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/examples/loopfs/internal/mount"
	"holdfast/internal/installed"
)

// loopVolume is a backend with one volume of that size in it.
func loopVolume(t *testing.T, size int64) (*loop, ID, mount.Place) {
	t.Helper()
	need(t, LoopBackend)
	l, id := &loop{openStore(t, dataDir(t))}, IDFor(Volume, "a")
	mustMake(t, l, id, size)
	t.Cleanup(func() { _ = l.Detach(id) }) // after a failure
	return l, id, place(t)
}

func imagePath(l *loop, id ID) string { return filepath.Join(l.store.Path(), imageName(id)) }

// blkid is who says what an image holds: not the code under test.
func blkid(t *testing.T, path string) string {
	t.Helper()
	out, err := exec.Command("blkid", "-p", "-o", "value", "-s", "TYPE", path).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); err != nil && !(ok && exit.ExitCode() == 2) {
		t.Fatalf("blkid: %v", err)
	}
	return string(bytes.TrimSpace(out))
}

func statfs(t *testing.T, at mount.Place) int64 {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(at.String(), &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Blocks) * st.Bsize
}

// The same image at two places has one loop device, or ext4 would destroy itself.
func TestOneDevicePerImage(t *testing.T) {
	b, id, one := loopVolume(t, 32<<20)
	two := place(t)
	mustMount(t, b, id, one)
	mustMount(t, b, id, two)
	if a, z := tableAt(t, one), tableAt(t, two); a.Minor != z.Minor {
		t.Errorf("two devices: %s and %s", a.Source, z.Source)
	}
	if _, err := b.Attach(id, false); !errors.Is(err, ErrInUse) {
		t.Errorf("a device of its own for a mounted volume: %v", err)
	}
	if err := one.Unmount(); err != nil {
		t.Fatal(err)
	}
	mustUnmount(t, b, id, two)
}

func TestFileSystemsAreMadeOnceAndStay(t *testing.T) {
	for _, fs := range FileSystems() {
		t.Run(fs, func(t *testing.T) {
			installed.FileSystem(t, fs)
			b, id, at := loopVolume(t, MinXFSBytes)
			if have, err := b.FileSystem(id, ""); have != "" || err != nil || blkid(t, imagePath(b, id)) != "" {
				t.Errorf("a new volume holds %q, %v", have, err)
			}
			mustMountAs(t, b, id, at, fs)
			if m := tableAt(t, at); m.FSType != fs {
				t.Errorf("mounted is %s, not %s", m.FSType, fs)
			}
			if size := statfs(t, at); size > MinXFSBytes || size < MinXFSBytes/2 {
				t.Errorf("%s has %d bytes", fs, size)
			}
			mustWrite(t, filepath.Join(at.String(), "f"), "kept")
			mustUnmount(t, b, id, at)
			if have, err := b.FileSystem(id, ""); have != fs || err != nil || blkid(t, imagePath(b, id)) != fs {
				t.Errorf("the volume holds %q, %v; blkid says %q", have, err, blkid(t, imagePath(b, id)))
			}
			other := FileSystems()[0]
			if other == fs {
				other = FileSystems()[1]
			}
			if err := b.Mount(t.Context(), id, at, Mounting{FileSystem: other}); !errors.Is(err, ErrInUse) {
				t.Errorf("mount of %s as %s: %v", fs, other, err)
			}
			mustMountAs(t, b, id, at, fs)
			expectFile(t, filepath.Join(at.String(), "f"), "kept")
			mustUnmount(t, b, id, at)
		})
	}
}

// Whatever was written to a volume, wherever in it, stays.
func TestNoFileSystemOverData(t *testing.T) {
	for _, offset := range []int64{0, 5 << 20, 32<<20 - 1} {
		b, id, at := loopVolume(t, 32<<20)
		f, err := os.OpenFile(imagePath(b, id), os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt([]byte{1}, offset); err != nil {
			t.Fatal(err)
		}
		f.Close()
		if _, err := b.FileSystem(id, ""); !errors.Is(err, ErrInUse) {
			t.Errorf("a byte at %d: %v", offset, err)
		}
		if err := b.Mount(t.Context(), id, at, Mounting{FileSystem: "ext4"}); !errors.Is(err, ErrInUse) {
			t.Errorf("mount with a byte at %d: %v", offset, err)
		}
		var one [1]byte
		if f, err = os.Open(imagePath(b, id)); err != nil {
			t.Fatal(err)
		}
		if _, err := f.ReadAt(one[:], offset); err != nil || one[0] != 1 {
			t.Errorf("the byte at %d is %d, %v", offset, one[0], err)
		}
		f.Close()
	}
	b, id, _ := loopVolume(t, 32<<20) // written zeros are no data
	if err := os.WriteFile(imagePath(b, id), make([]byte, 32<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if have, err := b.FileSystem(id, ""); have != "" || err != nil {
		t.Errorf("zeros are %q, %v", have, err)
	}
}

func TestTooSmallForXFS(t *testing.T) {
	b, id, at := loopVolume(t, 32<<20)
	if err := b.Mount(t.Context(), id, at, Mounting{FileSystem: "xfs"}); !errors.Is(err, ErrInUse) {
		t.Errorf("xfs in 32 MiB: %v", err)
	}
	mustMount(t, b, id, at)
	mustUnmount(t, b, id, at)
}

// A volume that grew while it was not mounted is mounted with all of its size, and with what it held.
func TestMountTakesAllOfTheSize(t *testing.T) {
	for _, c := range []struct {
		fs   string
		from int64
	}{{"ext4", 32 << 20}, {"xfs", MinXFSBytes}} {
		t.Run(c.fs, func(t *testing.T) {
			installed.FileSystem(t, c.fs)
			b, id, at := loopVolume(t, c.from)
			mustMountAs(t, b, id, at, c.fs)
			before := statfs(t, at)
			mustWrite(t, filepath.Join(at.String(), "f"), "kept")
			mustUnmount(t, b, id, at)
			for range 2 {
				if err := b.Grow(id, 2*c.from); err != nil {
					t.Fatal(err)
				}
			}
			mustMountAs(t, b, id, at, c.fs)
			if after := statfs(t, at); after < before+c.from*3/4 {
				t.Errorf("%s had %d bytes and has %d in %d", c.fs, before, after, 2*c.from)
			}
			expectFile(t, filepath.Join(at.String(), "f"), "kept")
			mustUnmount(t, b, id, at)
			if err := b.Grow(id, c.from); err != nil { // never smaller
				t.Fatal(err)
			}
			if st, err := os.Stat(imagePath(b, id)); err != nil || st.Size() != 2*c.from {
				t.Errorf("the image has %d bytes, %v", st.Size(), err)
			}
		})
	}
}

// A file system that cannot take the last blocks of its volume is mounted all the same, again and again.
func TestOddSizes(t *testing.T) {
	for _, c := range []struct {
		fs   string
		from int64
	}{{"ext4", 33<<20 + 4096}, {"xfs", MinXFSBytes + 4096}} {
		t.Run(c.fs, func(t *testing.T) {
			installed.FileSystem(t, c.fs)
			b, id, at := loopVolume(t, c.from)
			for _, more := range []int64{0, 4096, 8192, 1<<20 + 4096} {
				if err := b.Grow(id, c.from+more); err != nil {
					t.Fatal(err)
				}
				mustMountAs(t, b, id, at, c.fs)
				mustUnmount(t, b, id, at)
			}
		})
	}
}

// Where the kernel enlarges no mounted ext4, Expand says so, and the next mount does it.
func TestExpandInUse(t *testing.T) {
	for _, c := range []struct {
		fs   string
		from int64
	}{{"ext4", 32 << 20}, {"xfs", MinXFSBytes}} {
		t.Run(c.fs, func(t *testing.T) {
			installed.FileSystem(t, c.fs)
			b, id, at := loopVolume(t, c.from)
			mustMountAs(t, b, id, at, c.fs)
			before := statfs(t, at)
			open, err := os.Create(filepath.Join(at.String(), "f"))
			if err != nil {
				t.Fatal(err)
			}
			if err := b.Grow(id, 2*c.from); err != nil {
				t.Fatal(err)
			}
			err = b.Expand(id, false)
			if refused := c.fs == "ext4" && !capable(unix.CAP_SYS_RESOURCE); refused {
				if !errors.Is(err, ErrUnavailable) {
					t.Errorf("without CAP_SYS_RESOURCE: %v", err)
				}
			} else if after := statfs(t, at); err != nil || after < before+c.from*3/4 {
				t.Errorf("%s had %d bytes and has %d, %v", c.fs, before, after, err)
			}
			if size, err := b.Size(id); size != 2*c.from || err != nil {
				t.Errorf("the device has %d bytes, %v", size, err)
			}
			if _, err := open.WriteString("kept"); err != nil {
				t.Error(err)
			}
			open.Close()
			mustUnmount(t, b, id, at)
		})
	}
}

func TestRawDevices(t *testing.T) {
	b, id, _ := loopVolume(t, 32<<20)
	writing, err := b.Attach(id, false)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := b.Attach(id, false); again != writing || err != nil {
		t.Errorf("attached at %s and at %s, %v", writing, again, err)
	}
	if err := os.WriteFile(writing, bytes.Repeat([]byte("x"), 4096), 0); err != nil {
		t.Fatal(err)
	}
	block := make([]byte, 4096)
	reading, err := b.Attach(id, true)
	if err != nil || reading == writing {
		t.Fatalf("for reading: %s, %v", reading, err)
	}
	if err := os.WriteFile(reading, block, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("a write to the device for reading: %v", err)
	}
	f, err := os.Open(reading)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(f, block); err != nil || !bytes.Equal(block, bytes.Repeat([]byte("x"), 4096)) {
		t.Errorf("the device for reading shows %q, %v", block[:8], err)
	}
	f.Close()
	if err := errors.Join(b.Grow(id, 48<<20), b.Expand(id, true)); err != nil {
		t.Fatal(err)
	}
	if size, err := b.Size(id); size != 48<<20 || err != nil {
		t.Errorf("after Expand the device has %d bytes, %v", size, err)
	}
	for range 2 {
		if err := b.Detach(id); err != nil {
			t.Fatal(err)
		}
	}
	awaitFree(t, b, id)
	text, err := os.ReadFile(imagePath(b, id))
	if err != nil || !bytes.HasPrefix(text, bytes.Repeat([]byte("x"), 4096)) {
		t.Errorf("the image begins with %q, %v", text[:8], err)
	}
}

// A freeze lets no write through, survives whoever made it, and ends with Thaw.
func TestFreeze(t *testing.T) {
	for _, fs := range FileSystems() {
		t.Run(fs, func(t *testing.T) {
			installed.FileSystem(t, fs)
			b, id, at := loopVolume(t, MinXFSBytes)
			if err := b.Thaw(id); err != nil {
				t.Errorf("thaw of what is not mounted: %v", err)
			}
			mustMountAs(t, b, id, at, fs)
			if err := b.Freeze(id); err != nil {
				t.Fatal(err)
			}
			wrote := make(chan error, 1)
			go func() { wrote <- os.WriteFile(filepath.Join(at.String(), "f"), []byte("late"), 0o600) }()
			select {
			case err := <-wrote:
				t.Errorf("%s: a write went through a freeze: %v", fs, err)
			case <-time.After(20 * time.Millisecond): // long enough for a write that nothing stops
			}
			if err := b.Freeze(id); err == nil {
				t.Errorf("%s: frozen twice", fs)
			}
			for range 2 {
				if err := b.Thaw(id); err != nil {
					t.Fatal(err)
				}
			}
			if err := <-wrote; err != nil {
				t.Error(err)
			}
			mustUnmount(t, b, id, at)
		})
	}
}

// A copy of a mounted xfs has its UUID, and is mounted beside it.
func TestCopyBesideItsSource(t *testing.T) {
	for _, fs := range FileSystems() {
		t.Run(fs, func(t *testing.T) {
			installed.FileSystem(t, fs)
			b, id, one := loopVolume(t, MinXFSBytes)
			two, copied := place(t), IDFor(Volume, "copy")
			mustMountAs(t, b, id, one, fs)
			mustWrite(t, filepath.Join(one.String(), "f"), "kept")
			if err := b.Freeze(id); err != nil {
				t.Fatal(err)
			}
			err := b.Copy(t.Context(), id, copied, MinXFSBytes, false)
			if err := errors.Join(err, b.Thaw(id)); err != nil {
				t.Fatal(err)
			}
			mustMountAs(t, b, copied, two, fs)
			expectFile(t, filepath.Join(two.String(), "f"), "kept")
			mustUnmount(t, b, copied, two)
			mustUnmount(t, b, id, one)
		})
	}
}

// A sparse image's copy is sparse.
func TestCopyKeepsHoles(t *testing.T) {
	b, id, at := loopVolume(t, 1<<30)
	mustMount(t, b, id, at)
	mustUnmount(t, b, id, at)
	copied := IDFor(Volume, "copy")
	if err := b.Copy(t.Context(), id, copied, 2<<30, false); err != nil {
		t.Fatal(err)
	}
	var from, to unix.Stat_t
	if err := errors.Join(unix.Stat(imagePath(b, id), &from), unix.Stat(imagePath(b, copied), &to)); err != nil {
		t.Fatal(err)
	}
	if to.Size != 2<<30 || to.Blocks > from.Blocks*5/4 {
		t.Errorf("the source has %d blocks, the copy of %d bytes %d", from.Blocks, to.Size, to.Blocks)
	}
}

func TestRootDirectoryIsGivenToAGroup(t *testing.T) {
	b, id, at := loopVolume(t, 32<<20)
	if err := b.Mount(t.Context(), id, at, Mounting{FileSystem: "ext4", Group: "1234"}); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(at.String(), &st); err != nil || st.Gid != 1234 || st.Uid != 0 || st.Mode&0o7777 != 0o2775 {
		t.Errorf("the root directory is of %d:%d, mode %o, %v", st.Uid, st.Gid, st.Mode&0o7777, err)
	}
	mustUnmount(t, b, id, at)
}
