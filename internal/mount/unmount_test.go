package mount

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

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
	if err := Unmount(root, "vol"); err != nil {
		t.Error(err)
	}
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
	for link, to := range map[string]string{"dirlink": outside, "link": outside + "/vol", "self": root + "/vol", "vol/link": outside} {
		if err := os.Symlink(to, root+"/"+link); err != nil {
			t.Fatal(err)
		}
	}
	for _, rel := range []string{".", "..", "", "/vol", "../vol", "dirlink/vol", "vol/inner", "vol/link/vol", "vol/../../vol"} {
		if err := Unmount(root, rel); err == nil {
			t.Errorf("Unmount(%q) did it", rel)
		}
	}
	for _, rel := range []string{"link", "self"} { // nothing is mounted at a link
		if err := Unmount(root, rel); err != nil {
			t.Error(err)
		}
	}
	if in, out := raw(t, root), raw(t, outside); len(in) != 2 || len(out) != 1 {
		t.Errorf("the kernel says %q, %q", in, out)
	}
	if err := Unmount(root, "vol/inner"); !errors.Is(err, ErrMounted) {
		t.Errorf("inside a mount: %v", err)
	}
	if err := Unmount(root+"/none", "vol"); !errors.Is(err, unix.ENOENT) {
		t.Errorf("no root: %v", err)
	}
}

// An unmount asks the server of a dead mount nothing, and takes it off.
func TestUnmountOfADeadMount(t *testing.T) {
	root := tempDir(t)
	dies := mountFuse(t, mkdir(t, root, "vol"))
	dies()
	if err := Unmount(root, "vol"); err != nil || len(raw(t, root)) != 0 {
		t.Errorf("%v, %q", err, raw(t, root))
	}
}

// Also where the server hangs.
func TestUnmountOfAHungMount(t *testing.T) {
	root := tempDir(t)
	mountFuse(t, mkdir(t, root, "vol"))
	if err := Unmount(root, "vol"); err != nil || len(raw(t, root)) != 0 {
		t.Errorf("%v, %q", err, raw(t, root))
	}
}
