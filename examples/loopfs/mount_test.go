package main

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/mount"
)

func TestResolvePath(t *testing.T) {
	for name, path := range map[string]string{
		"empty": "", "relative": "a/b", "parent": "/tmp/../etc", "dot": "/tmp/./a", "doubled": "/tmp//a", "root": "/",
		"NUL": "/tmp/a\x00b", "long": "/" + strings.Repeat("a", unix.PathMax),
	} {
		if p, err := resolvePath(path); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: resolvePath = %q, %v", name, p, err)
		}
	}
	dir := newMachine(t).base
	must(t, errors.Join(os.Mkdir(dir+"/real", 0o700), os.Symlink("real", dir+"/link"),
		os.Symlink("/etc", dir+"/real/leaf")))
	if p, err := resolvePath(dir + "/link/leaf"); p != dir+"/real/leaf" || err != nil { // the links of parents alone
		t.Errorf("resolvePath = %q, %v", p, err)
	}
	if p, err := resolvePath(dir + "/none/leaf"); !errors.Is(err, fs.ErrNotExist) || p != dir+"/none/leaf" {
		t.Errorf("resolvePath without a parent = %q, %v", p, err)
	}
}

func TestBindMount(t *testing.T) {
	need(t, dirBackend)
	dir := newMachine(t).work
	source, target := dir+"/source", dir+"/target"
	must(t, errors.Join(os.Mkdir(source, 0o700), os.WriteFile(source+"/f", []byte("x"), 0o600)))
	flags, err := parseFlags([]string{"ro,nosuid", "noexec,noatime"})
	must(t, errors.Join(err, makeTarget(target, false), bindMount(source, target, false, flags)))
	if text, err := os.ReadFile(target + "/f"); string(text) != "x" || err != nil {
		t.Errorf("through the mount: %q, %v", text, err)
	}
	if err := os.WriteFile(target+"/g", nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("write through a read-only mount: %v", err)
	}
	m, _, err := mount.At(target)
	must(t, err)
	for _, want := range []string{"ro", "nosuid", "noexec", "noatime"} {
		if !slices.Contains(strings.Split(m.Flags, ","), want) {
			t.Errorf("the mount has the flags %q, without %s", m.Flags, want)
		}
	}
	must(t, errors.Join(unix.Unmount(target, 0), removeTarget(target, false), removeTarget(target, false),
		removeTarget(source, false)))
	expectGone(t, target)
	if _, err := os.Stat(source + "/f"); err != nil {
		t.Errorf("a directory with a file: %v", err)
	}
}

// A file is a place for a device node, and only an empty one is ever removed.
func TestBindMountOfAFile(t *testing.T) {
	need(t, dirBackend)
	dir := newMachine(t).work
	source, target := dir+"/source", dir+"/target"
	must(t, os.WriteFile(source, []byte("x"), 0o600))
	must(t, errors.Join(makeTarget(target, true), makeTarget(target, true),
		bindMount(source, target, true, readOnlyFlag)))
	if text, err := os.ReadFile(target); string(text) != "x" || err != nil {
		t.Errorf("through the mount: %q, %v", text, err)
	}
	must(t, errors.Join(unix.Unmount(target, 0), removeTarget(target, true), removeTarget(target, true)))
	expectGone(t, target)
	must(t, os.Symlink(source, dir+"/link"))
	for _, other := range []string{source, dir, dir + "/link"} {
		must(t, removeTarget(other, true))
		if _, err := os.Lstat(other); err != nil {
			t.Errorf("%s as a file: %v", other, err)
		}
	}
	for _, at := range []string{dir, dir + "/link"} {
		if err := bindMount(source, at, true, 0); !errors.Is(err, unix.ENOTDIR) {
			t.Errorf("bind of a file at %s: %v", at, err)
		}
	}
}

func TestMountFlags(t *testing.T) {
	if got := (noAccessTimes | readOnlyFlag).ms(); got != unix.MS_NOATIME|unix.MS_RDONLY {
		t.Errorf("as mount(2) has them, the flags are %x", got)
	}
	for in, want := range map[string]mountFlags{"ro,rw": readOnlyFlag, "rw": 0, "noatime": noAccessTimes,
		"nosuid,nodev,noexec": unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC} {
		if f, err := parseFlags([]string{in}); err != nil || f != want {
			t.Errorf("parseFlags(%q) = %x, %v", in, f, err)
		}
	}
	for _, bad := range []string{"bind", "remount", "journal_path=/etc/passwd", "errors=panic", "password=hunter2"} {
		_, err := parseFlags([]string{"ro", bad})
		if status.Code(err) != codes.InvalidArgument || strings.Contains(err.Error(), bad) {
			t.Errorf("parseFlags(%q): %v", bad, err)
		}
	}
}
