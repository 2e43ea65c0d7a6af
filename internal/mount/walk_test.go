package mount

import (
	"errors"
	"holdfast/hooks"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMkdirAllFollowsNoLink(t *testing.T) {
	root, outside := t.TempDir(), t.TempDir()
	must(t, os.Symlink(outside, root+"/link"))
	for _, rel := range []string{"link/made", "link", "../made", "/made", "a/../../made"} {
		if err := MkdirAll(root, rel); err == nil {
			t.Errorf("MkdirAll(%q) did it", rel)
		}
	}
	if names, _ := os.ReadDir(outside); len(names) > 0 {
		t.Errorf("made outside: %v", names)
	}
	for range 2 {
		must(t, MkdirAll(root, "a/b/c"))
	}
	info, err := os.Stat(root + "/a/b")
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("made %v, %v", info, err)
	}
}

func TestMkdirAllMakesNothingInAVolume(t *testing.T) {
	root := tempDir(t)
	volume := mkdir(t, root, "a", "vol")
	mountTmpfs(t, volume)
	for _, rel := range []string{"a/vol/x", "a/vol"} {
		if err := MkdirAll(root, rel); !errors.Is(err, ErrMounted) {
			t.Errorf("MkdirAll(%q): %v", rel, err)
		}
	}
	if names, _ := os.ReadDir(volume); len(names) > 0 {
		t.Errorf("made in the volume: %v", names)
	}
}

