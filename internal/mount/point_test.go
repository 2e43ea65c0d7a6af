package mount_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
)

// IsPoint says of every kind of path what the mount table says.
func TestIsPointAgreesWithTheTable(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("mounts need root")
	}
	root := pointRoot(t, 0)
	mountAt := func(path string) {
		t.Helper()
		if err := unix.Mount("point", path, "tmpfs", 0, "size=64k"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	}
	at := func(name string) string { return filepath.Join(root, name) }
	for _, dir := range []string{"plain/dir", "mounted/dir", "stacked", "hidden/below"} {
		if err := os.MkdirAll(at(dir), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"file", "bound"} {
		if err := os.WriteFile(at(file), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	mountAt(at("mounted"))
	if err := os.MkdirAll(at("mounted/inside/on"), 0o700); err != nil {
		t.Fatal(err)
	}
	mountAt(at("mounted/inside/on"))
	mountAt(at("stacked"))
	mountAt(at("stacked"))
	mountAt(at("hidden/below"))
	mountAt(at("hidden"))
	if err := unix.Mount(at("file"), at("bound"), "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(at("bound"), 0) })
	if err := os.Symlink(at("mounted"), at("link")); err != nil {
		t.Fatal(err)
	}
	points := 0
	for _, path := range []string{
		"plain", "plain/dir", "plain/none", "none/at/all", "mounted", "mounted/dir", "mounted/inside", "mounted/inside/on", "stacked", "hidden",
		"hidden/below", "file", "file/not", "bound", "link", "link/inside", ".", "../elsewhere",
	} {
		_, want, err := mount.At(at(path))
		if err != nil {
			t.Fatal(err)
		}
		got, err := mount.IsPoint(root, at(path))
		if got != want || err != nil {
			t.Errorf("%s: %v, %v; the table says %v", path, got, err, want)
		}
		if got {
			points++
		}
	}
	if points != 5 {
		t.Errorf("%d of the paths are mount points", points)
	}
}

// pointRoot is a directory, mounted on itself where nothing propagates to, with so many mounts in it.
func pointRoot(t testing.TB, mounts int) string {
	t.Helper()
	root := filepath.Join(t.TempDir(), "root")
	if err := os.Mkdir(root, 0o700); err != nil {
		t.Fatal(err)
	}
	for i := range mounts {
		path := filepath.Join(root, fmt.Sprint("m", i))
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("point", path, "tmpfs", 0, "size=64k"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(path, 0) })
	}
	return root
}

// How long it takes to tell of one path, beside a thousand mounts: from the kernel, and from the table.
func BenchmarkIsPoint(b *testing.B) {
	if os.Getuid() != 0 {
		b.Skip("mounts need root")
	}
	root := pointRoot(b, 1000)
	for name, look := range map[string]func(string) (bool, error){
		"kernel": func(path string) (bool, error) { return mount.IsPoint(root, path) },
		"table":  func(path string) (bool, error) { _, is, err := mount.At(path); return is, err },
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if is, err := look(filepath.Join(root, "m500")); !is || err != nil {
					b.Fatal(is, err)
				}
			}
		})
	}
}
