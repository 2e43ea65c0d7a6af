package mount

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	mounttable "holdfast/internal/mount"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newDir returns a new directory without links in its path. The test is skipped where it cannot mount.
func newDir(t *testing.T) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	if err = unix.Mount("none", dir, "tmpfs", 0, "size=64k"); err != nil && os.Geteuid() != 0 {
		t.Skipf("mounting needs root: %v", err)
	}
	must(t, err)
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

func placeAt(t *testing.T, elem ...string) Place {
	t.Helper()
	p, err := Resolve(filepath.Join(elem...))
	must(t, err)
	return p
}

func TestResolve(t *testing.T) {
	for name, path := range map[string]string{
		"empty": "", "relative": "a/b", "parent": "/tmp/../etc", "dot": "/tmp/./a", "doubled": "/tmp//a", "root": "/",
		"NUL": "/tmp/a\x00b", "long": "/" + strings.Repeat("a", maxPath),
	} {
		if p, err := Resolve(path); !errors.Is(err, ErrPath) {
			t.Errorf("%s: Resolve = %q, %v", name, p, err)
		}
	}
	dir := newDir(t)
	must(t, errors.Join(os.Mkdir(dir+"/real", 0o700), os.Symlink("real", dir+"/link"),
		os.Symlink("/etc", dir+"/real/leaf")))
	if p := placeAt(t, dir, "link", "leaf"); p.String() != dir+"/real/leaf" { // the links of parents alone
		t.Errorf("Resolve = %q", p)
	}
	if p, err := Resolve(dir + "/none/leaf"); !errors.Is(err, fs.ErrNotExist) || p.String() != dir+"/none/leaf" {
		t.Errorf("Resolve without a parent = %q, %v", p, err)
	}
}

func TestBind(t *testing.T) {
	dir := newDir(t)
	source, target := dir+"/source", dir+"/target"
	must(t, errors.Join(os.Mkdir(source, 0o700), os.WriteFile(source+"/f", []byte("x"), 0o600)))
	open, err := os.Open(source)
	must(t, err)
	defer open.Close()
	p := placeAt(t, target)
	must(t, p.Make())
	flags, err := ParseFlags([]string{"ro,nosuid", "noatime"})
	must(t, err)
	must(t, p.Bind(open, flags))

	if text, err := os.ReadFile(target + "/f"); string(text) != "x" || err != nil {
		t.Errorf("through the mount: %q, %v", text, err)
	}
	if err := os.WriteFile(target+"/g", nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("write through a read-only mount: %v", err)
	}
	table, err := mounttable.Table(0)
	must(t, err)
	m, _ := table.At(target)
	for _, want := range []string{"ro", "nosuid", "noatime"} {
		if !slices.Contains(strings.Split(m.Flags, ","), want) {
			t.Errorf("the mount has the flags %q, without %s", m.Flags, want)
		}
	}
	if o, err := Origin(table, open); err != nil || !SameOrigin(o, m) {
		t.Errorf("Origin = %+v, %v; the table has %+v", o, err, m)
	}
	must(t, errors.Join(p.Unmount(), p.Remove(), p.Remove()))
	must(t, placeAt(t, dir, "none").Remove())
	if err := placeAt(t, source).Remove(); !errors.Is(err, unix.ENOTEMPTY) {
		t.Errorf("Remove of a directory with a file: %v", err)
	}
}

// A file is a place for a device node, and only an empty one is ever removed.
func TestBindFile(t *testing.T) {
	dir := newDir(t)
	source := dir + "/source"
	must(t, os.WriteFile(source, []byte("x"), 0o600))
	p := placeAt(t, dir, "target")
	must(t, errors.Join(p.MakeFile(), p.MakeFile(), p.BindFile(source, Flags{}.ReadOnly())))
	if text, err := os.ReadFile(p.String()); string(text) != "x" || err != nil {
		t.Errorf("through the mount: %q, %v", text, err)
	}
	if err := p.RemoveFile(); err == nil {
		t.Error("a mounted file was removed")
	}
	must(t, errors.Join(p.Unmount(), p.RemoveFile(), p.RemoveFile()))
	for _, other := range []string{source, dir} {
		if err := placeAt(t, other).RemoveFile(); !errors.Is(err, unix.ENOTEMPTY) {
			t.Errorf("RemoveFile of %s: %v", other, err)
		}
	}
	if err := placeAt(t, dir).BindFile(source, Flags{}); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("BindFile at a directory: %v", err)
	}
	must(t, os.Symlink(source, dir+"/link"))
	if err := placeAt(t, dir, "link").BindFile(source, Flags{}); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("BindFile at a link: %v", err)
	}
}

func TestParseFlags(t *testing.T) {
	for _, c := range []struct {
		in   string
		attr uint64
		fs   string
	}{
		{"", 0, ""},
		{"defaults", 0, ""},
		{"ro", unix.MOUNT_ATTR_RDONLY, ""},
		{"ro,nosuid,rw", unix.MOUNT_ATTR_NOSUID, ""},
		{"noexec,discard,commit=30", unix.MOUNT_ATTR_NOEXEC, "discard,commit=30"},
		{"errors=remount-ro", 0, "errors=remount-ro"},
		{"logbsize=64k,noalign", 0, "logbsize=64k,noalign"},
	} {
		f, err := ParseFlags([]string{c.in})
		if err != nil || f.attr != c.attr || strings.Join(f.fs, ",") != c.fs {
			t.Errorf("ParseFlags(%q) = %+v, %v", c.in, f, err)
		}
	}
	for _, bad := range []string{"bind", "remount", "journal_path=/etc/passwd", "journal_dev=8", "errors=panic",
		"logdev=/dev/sda", "commit=1\x00", "password=hunter2"} {
		if _, err := ParseFlags([]string{"ro", bad}); !errors.Is(err, ErrFlag) || strings.Contains(err.Error(), bad) {
			t.Errorf("ParseFlags(%q): %v", bad, err)
		}
	}
}
