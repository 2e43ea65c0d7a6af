package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/examples/loopfs/internal/mount"
	mounttable "holdfast/internal/mount"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Every backend passes the same suites.
func TestBackends(t *testing.T) {
	for _, name := range []string{LoopBackend, DirBackend} {
		t.Run(name, func(t *testing.T) { mountSuite(t, name) })
		t.Run(name+" copies", func(t *testing.T) { copySuite(t, name) })
	}
}

func need(t *testing.T, backend string) {
	t.Helper()
	err := MountPossible()
	if err == nil && backend == LoopBackend {
		err = loopReady()
	}
	if err != nil && os.Geteuid() == 0 {
		t.Fatalf("root cannot use the backend: %v", err)
	}
	if err != nil {
		t.Skip(err)
	}
}

func dataDir(t *testing.T) string {
	t.Helper()
	data, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	return data
}

func mountSuite(t *testing.T, name string) {
	need(t, name)
	data := dataDir(t)
	s := testStore(t, data)
	b, id, other := (&Pool{Store: s}).Backend(name), IDFor(Volume, "a"), IDFor(Volume, "b")
	at := place(t)

	for range 2 { // making again replaces
		must(t, b.Make(t.Context(), id, 32<<20))
	}
	must(t, b.Make(t.Context(), other, 32<<20))
	mustMount(t, b, id, at, "ext4", "noatime")
	file := filepath.Join(at, "f")
	mustWrite(t, file, "kept")
	expectShown(t, b, id, at, true)
	expectShown(t, b, other, at, false)
	if m := tableAt(t, at); !strings.Contains(m.Flags, "noatime") {
		t.Errorf("mounted with %q", m.Flags)
	}
	size, inodes, err := b.Stats(Record{ID: id, Bytes: 32 << 20}, at)
	if err != nil || size.Total > 32<<20 || size.Total < size.Available || size.Used == 0 || inodes.Used == 0 {
		t.Errorf("stats: %v, %v, %v", size, inodes, err)
	}
	mustUnmount(t, b, id, at)

	mustMount(t, b, id, at, "ext4", "ro")
	expectFile(t, file, "kept")
	if err := os.WriteFile(file, nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("write to a read-only volume: %v", err)
	}
	mustUnmount(t, b, id, at)

	must(t, b.Make(t.Context(), id, 32<<20))
	mustMount(t, b, id, at, "ext4")
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("a volume that was made again holds the old file: %v", err)
	}
	mustUnmount(t, b, id, at)

	for range 2 { // removing again is no error
		must(t, errors.Join(b.Remove(id), b.Remove(other)))
	}
	if left := files(t, data); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
	if err := b.Mount(t.Context(), sized(b, id), at, MountOptions{FileSystem: "ext4"}); err == nil {
		t.Error("a removed volume can be mounted")
	}
}

// A copy is complete, independent of its source, and replaces what was there.
func copySuite(t *testing.T, name string) {
	need(t, name)
	data := dataDir(t)
	s := testStore(t, data)
	b, from, to := (&Pool{Store: s}).Backend(name), IDFor(Volume, "from"), IDFor(Snapshot, "to")
	at := place(t)
	file, link := filepath.Join(at, "f"), filepath.Join(at, "d", "link")
	must(t, b.Make(t.Context(), from, 32<<20))
	mustMount(t, b, from, at, "ext4")
	mustWrite(t, file, "old")
	must(t, errors.Join(os.Chown(file, 1000, 1001), os.Chmod(file, 0o640), os.Mkdir(filepath.Dir(link), 0o711),
		os.Symlink("../f", link)))
	mustUnmount(t, b, from, at)

	for range 2 {
		must(t, b.Copy(t.Context(), from, to, 32<<20, false))
	}
	mustMount(t, b, from, at, "ext4")
	mustWrite(t, file, "new")
	mustUnmount(t, b, from, at)
	must(t, b.Remove(from))
	mustMount(t, b, to, at, "ext4")
	expectFile(t, file, "old")
	expectFile(t, link, "old")
	var st unix.Stat_t
	if err := unix.Lstat(file, &st); err != nil || st.Uid != 1000 || st.Gid != 1001 || st.Mode&0o777 != 0o640 {
		t.Errorf("the copy's file is of %d:%d, mode %o, %v", st.Uid, st.Gid, st.Mode, err)
	}
	mustUnmount(t, b, to, at)

	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.Copy(cancelled, to, from, 32<<20, false); !errors.Is(err, context.Canceled) {
		t.Errorf("copy for a caller who gave up: %v", err)
	}
	must(t, b.Remove(to))
	if left := files(t, data); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}

