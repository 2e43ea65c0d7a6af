package mount

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	mounttable "holdfast/internal/mount"
)

func needMounts(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	err := unix.Mount("none", dir, "tmpfs", 0, "size=64k")
	if err == nil {
		err = unix.Unmount(dir, 0)
	}
	if err != nil && os.Geteuid() == 0 {
		t.Fatalf("root cannot mount: %v", err)
	}
	if err != nil {
		t.Skipf("mounting needs root: %v", err)
	}
}

func TestResolveRefusesWhatIsNoPlace(t *testing.T) {
	for name, path := range map[string]string{
		"empty": "", "relative": "a/b", "parent": "/tmp/../etc", "dot": "/tmp/./a", "doubled": "/tmp//a", "root": "/",
		"NUL": "/tmp/a\x00b", "long": "/" + strings.Repeat("a", maxPath),
	} {
		if p, err := Resolve(path); !errors.Is(err, ErrPath) {
			t.Errorf("%s: Resolve gave %q, %v", name, p, err)
		}
	}
}

func TestResolveFollowsParentsOnly(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		os.Mkdir(filepath.Join(dir, "real"), 0o700),
		os.Symlink("real", filepath.Join(dir, "link")),
		os.Symlink("/etc", filepath.Join(dir, "real", "leaf")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	p, err := Resolve(filepath.Join(dir, "link", "leaf"))
	if want := filepath.Join(dir, "real", "leaf"); err != nil || p.String() != want {
		t.Errorf("Resolve gave %q, %v; want %q", p, err, want)
	}
	p, err = Resolve(filepath.Join(dir, "none", "leaf"))
	if want := filepath.Join(dir, "none", "leaf"); !errors.Is(err, fs.ErrNotExist) || p.String() != want {
		t.Errorf("without a parent Resolve gave %q, %v", p, err)
	}
}

func TestRemoveTakesOnlyEmptyDirectories(t *testing.T) {
	dir := t.TempDir()
	full := filepath.Join(dir, "full")
	if err := os.MkdirAll(filepath.Join(full, "kept"), 0o700); err != nil {
		t.Fatal(err)
	}
	p, err := Resolve(full)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Remove(); !errors.Is(err, unix.ENOTEMPTY) {
		t.Errorf("Remove of a full directory: %v", err)
	}
	if _, err := os.Stat(filepath.Join(full, "kept")); err != nil {
		t.Error(err)
	}
}

func TestBind(t *testing.T) {
	needMounts(t)
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	source, target := filepath.Join(dir, "source"), filepath.Join(dir, "target")
	if err := errors.Join(os.Mkdir(source, 0o700),
		os.WriteFile(filepath.Join(source, "f"), []byte("x"), 0o600)); err != nil {
		t.Fatal(err)
	}
	open, err := os.Open(source)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	p, err := Resolve(target)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Make(); err != nil {
		t.Fatal(err)
	}
	flags, err := ParseFlags([]string{"ro,nosuid", "noatime"})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Bind(open, flags); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) })

	if text, err := os.ReadFile(filepath.Join(target, "f")); string(text) != "x" || err != nil {
		t.Errorf("through the mount: %q, %v", text, err)
	}
	if err := os.WriteFile(filepath.Join(target, "g"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("write through a read-only mount: %v", err)
	}
	table, err := mounttable.Table(0)
	if err != nil {
		t.Fatal(err)
	}
	m, found := table.At(target)
	if !found {
		t.Fatal("the mount table does not show the mount")
	}
	for _, want := range []string{"ro", "nosuid", "noatime"} {
		if !strings.Contains(","+m.Flags+",", ","+want+",") {
			t.Errorf("the mount has options %q, without %s", m.Flags, want)
		}
	}
	if o, err := Origin(table, open); err != nil || !SameOrigin(o, m) {
		t.Errorf("Origin gave %+v, %v; the table says %+v", o, err, m)
	}
	if err := p.Unmount(); err != nil {
		t.Fatal(err)
	}
	if err := p.Remove(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(source, "f")); err != nil {
		t.Errorf("the source lost its content: %v", err)
	}
}

// A file is a place for a device node, and only an empty one is ever removed.
func TestBindFile(t *testing.T) {
	needMounts(t)
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	source, full := filepath.Join(dir, "source"), filepath.Join(dir, "full")
	if err := errors.Join(os.WriteFile(source, []byte("x"), 0o600),
		os.WriteFile(full, []byte("kept"), 0o600)); err != nil {
		t.Fatal(err)
	}
	p, err := Resolve(filepath.Join(dir, "target"))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := p.MakeFile(); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.BindFile(source, Flags{}.ReadOnly()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(p.String(), unix.MNT_DETACH) })
	if text, err := os.ReadFile(p.String()); string(text) != "x" || err != nil {
		t.Errorf("through the mount: %q, %v", text, err)
	}
	if err := p.RemoveFile(); err == nil {
		t.Error("a mounted file was removed")
	}
	if err := p.Unmount(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := p.RemoveFile(); err != nil {
			t.Error(err)
		}
	}
	for _, other := range []string{full, dir} {
		p, err := Resolve(other)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.RemoveFile(); !errors.Is(err, unix.ENOTEMPTY) {
			t.Errorf("RemoveFile of %s: %v", other, err)
		}
	}
	if p, err = Resolve(dir); err != nil {
		t.Fatal(err)
	}
	if err := p.BindFile(source, Flags{}); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("BindFile at a directory: %v", err)
	}
}

func TestMountRefusesSymbolicLink(t *testing.T) {
	needMounts(t)
	dir := t.TempDir()
	victim, link := filepath.Join(dir, "victim"), filepath.Join(dir, "link")
	if err := errors.Join(os.Mkdir(victim, 0o700), os.Symlink(victim, link)); err != nil {
		t.Fatal(err)
	}
	p, err := Resolve(link)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.MountDevice("none", "tmpfs", Flags{}); err == nil {
		_ = unix.Unmount(victim, unix.MNT_DETACH)
		t.Fatal("mounted through a symbolic link")
	}
}

func TestParseFlags(t *testing.T) {
	for _, c := range []struct {
		in     string
		legacy uintptr
		set    uint64
		fs     string
	}{
		{"", 0, 0, ""},
		{"defaults", 0, 0, ""},
		{"ro", unix.MS_RDONLY, unix.MOUNT_ATTR_RDONLY, ""},
		{"ro,rw", 0, 0, ""},
		{"noexec,discard,commit=30", unix.MS_NOEXEC, unix.MOUNT_ATTR_NOEXEC, "discard,commit=30"},
		{"errors=remount-ro", 0, 0, "errors=remount-ro"},
		{"logbsize=64k,noalign", 0, 0, "logbsize=64k,noalign"},
	} {
		f, err := ParseFlags([]string{c.in})
		if err != nil || f.legacy != c.legacy || f.set != c.set || strings.Join(f.fs, ",") != c.fs {
			t.Errorf("%q gave %+v, %v", c.in, f, err)
		}
	}
	for _, bad := range []string{"bind", "remount", "journal_path=/etc/passwd", "journal_dev=8", "errors=panic",
		"logdev=/dev/sda", "commit=1\x00", "password=hunter2"} {
		_, err := ParseFlags([]string{"ro", bad})
		if !errors.Is(err, ErrFlag) {
			t.Errorf("%q was accepted", bad)
		} else if strings.Contains(err.Error(), bad) {
			t.Errorf("the error repeats the flag: %v", err)
		}
	}
}
