package disk

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/examples/loopfs/internal/mount"
)

// The suite that every backend passes.
func TestBackends(t *testing.T) {
	for _, name := range []string{LoopBackend, DirBackend} {
		t.Run(name, func(t *testing.T) { backendSuite(t, name) })
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

func backendSuite(t *testing.T, name string) {
	need(t, name)
	data, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	s := openStore(t, data)
	b, id, other := Backends(s)[name], IDFor("a"), IDFor("b")
	at := place(t)

	for range 2 { // making again replaces
		if err := b.Make(t.Context(), id, 32<<20); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Make(t.Context(), other, 32<<20); err != nil {
		t.Fatal(err)
	}
	mustMount(t, b, id, at, "noatime")
	file := filepath.Join(at.String(), "f")
	if err := os.WriteFile(file, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	expectShown(t, b, id, at, true)
	expectShown(t, b, other, at, false)
	if e := tableAt(t, at); !strings.Contains(e.Options, "noatime") {
		t.Errorf("mounted with %q", e.Options)
	}
	if who, err := b.HeldBy(id); who == "" || err != nil {
		t.Errorf("a mounted volume is held by %q, %v", who, err)
	}
	mustUnmount(t, b, id, at)

	mustMount(t, b, id, at, "ro")
	if text, err := os.ReadFile(file); string(text) != "kept" || err != nil {
		t.Errorf("mounted again: %q, %v", text, err)
	}
	if err := os.WriteFile(file, nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("write to a read-only volume: %v", err)
	}
	mustUnmount(t, b, id, at)

	if err := b.Make(t.Context(), id, 32<<20); err != nil {
		t.Fatal(err)
	}
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
	if err := b.Mount(id, at, mount.Flags{}); err == nil {
		t.Error("a removed volume can be mounted")
	}
}

// The same image at two places has one loop device, or ext4 would destroy itself.
func TestOneDevicePerImage(t *testing.T) {
	need(t, LoopBackend)
	s := openStore(t, t.TempDir())
	b, id := Backends(s)[LoopBackend], IDFor("a")
	if err := b.Make(t.Context(), id, 32<<20); err != nil {
		t.Fatal(err)
	}
	one, two := place(t), place(t)
	mustMount(t, b, id, one)
	mustMount(t, b, id, two)
	if a, z := tableAt(t, one), tableAt(t, two); a.Minor != z.Minor {
		t.Errorf("two devices: %s and %s", a.Source, z.Source)
	}
	if err := one.Unmount(); err != nil {
		t.Fatal(err)
	}
	mustUnmount(t, b, id, two)
}

func TestLoopSizeIsTheVolumes(t *testing.T) {
	need(t, LoopBackend)
	s := openStore(t, t.TempDir())
	b, id := Backends(s)[LoopBackend], IDFor("a")
	if err := b.Make(t.Context(), id, 32<<20); err != nil {
		t.Fatal(err)
	}
	at := place(t)
	mustMount(t, b, id, at)
	var st unix.Statfs_t
	if err := unix.Statfs(at.String(), &st); err != nil {
		t.Fatal(err)
	}
	if size := int64(st.Blocks) * st.Bsize; size > 32<<20 || size < 24<<20 {
		t.Errorf("the file system has %d bytes", size)
	}
	mustUnmount(t, b, id, at)
}

func TestDirRefusesToRemoveThroughAMount(t *testing.T) {
	need(t, DirBackend)
	s := openStore(t, t.TempDir())
	b, id := Backends(s)[DirBackend], IDFor("a")
	if err := b.Make(t.Context(), id, 0); err != nil {
		t.Fatal(err)
	}
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

func place(t *testing.T) mount.Place {
	t.Helper()
	p, err := mount.Resolve(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func tableAt(t *testing.T, at mount.Place) *mount.Entry {
	t.Helper()
	table, err := mount.ReadTable()
	if err != nil {
		t.Fatal(err)
	}
	e := table.At(at.String())
	if e == nil {
		t.Fatalf("nothing is mounted at %s", at)
	}
	return e
}

func mustMount(t *testing.T, b Backend, id ID, at mount.Place, words ...string) {
	t.Helper()
	flags, err := mount.ParseFlags(words)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Mount(id, at, flags); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(at.String(), unix.MNT_DETACH) }) // after a failure
}

func mustUnmount(t *testing.T, b Backend, id ID, at mount.Place) {
	t.Helper()
	if err := at.Unmount(); err != nil {
		t.Fatal(err)
	}
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
	table, err := mount.ReadTable()
	if err != nil {
		t.Fatal(err)
	}
	if shown, err := b.Shows(table, table.At(at.String()), id); shown != want || err != nil {
		t.Errorf("volume %s shown at %s: %v, %v", id, at, shown, err)
	}
}
