package mount

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
)

// volumeTree returns a directory with a volume at "a/vol", which has a directory "inner" and a file "data". The
// directory has links to another directory, outside.
func volumeTree(t *testing.T) (root, outside string) {
	t.Helper()
	root, outside = tempDir(t), t.TempDir()
	write(t, "kept", mkdir(t, root, "full"), "file")
	mkdir(t, root, "real", "empty")
	mountTmpfs(t, mkdir(t, root, "a", "vol"))
	mkdir(t, root, "a", "vol", "inner")
	write(t, "kept", root, "a", "vol", "data")
	write(t, "kept", mkdir(t, outside, "victim"), "file")
	for link, to := range map[string]string{"link": outside, "near": "real", "a/vol/link": outside} {
		must(t, os.Symlink(to, filepath.Join(root, link)))
	}
	return root, outside
}

func TestMkdirAllStaysBelowItsRoot(t *testing.T) {
	root, outside := volumeTree(t)
	for rel, want := range map[string]error{
		"link/made": nil, "link": nil, "../made": nil, "/made": nil, "b/../../made": nil,
		"a/vol/made": ErrMounted, "a/vol": ErrMounted,
	} {
		if err := MkdirAll(root, rel); err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("MkdirAll(%q) = %v, want %v", rel, err, want)
		}
	}
	if exists(t, outside+"/made") || exists(t, root+"/a/vol/made") {
		t.Error("MkdirAll made a directory outside or in the volume")
	}
	for range 2 {
		must(t, MkdirAll(root, "b/c/d"))
	}
	if info, err := os.Stat(root + "/b/c"); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("made %v, %v", info, err)
	}
}

func TestRmdirRemovesOnlyAnEmptyDirectory(t *testing.T) {
	root, outside := volumeTree(t)
	for rel, want := range map[string]error{
		"full": unix.ENOTEMPTY, "a/vol": ErrMounted, "a/vol/inner": ErrMounted, "full/file": unix.ENOTDIR,
		"near/empty": unix.ENOTDIR, "near": unix.ENOTDIR, "link/victim": unix.ENOTDIR,
	} {
		if err := Rmdir(root, rel); !errors.Is(err, want) {
			t.Errorf("Rmdir(%q) = %v, want %v", rel, err, want)
		}
	}
	if Rmdir(root, ".") == nil || Rmdir(root, "../x") == nil {
		t.Error("Rmdir left its root")
	}
	for range 2 {
		must(t, Rmdir(root, "real/empty"))
	}
	if exists(t, root+"/real/empty") || !exists(t, root+"/a/vol/inner") || !exists(t, outside+"/victim") {
		t.Error("Rmdir removed the wrong directory")
	}
}

// RemoveTree removes nothing if a volume is mounted below. It does not enter a volume that is mounted meanwhile, and
// follows no link.
func TestRemoveTreeStaysOutOfVolumes(t *testing.T) {
	root, outside := volumeTree(t)
	t.Chdir(filepath.Dir(root))
	for _, path := range []string{root, filepath.Base(root)} {
		if err := RemoveTree(path); !errors.Is(err, ErrMounted) || !exists(t, root+"/full/file") {
			t.Errorf("RemoveTree of %s with a mount below: %v", path, err)
		}
	}
	fd, err := openRoot(root)
	must(t, err)
	defer unix.Close(fd)
	if err := removeAt(fd, "a"); !errors.Is(err, ErrMounted) || !exists(t, root+"/a/vol/data") {
		t.Errorf("removeAt with a mount below: %v", err)
	}
	must(t, unix.Unmount(root+"/a/vol", 0))
	must(t, RemoveTree(root+"/link"))
	for range 2 {
		must(t, RemoveTree(root))
	}
	if exists(t, root) || !exists(t, outside+"/victim/file") {
		t.Error("RemoveTree left its tree or removed the target of a link")
	}
}