func TestDirRefusesToRemoveThroughAMount(t *testing.T) {
	need(t, DirBackend)
	s := testStore(t, t.TempDir())
	b, id := (&Pool{Store: s}).Backend(DirBackend), IDFor(Volume, "a")
	must(t, b.Make(t.Context(), id, 0))
	inner := filepath.Join(s.Path(), dirName(id), "inner")
	precious := t.TempDir()
	must(t, errors.Join(os.Mkdir(inner, 0o700), os.WriteFile(filepath.Join(precious, "f"), nil, 0o600),
		unix.Mount(precious, inner, "", unix.MS_BIND, "")))
	if err := b.Remove(id); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("removed with a mount inside: %v", err)
	}
	must(t, unix.Unmount(inner, 0))
	if _, err := os.Stat(filepath.Join(precious, "f")); err != nil {
		t.Error(err)
	}
}

// The dir backend refuses what it cannot do. It counts sizes and does not enforce them.
func TestLimitsOfTheDirBackend(t *testing.T) {
	need(t, DirBackend)
	s := testStore(t, dataDir(t))
	b, id, at := (&Pool{Store: s}).Backend(DirBackend), IDFor(Volume, "a"), place(t)
	for _, u := range []Usage{{Access: Raw}, {Access: Either}, {FileSystem: "xfs"}} {
		if err := b.Supports(u); status.Code(err) != codes.InvalidArgument {
			t.Errorf("usage %+v: %v", u, err)
		}
	}
	if _, devices := b.(Devices); devices {
		t.Error("a directory has devices")
	}
	must(t, b.Make(t.Context(), id, 1<<20))
	mustMount(t, b, id, at, "ext4")
	must(t, os.WriteFile(filepath.Join(at, "f"), make([]byte, 3<<20), 0o600))
	size, inodes, err := b.Stats(Record{ID: id, Bytes: 1 << 20}, at)
	if err != nil || size.Total != 1<<20 || size.Used < 3<<20 || size.Available != 0 || inodes.Used != 2 {
		t.Errorf("a volume over its size: %v, %v, %v", size, inodes, err)
	}
	if err := b.Copy(t.Context(), id, IDFor(Snapshot, "s"), 1<<20, true); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("copy of a directory that is written to: %v", err)
	}
	mustUnmount(t, b, id, at)
}

func place(t *testing.T) string {
	t.Helper()
	p, err := mount.Resolve(t.TempDir())
	must(t, err)
	return p
}

func tableAt(t *testing.T, at string) mounttable.Mount {
	t.Helper()
	m, found, err := mounttable.At(at)
	if err != nil || !found {
		t.Fatalf("nothing is mounted at %s, %v", at, err)
	}
	return m
}

// sized returns the record of a volume with the size of its image.
func sized(b Backend, id ID) Record {
	r := Record{ID: id}
	if l, ok := b.(loop); ok {
		if st, err := l.root.Stat(imageName(id)); err == nil {
			r.Bytes = st.Size()
		}
	}
	return r
}

func mustMount(t *testing.T, b Backend, id ID, at string, fs string, words ...string) {
	t.Helper()
	flags, err := mount.ParseFlags(words)
	must(t, err)
	must(t, b.Mount(t.Context(), sized(b, id), at, MountOptions{FileSystem: fs, Flags: flags}))
	t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) }) // after a failure
}

// mustUnmount waits until the kernel has freed the volume.
func mustUnmount(t *testing.T, b Backend, id ID, at string) {
	t.Helper()
	must(t, mount.Unmount(at))
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		d, ok := b.(Devices)
		if !ok {
			return
		}
		who, err := d.HeldBy(id)
		must(t, err)
		if who == "" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s still uses the volume", who)
		}
	}
}

func expectShown(t *testing.T, b Backend, id ID, at string, want bool) {
	t.Helper()
	if shown, err := b.Shows(tableAt(t, at), id); shown != want || err != nil {
		t.Errorf("volume %s shown at %s: %v, %v", id, at, shown, err)
	}
}

func mustWrite(t *testing.T, file, text string) {
	t.Helper()
	must(t, os.WriteFile(file, []byte(text), 0o600))
}

func expectFile(t *testing.T, file, want string) {
	t.Helper()
	if text, err := os.ReadFile(file); string(text) != want || err != nil {
		t.Errorf("%s holds %q, %v; want %q", file, text, err, want)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
