package mount

import (
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMakeSharedIsIdempotent(t *testing.T) {
	dir := tempDir(t)
	write(t, "kept", dir, "file")
	for range 3 {
		must(t, MakeShared(dir))
		if points := raw(t, dir); len(points) != 1 || points[0] != dir {
			t.Fatalf("the kernel says %q", points)
		}
	}
	if m, found, _ := At(dir); !found || !m.Shared() || !exists(t, dir+"/file") {
		t.Errorf("it is %v", m)
	}
	must(t, ProbePropagation(dir))
	if points := raw(t, dir); len(points) != 1 {
		t.Errorf("the probe left %q", points)
	}
	if names, _ := os.ReadDir(dir); len(names) != 1 {
		t.Errorf("the probe left %v", names)
	}
}

// Where the parent is shared, as / is on most machines, a mount below must be made once, not once more beneath.
func TestMakeSharedHasAGroupOfItsOwn(t *testing.T) {
	dir := tempDir(t)
	mountTmpfs(t, dir)
	must(t, unix.Mount("", dir, "", unix.MS_SHARED, ""))
	root := mkdir(t, dir, "root")
	must(t, MakeShared(root))
	mountTmpfs(t, mkdir(t, root, "vol"))
	if points := raw(t, root+"/vol"); len(points) != 1 {
		t.Errorf("the kernel says %q", points)
	}
	must(t, ProbePropagation(root))
}

func TestMakeSharedTakesAMountAsItIs(t *testing.T) {
	dir := tempDir(t)
	mountTmpfs(t, dir)
	must(t, unix.Mount("", dir, "", unix.MS_PRIVATE, ""))
	must(t, MakeShared(dir))
	if points := raw(t, dir); len(points) != 1 {
		t.Errorf("the kernel says %q", points)
	}
	must(t, ProbePropagation(dir))
}

func TestMakeSharedBehindALink(t *testing.T) {
	dir := tempDir(t)
	real := mkdir(t, dir, "real")
	must(t, os.Symlink(real, dir+"/link"))
	for range 2 {
		must(t, MakeShared(dir+"/link"))
	}
	if points := raw(t, dir); len(points) != 1 || points[0] != real {
		t.Errorf("the kernel says %q", points)
	}
}

// The negative control: a private mount does not pass, and the error says what to do.
func TestProbePropagationRefusesAPrivateMount(t *testing.T) {
	dir := tempDir(t)
	mountTmpfs(t, dir)
	must(t, unix.Mount("", dir, "", unix.MS_PRIVATE, ""))
	err := ProbePropagation(dir)
	if !errors.Is(err, ErrNotShared) || !strings.Contains(err.Error(), "mount --make-shared "+dir) {
		t.Errorf("got %v", err)
	}
	if names, _ := os.ReadDir(dir); len(names) != 0 {
		t.Errorf("the probe left %v", names)
	}
}
