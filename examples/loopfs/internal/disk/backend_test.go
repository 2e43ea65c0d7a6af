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
)

// The suite that every backend passes.
func TestBackends(t *testing.T) {
	for _, name := range []string{LoopBackend, DirBackend} {
		t.Run(name, func(t *testing.T) { backendSuite(t, name) })
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
		t.Fatalf("this machine should be able to: %v", err)
	}
	if err != nil {
		t.Skip(err)
	}
}

func dataDir(t *testing.T) string {
	t.Helper()
	data, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func backendSuite(t *testing.T, name string) {
	need(t, name)
	data := dataDir(t)
	s := openStore(t, data)
	b, id, other := Backends(s)[name], IDFor(Volume, "a"), IDFor(Volume, "b")
	at := place(t)

	for range 2 { // making again replaces
		mustMake(t, b, id, 32<<20)
	}
	mustMake(t, b, other, 32<<20)
	mustMount(t, b, id, at, "noatime")
	file := filepath.Join(at.String(), "f")
	mustWrite(t, file, "kept")
	expectShown(t, b, id, at, true)
	expectShown(t, b, other, at, false)
	if m := tableAt(t, at); !strings.Contains(m.Flags, "noatime") {
		t.Errorf("mounted with %q", m.Flags)
	}
	if who, err := b.HeldBy(id); who == "" || err != nil {
		t.Errorf("a mounted volume is held by %q, %v", who, err)
	}
	st, err := b.Stats(id, 32<<20, at.String())
	if used := st.Bytes.Total - st.Bytes.Free; err != nil || st.Bytes.Total > 32<<20 || used < 0 ||
		st.Bytes.Used == 0 || st.Inodes.Used == 0 {
		t.Errorf("stats: %+v, %v", st, err)
	}
	mustUnmount(t, b, id, at)

	mustMount(t, b, id, at, "ro")
	expectFile(t, file, "kept")
	if err := os.WriteFile(file, nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("write to a read-only volume: %v", err)
	}
	mustUnmount(t, b, id, at)

	mustMake(t, b, id, 32<<20)
	mustMount(t, b, id, at)
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("a volume that was made again holds the old file: %v", err)
	}
	mustUnmount(t, b, id, at)

	for range 2 { // removing again is no error
		if err := errors.Join(b.Remove(id), b.Remove(other)); err != nil {
			t.Fatal(err)
		}
	}
	if left := files(t, data); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
	if err := b.Mount(t.Context(), id, at, Mounting{FileSystem: "ext4"}); err == nil {
		t.Error("a removed volume can be mounted")
	}
}