func TestStaleSocketIsRemovedAlone(t *testing.T) {
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	defer os.RemoveAll(dir)
	path := dir + "/csi.sock"
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	must(t, err)
	if served, err := RemoveStaleSocket(path); err != nil || !served || !exists(t, path) {
		t.Errorf("served socket: %t, %v", served, err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	kept := []string{write(t, "kept", dir, "file"), mkdir(t, dir, "inner"), dir + "/link", dir + "/broken"}
	for link, to := range map[string]string{"link": path, "dirlink": dir, "broken": "/nowhere"} {
		must(t, os.Symlink(to, dir+"/"+link))
	}
	long := "/" + strings.Repeat("x", hooks.MaxSocketPath)
	for _, p := range append(kept, dir+"/dirlink/csi.sock", long) {
		if served, err := RemoveStaleSocket(p); err == nil || served {
			t.Errorf("RemoveStaleSocket(%s) = %t, %v", p, served, err)
		}
	}
	if _, err := RemoveStaleSocket(kept[0]); !strings.Contains(fmt.Sprint(err), "remove it") { // it may be a task's
		t.Errorf("a file in the way: %v", err)
	}
	for _, p := range append(kept, path) {
		if !exists(t, p) {
			t.Errorf("%s was removed", p)
		}
	}
	for _, p := range []string{path, path, dir + "/none/csi.sock"} { // the second time the socket is missing
		if served, err := RemoveStaleSocket(p); err != nil || served || exists(t, p) {
			t.Errorf("stale or missing socket %s: %t, %v", p, served, err)
		}
	}
}

// IsPoint agrees with the mount table for every kind of path.
func TestIsPointAgreesWithTheTable(t *testing.T) {
	root := tempDir(t)
	for _, dir := range []string{"plain/dir", "mounted", "stacked", "hidden/below"} {
		mkdir(t, root, dir)
	}
	write(t, "", root, "file")
	write(t, "", root, "bound")
	mountTmpfs(t, root+"/mounted")
	mountTmpfs(t, mkdir(t, root, "mounted/inside/on"))
	for _, at := range []string{"stacked", "stacked", "hidden/below", "hidden"} {
		mountTmpfs(t, root+"/"+at)
	}
	must(t, unix.Mount(root+"/file", root+"/bound", "", unix.MS_BIND, ""))
	must(t, os.Symlink(root+"/mounted", root+"/link"))
	points := 0
	for _, path := range []string{
		"plain", "plain/dir", "plain/none", "none/at/all", "mounted", "mounted/inside", "mounted/inside/on", "stacked",
		"hidden", "hidden/below", "file", "file/not", "bound", "link", "link/inside", ".", "../elsewhere",
	} {
		_, want, err := At(filepath.Join(root, path))
		must(t, err)
		got, err := IsPoint(root, filepath.Join(root, path))
		if got != want || err != nil {
			t.Errorf("IsPoint(%s) = %v, %v; the table says %v", path, got, err, want)
		}
		if got {
			points++
		}
	}
	if points != 5 {
		t.Errorf("%d of the paths are mount points, want 5", points)
	}
}

// Dirs lists children first. It lists neither mounts nor their contents.
func TestDirsEnterNoMount(t *testing.T) {
	root, _ := volumeTree(t)
	list, err := Dirs(root)
	must(t, err)
	got := map[string]int{}
	for _, d := range list {
		got[d.Path] = d.Entries
		if _, late := got[filepath.Dir(d.Path)]; late {
			t.Errorf("%s is listed after its parent", d.Path)
		}
	}
	want := map[string]int{root + "/full": 1, root + "/real": 1, root + "/real/empty": 0, root + "/a": 1}
	if !maps.Equal(got, want) {
		t.Errorf("Dirs = %v, want %v", got, want)
	}
	if list, err := Dirs(root + "/none"); err != nil || len(list) > 0 {
		t.Errorf("Dirs of a missing root: %v, %v", list, err)
	}
	open, err := os.Open(root + "/real/empty")
	must(t, err)
	must(t, os.Remove(root+"/real/empty"))
	if list, _, err := appendDirs(nil, open); err != nil || len(list) > 0 {
		t.Errorf("directories below a removed one: %v, %v", list, err)
	}
}

func TestUnmountGoesNowhereElse(t *testing.T) {
	root, outside := volumeTree(t)
	mountTmpfs(t, root+"/a/vol/inner")
	must(t, os.Symlink(root+"/a/vol", root+"/self"))
	for _, rel := range []string{".", "..", "", "/a/vol", "../x", "link/victim", "a/vol/inner", "a/vol/link/victim",
		"a/../../vol"} {
		if err := Unmount(root, rel); err == nil {
			t.Errorf("Unmount(%q) succeeded", rel)
		}
	}
	for _, rel := range []string{"link", "self", "a", "none", "none/at/all"} { // nothing is mounted there
		must(t, Unmount(root, rel))
	}
	wantErr(t, Unmount(root, "a/vol/inner"), ErrMounted, "")
	if err := Unmount(root, "a/vol"); !errors.Is(err, ErrBusy) || !errors.Is(err, unix.EBUSY) {
		t.Errorf("Unmount of a mount with another inside: %v", err)
	}
	if points := raw(t, root); len(points) != 2 || !exists(t, outside+"/victim/file") {
		t.Errorf("mounted at %q", points)
	}
}

// An unmount does not ask the server, which may be gone or hang.
func TestUnmountNeedsNoServer(t *testing.T) {
	for _, gone := range []bool{true, false} {
		root := tempDir(t)
		dies := mountFuse(t, mkdir(t, root, "vol"))
		if gone {
			dies()
		}
		if err := Unmount(root, "vol"); err != nil || len(raw(t, root)) != 0 {
			t.Errorf("server gone %v: %v; mounted at %q", gone, err, raw(t, root))
		}
	}
}
