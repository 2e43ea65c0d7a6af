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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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

func TestResolve(t *testing.T) {
	for name, path := range map[string]string{
		"empty": "", "relative": "a/b", "parent": "/tmp/../etc", "dot": "/tmp/./a", "doubled": "/tmp//a", "root": "/",
		"NUL": "/tmp/a\x00b", "long": "/" + strings.Repeat("a", unix.PathMax),
	} {
		if p, err := Resolve(path); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: Resolve = %q, %v", name, p, err)
		}
	}
	dir := newDir(t)
	must(t, errors.Join(os.Mkdir(dir+"/real", 0o700), os.Symlink("real", dir+"/link"),
		os.Symlink("/etc", dir+"/real/leaf")))
	if p, err := Resolve(dir + "/link/leaf"); p != dir+"/real/leaf" || err != nil { // the links of parents alone
		t.Errorf("Resolve = %q, %v", p, err)
	}
	if p, err := Resolve(dir + "/none/leaf"); !errors.Is(err, fs.ErrNotExist) || p != dir+"/none/leaf" {
		t.Errorf("Resolve without a parent = %q, %v", p, err)
	}
}

func TestBind(t *testing.T) {
	dir := newDir(t)
	source, target := dir+"/source", dir+"/target"
	must(t, errors.Join(os.Mkdir(source, 0o700), os.WriteFile(source+"/f", []byte("x"), 0o600)))
	flags, err := ParseFlags([]string{"ro,nosuid", "noatime"})
	must(t, errors.Join(err, Make(target, false), Bind(source, target, flags)))
	if text, err := os.ReadFile(target + "/f"); string(text) != "x" || err != nil {
		t.Errorf("through the mount: %q, %v", text, err)
	}
	if err := os.WriteFile(target+"/g", nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("write through a read-only mount: %v", err)
	}
	m, _, err := mounttable.At(target)
	must(t, err)
	for _, want := range []string{"ro", "nosuid", "noatime"} {
		if !slices.Contains(strings.Split(m.Flags, ","), want) {
			t.Errorf("the mount has the flags %q, without %s", m.Flags, want)
		}
	}
	must(t, errors.Join(Unmount(target), Remove(target, false), Remove(target, false), Remove(dir+"/none", false)))
	if err := Remove(source, false); !errors.Is(err, unix.ENOTEMPTY) {
		t.Errorf("Remove of a directory with a file: %v", err)
	}
}

// A file is a place for a device node, and only an empty one is ever removed.
func TestBindFile(t *testing.T) {
	dir := newDir(t)
	source, target := dir+"/source", dir+"/target"
	must(t, os.WriteFile(source, []byte("x"), 0o600))
	must(t, errors.Join(Make(target, true), Make(target, true), Bind(source, target, Flags{}.ReadOnly())))
	if text, err := os.ReadFile(target); string(text) != "x" || err != nil {
		t.Errorf("through the mount: %q, %v", text, err)
	}
	if err := Remove(target, true); err == nil {
		t.Error("a mounted file was removed")
	}
	must(t, errors.Join(Unmount(target), Remove(target, true), Remove(target, true)))
	must(t, os.Symlink(source, dir+"/link"))
	for _, other := range []string{source, dir} {
		if err := Remove(other, true); !errors.Is(err, unix.ENOTEMPTY) {
			t.Errorf("Remove of %s as a file: %v", other, err)
		}
	}
	for _, at := range []string{dir, dir + "/link"} {
		if err := Bind(source, at, Flags{}); !errors.Is(err, unix.ENOTDIR) {
			t.Errorf("bind of a file at %s: %v", at, err)
		}
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
		{"ro,rw", unix.MOUNT_ATTR_RDONLY, ""},
		{"nosuid,noatime", unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NOATIME, ""},
		{"noexec,discard,commit=30", unix.MOUNT_ATTR_NOEXEC, "discard,commit=30"},
		{"errors=remount-ro", 0, "errors=remount-ro"},
	} {
		f, err := ParseFlags([]string{c.in})
		if err != nil || f.attributes().Attr_set != c.attr || strings.Join(f.fs, ",") != c.fs {
			t.Errorf("ParseFlags(%q) = %+v, %v", c.in, f, err)
		}
	}
	for _, bad := range []string{"bind", "remount", "journal_path=/etc/passwd", "journal_dev=8", "errors=panic",
		"logdev=/dev/sda", "commit=1\x00", "password=hunter2"} {
		_, err := ParseFlags([]string{"ro", bad})
		if status.Code(err) != codes.InvalidArgument || strings.Contains(err.Error(), bad) {
			t.Errorf("ParseFlags(%q): %v", bad, err)
		}
	}
}