// A copy is complete, independent of its source, and replaces what was there.
func copySuite(t *testing.T, name string) {
	need(t, name)
	data := dataDir(t)
	s := openStore(t, data)
	b, from, to := Backends(s)[name], IDFor(Volume, "from"), IDFor(Snapshot, "to")
	at := place(t)
	file, link := filepath.Join(at.String(), "f"), filepath.Join(at.String(), "d", "link")
	mustMake(t, b, from, 32<<20)
	mustMount(t, b, from, at)
	mustWrite(t, file, "old")
	for _, err := range []error{
		os.Chown(file, 1000, 1001), os.Chmod(file, 0o640), os.Mkdir(filepath.Dir(link), 0o711),
		os.Symlink("../f", link),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	mustUnmount(t, b, from, at)

	for range 2 {
		if err := b.Copy(t.Context(), from, to, 32<<20, false); err != nil {
			t.Fatal(err)
		}
	}
	mustMount(t, b, from, at)
	mustWrite(t, file, "new")
	mustUnmount(t, b, from, at)
	if err := b.Remove(from); err != nil {
		t.Fatal(err)
	}
	mustMount(t, b, to, at)
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
	if err := b.Remove(to); err != nil {
		t.Fatal(err)
	}
	if left := files(t, data); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}

func TestDirRefusesToRemoveThroughAMount(t *testing.T) {
	need(t, DirBackend)
	s := openStore(t, t.TempDir())
	b, id := Backends(s)[DirBackend], IDFor(Volume, "a")
	mustMake(t, b, id, 0)
	inner := filepath.Join(s.Path(), dirName(id), "inner")
	precious := t.TempDir()
	if err := errors.Join(os.Mkdir(inner, 0o700), os.WriteFile(filepath.Join(precious, "f"), nil, 0o600),
		unix.Mount(precious, inner, "", unix.MS_BIND, "")); err != nil {
		t.Fatal(err)
	}
	if err := b.Remove(id); !errors.Is(err, ErrInUse) {
		t.Errorf("removed with a mount inside: %v", err)
	}
	if err := unix.Unmount(inner, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(precious, "f")); err != nil {
		t.Error(err)
	}
}

// A directory says what it is not; its size is a number.
func TestDirIsHonest(t *testing.T) {
	need(t, DirBackend)
	s := openStore(t, dataDir(t))
	b, id, at := Backends(s)[DirBackend], IDFor(Volume, "a"), place(t)
	for _, u := range []Usage{{Access: Raw}, {Access: Either}, {FileSystem: "xfs"}} {
		if err := b.Takes(u); !errors.Is(err, ErrInvalid) {
			t.Errorf("usage %+v: %v", u, err)
		}
	}
	if _, devices := b.(Devices); devices {
		t.Error("a directory has devices")
	}
	mustMake(t, b, id, 1<<20)
	mustMount(t, b, id, at)
	if err := os.WriteFile(filepath.Join(at.String(), "f"), make([]byte, 3<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	st, err := b.Stats(id, 1<<20, at.String())
	if err != nil || st.Bytes.Total != 1<<20 || st.Bytes.Used < 3<<20 || st.Bytes.Free != 0 || st.Inodes.Used != 2 {
		t.Errorf("a volume over its size: %+v, %v", st, err)
	}
	if err := b.Copy(t.Context(), id, IDFor(Snapshot, "s"), 1<<20, true); !errors.Is(err, ErrInUse) {
		t.Errorf("copy of a directory that is written to: %v", err)
	}
	mustUnmount(t, b, id, at)
}

func place(t *testing.T) mount.Place {
	t.Helper()
	p, err := mount.Resolve(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func tableAt(t *testing.T, at mount.Place) mounttable.Mount {
	t.Helper()
	m, found, err := mounttable.At(at.String())
	if err != nil || !found {
		t.Fatalf("nothing is mounted at %s, %v", at, err)
	}
	return m
}

func mustMake(t *testing.T, b Backend, id ID, bytes int64) {
	t.Helper()
	if err := b.Make(t.Context(), id, bytes); err != nil {
		t.Fatal(err)
	}
}

func mustMount(t *testing.T, b Backend, id ID, at mount.Place, words ...string) {
	t.Helper()
	mustMountAs(t, b, id, at, "ext4", words...)
}

func mustMountAs(t *testing.T, b Backend, id ID, at mount.Place, fs string, words ...string) {
	t.Helper()
	flags, err := mount.ParseFlags(words)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Mount(t.Context(), id, at, Mounting{FileSystem: fs, Flags: flags}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(at.String(), unix.MNT_DETACH) }) // after a failure
}

func mustUnmount(t *testing.T, b Backend, id ID, at mount.Place) {
	t.Helper()
	if err := at.Unmount(); err != nil {
		t.Fatal(err)
	}
	awaitFree(t, b, id)
}

func awaitFree(t *testing.T, b Backend, id ID) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		who, err := b.HeldBy(id)
		if err != nil {
			t.Fatal(err)
		}
		if who == "" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s still holds the volume", who)
		}
	}
}

func expectShown(t *testing.T, b Backend, id ID, at mount.Place, want bool) {
	t.Helper()
	table, err := mounttable.Table(0)
	if err != nil {
		t.Fatal(err)
	}
	if shown, err := b.Shows(table, tableAt(t, at), id); shown != want || err != nil {
		t.Errorf("volume %s shown at %s: %v, %v", id, at, shown, err)
	}
}

func mustWrite(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func expectFile(t *testing.T, file, want string) {
	t.Helper()
	if text, err := os.ReadFile(file); string(text) != want || err != nil {
		t.Errorf("%s holds %q, %v; want %q", file, text, err, want)
	}
}