func TestRmdirRemovesOnlyAnEmptyDirectory(t *testing.T) {
	root := tempDir(t)
	write(t, "kept", mkdir(t, root, "full"), "file")
	mountTmpfs(t, mkdir(t, root, "vol"))
	mkdir(t, root, "vol", "inner")
	mkdir(t, root, "real", "empty")
	must(t, os.Symlink("real", root+"/link"))
	for rel, want := range map[string]error{
		"full": unix.ENOTEMPTY, "vol": ErrMounted, "vol/inner": ErrMounted, "full/file": unix.ENOTDIR,
		"link/empty": unix.ENOTDIR, "link": unix.ENOTDIR,
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
	if exists(t, root+"/real/empty") || !exists(t, root+"/full/file") || !exists(t, root+"/vol/inner") {
		t.Error("it removed the wrong thing")
	}
}

func TestRemoveTreeRemovesNothingNextToAVolume(t *testing.T) {
	dir := tempDir(t)
	root := mkdir(t, dir, "root")
	write(t, "kept", mkdir(t, root, "a"), "file")
	volume := mkdir(t, root, "z", "vol")
	mountTmpfs(t, volume)
	write(t, "kept", volume, "data")
	if err := RemoveTree(root); !errors.Is(err, ErrMounted) {
		t.Errorf("got %v", err)
	}
	if !exists(t, root+"/a/file") || !exists(t, volume+"/data") {
		t.Error("it removed something")
	}
}

// What is mounted after the table was read is not entered either.
func TestRemoveTreeStopsAtAMountThatAppears(t *testing.T) {
	dir := tempDir(t)
	volume := mkdir(t, dir, "root", "vol")
	mountTmpfs(t, volume)
	write(t, "kept", volume, "data")
	fd, err := openRoot(dir)
	must(t, err)
	defer unix.Close(fd)
	if err := removeAt(fd, "root"); !errors.Is(err, ErrMounted) {
		t.Errorf("got %v", err)
	}
	if !exists(t, volume+"/data") {
		t.Error("it removed the volume's data")
	}
}

func TestRemoveTreeFollowsNoLink(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	write(t, "kept", outside, "file")
	root := mkdir(t, dir, "root")
	mkdir(t, root, "a", "b", "c")
	write(t, "gone", root, "a", "b", "file")
	for _, link := range []string{root + "/link", root + "/a/link", dir + "/root-link"} {
		must(t, os.Symlink(outside, link))
	}
	for range 2 {
		must(t, RemoveTree(root))
	}
	if exists(t, root) || !exists(t, outside+"/file") {
		t.Error("it removed the wrong thing")
	}
	if err := RemoveTree(dir + "/root-link"); err != nil || !exists(t, outside+"/file") {
		t.Errorf("a link itself: %v", err)
	}
}

func TestStaleSocket(t *testing.T) {
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	defer os.RemoveAll(dir)
	path := dir + "/csi.sock"
	l, err := net.Listen("unix", path)
	must(t, err)
	if answers, err := RemoveStaleSocket(path); err != nil || !answers || !exists(t, path) {
		t.Errorf("served: %t, %v", answers, err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	for range 2 { // the second time there is none
		if answers, err := RemoveStaleSocket(path); err != nil || answers || exists(t, path) {
			t.Errorf("not served: %t, %v", answers, err)
		}
	}
	if answers, err := RemoveStaleSocket(dir + "/none/csi.sock"); err != nil || answers {
		t.Errorf("no directory: %t, %v", answers, err)
	}
}

func TestStaleSocketRemovesNothingElse(t *testing.T) {
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	defer os.RemoveAll(dir)
	stale := dir + "/stale"
	l, err := net.Listen("unix", stale)
	must(t, err)
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	file, inner := write(t, "kept", dir, "file"), mkdir(t, dir, "inner")
	for link, to := range map[string]string{"link": stale, "dirlink": dir, "broken": "/nowhere"} {
		must(t, os.Symlink(to, dir+"/"+link))
	}
	for _, path := range []string{file, inner, dir + "/link", dir + "/broken", dir + "/dirlink/stale"} {
		if answers, err := RemoveStaleSocket(path); err == nil || answers {
			t.Errorf("RemoveStaleSocket(%s) = %t, %v", path, answers, err)
		}
	}
	for _, path := range []string{stale, file, inner, dir + "/link", dir + "/broken"} {
		if !exists(t, path) {
			t.Errorf("%s was removed", path)
		}
	}
	if _, err := RemoveStaleSocket("/" + strings.Repeat("x", hooks.MaxSocketPath)); err == nil {
		t.Error("a path that no socket can have was taken")
	}
}

// IsPoint agrees with the mount table about every kind of path.
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
		"hidden",
		"hidden/below", "file", "file/not", "bound", "link", "link/inside", ".", "../elsewhere",
	} {
		_, want, err := At(filepath.Join(root, path))
		must(t, err)
		got, err := IsPoint(root, filepath.Join(root, path))
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

// Dirs lists children first, and neither mounts nor what is in them.
func TestDirsEnterNoMount(t *testing.T) {
	root := tempDir(t)
	mkdir(t, root, "a", "b", "c")
	mkdir(t, root, "a", "d")
	write(t, "", root, "a", "file")
	must(t, os.Symlink("a", root+"/link"))
	mountTmpfs(t, mkdir(t, root, "a", "vol"))
	mkdir(t, root, "a", "vol", "inner")
	got, err := Dirs(root)
	slices.SortStableFunc(got, func(a, b DirInfo) int {
		return strings.Count(b.Path, "/") - strings.Count(a.Path,
			"/")
	})
	must(t, err)
	want := map[DirInfo]bool{{root + "/a/b/c", 0}: true, {root + "/a/b", 1}: true, {root + "/a/d", 0}: true,
		{root + "/a", 4}: true}
	for _, d := range got {
		if !want[d] {
			t.Errorf("lists %+v", d)
		}
	}
	if len(got) != len(want) {
		t.Errorf("lists %v", got)
	}
	if got, err := Dirs(root + "/none"); err != nil || len(got) > 0 {
		t.Errorf("of a missing root: %v, %v", got, err)
	}
	open, err := os.Open(root + "/a/d")
	must(t, err)
	must(t, os.Remove(root+"/a/d"))
	if got, _, err := appendDirs(nil, open); err != nil || len(got) > 0 {
		t.Errorf("of a directory that was removed: %v, %v", got, err)
	}
}

func TestUnmountTakesOneOffAtATime(t *testing.T) {
	root := tempDir(t)
	mkdir(t, root, "a", "vol")
	for range 50 {
		mountTmpfs(t, root+"/a/vol")
	}
	for left := 50; left > 0; left-- {
		if err := Unmount(root, "a/vol"); err != nil || len(raw(t, root)) != left-1 {
			t.Fatalf("%d are left of %d: %v", len(raw(t, root)), left, err)
		}
	}
	for _, rel := range []string{"a/vol", "a", "a/none", "none/at/all"} {
		if err := Unmount(root, rel); err != nil {
			t.Errorf("nothing is mounted at %s: %v", rel, err)
		}
	}
}

func TestUnmountLeavesWhatIsUsed(t *testing.T) {
	root := tempDir(t)
	mountTmpfs(t, mkdir(t, root, "vol"))
	h := holdOn(t, false, "cwd:"+root+"/vol")
	if err := Unmount(root, "vol"); !errors.Is(err, ErrBusy) || !errors.Is(err, unix.EBUSY) {
		t.Errorf("got %v", err)
	}
	if points := raw(t, root); len(points) != 1 { // not lazily either
		t.Fatalf("the kernel says %q", points)
	}
	h.end()
	must(t, Unmount(root, "vol"))
	mountTmpfs(t, root+"/vol")
	mountTmpfs(t, mkdir(t, root, "vol", "inner"))
	if err := Unmount(root, "vol"); !errors.Is(err, ErrBusy) {
		t.Errorf("with one inside: %v", err)
	}
}

func TestUnmountGoesNowhereElse(t *testing.T) {
	root, outside := tempDir(t), tempDir(t)
	mountTmpfs(t, mkdir(t, outside, "vol"))
	mountTmpfs(t, mkdir(t, root, "vol"))
	mountTmpfs(t, mkdir(t, root, "vol", "inner"))
	for link, to := range map[string]string{"dirlink": outside, "link": outside + "/vol", "self": root + "/vol",
		"vol/link": outside} {
		must(t, os.Symlink(to, root+"/"+link))
	}
	for _, rel := range []string{".", "..", "", "/vol", "../vol", "dirlink/vol", "vol/inner", "vol/link/vol",
		"vol/../../vol"} {
		if err := Unmount(root, rel); err == nil {
			t.Errorf("Unmount(%q) did it", rel)
		}
	}
	for _, rel := range []string{"link", "self"} { // nothing is mounted at a link
		must(t, Unmount(root, rel))
	}
	if in, out := raw(t, root), raw(t, outside); len(in) != 2 || len(out) != 1 {
		t.Errorf("the kernel says %q, %q", in, out)
	}
	if err := Unmount(root, "vol/inner"); !errors.Is(err, ErrMounted) {
		t.Errorf("inside a mount: %v", err)
	}
}

// An unmount asks no server, whether it is gone or hangs.
func TestUnmountNeedsNoServer(t *testing.T) {
	for _, gone := range []bool{true, false} {
		root := tempDir(t)
		dies := mountFuse(t, mkdir(t, root, "vol"))
		if gone {
			dies()
		}
		if err := Unmount(root, "vol"); err != nil || len(raw(t, root)) != 0 {
			t.Errorf("server gone: %v: %v, %q", gone, err, raw(t, root))
		}
	}
}
