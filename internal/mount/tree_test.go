package mount

import (
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestMkdirAllFollowsNoLink(t *testing.T) {
	root, outside := t.TempDir(), t.TempDir()
	if err := os.Symlink(outside, root+"/link"); err != nil {
		t.Fatal(err)
	}
	for _, rel := range []string{"link/made", "link", "../made", "/made", "a/../../made"} {
		if err := MkdirAll(root, rel); err == nil {
			t.Errorf("MkdirAll(%q) did it", rel)
		}
	}
	if names, _ := os.ReadDir(outside); len(names) > 0 {
		t.Errorf("made outside: %v", names)
	}
	for range 2 {
		if err := MkdirAll(root, "a/b/c"); err != nil {
			t.Fatal(err)
		}
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
	if err := os.Symlink("real", root+"/link"); err != nil {
		t.Fatal(err)
	}
	for rel, want := range map[string]error{
		"full": unix.ENOTEMPTY, "vol": ErrMounted, "vol/inner": ErrMounted, "full/file": unix.ENOTDIR, "link/empty": unix.ENOTDIR, "link": unix.ENOTDIR,
	} {
		if err := Rmdir(root, rel); !errors.Is(err, want) {
			t.Errorf("Rmdir(%q) = %v, want %v", rel, err, want)
		}
	}
	if Rmdir(root, ".") == nil || Rmdir(root, "../x") == nil {
		t.Error("Rmdir left its root")
	}
	for range 2 {
		if err := Rmdir(root, "real/empty"); err != nil {
			t.Error(err)
		}
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
	if err != nil {
		t.Fatal(err)
	}
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
		if err := os.Symlink(outside, link); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := RemoveTree(root); err != nil {
			t.Error(err)
		}
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
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := dir + "/csi.sock"
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	if answers, err := StaleSocket(path); err != nil || !answers || !exists(t, path) {
		t.Errorf("served: %t, %v", answers, err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	for range 2 { // the second time there is none
		if answers, err := StaleSocket(path); err != nil || answers || exists(t, path) {
			t.Errorf("not served: %t, %v", answers, err)
		}
	}
	if answers, err := StaleSocket(dir + "/none/csi.sock"); err != nil || answers {
		t.Errorf("no directory: %t, %v", answers, err)
	}
}

func TestStaleSocketRemovesNothingElse(t *testing.T) {
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	stale := dir + "/stale"
	l, err := net.Listen("unix", stale)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	file, inner := write(t, "kept", dir, "file"), mkdir(t, dir, "inner")
	for link, to := range map[string]string{"link": stale, "dirlink": dir, "broken": "/nowhere"} {
		if err := os.Symlink(to, dir+"/"+link); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{file, inner, dir + "/link", dir + "/broken", dir + "/dirlink/stale"} {
		if answers, err := StaleSocket(path); err == nil || answers {
			t.Errorf("StaleSocket(%s) = %t, %v", path, answers, err)
		}
	}
	for _, path := range []string{stale, file, inner, dir + "/link", dir + "/broken"} {
		if !exists(t, path) {
			t.Errorf("%s was removed", path)
		}
	}
	if _, err := StaleSocket("/" + strings.Repeat("x", MaxSocketPath)); err == nil {
		t.Error("a path that no socket can have was taken")
	}
}

func TestBoot(t *testing.T) {
	id, err := BootID()
	if err != nil || len(id) != 36 {
		t.Errorf("BootID = %q, %v", id, err)
	}
	b, err := os.ReadFile("/proc/uptime")
	if err != nil {
		t.Fatal(err)
	}
	up, err := time.ParseDuration(strings.Fields(string(b))[0] + "s")
	if now := BootTime(); err != nil || now < up-time.Second {
		t.Errorf("BootTime = %v, /proc/uptime said %v before", now, up)
	}
}
