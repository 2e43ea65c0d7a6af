package mount

import (
	"net"
	"os"
	"path/filepath"
	"testing"
)

// A task is found by its socket, and so are its processes that have /dev/fuse open. Without a listener, Serves reports
// that there may be one.
func TestServesFUSE(t *testing.T) {
	dir, err := os.MkdirTemp("", "m-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	if !Serves(socket) {
		t.Error("a task without a listener serves no FUSE mount for certain")
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if pid, err := listenerOf(socket); err != nil || pid != os.Getpid() {
		t.Fatalf("the listener is %d, %v", pid, err)
	}
	if opensServed(os.Getpid()) {
		t.Skip("another test of this process has /dev/fuse open")
	}
	dev, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Skip(err)
	}
	defer dev.Close()
	if !opensServed(os.Getpid()) || !Serves(socket) {
		t.Error("the open /dev/fuse of the listener is not found")
	}
	if task := newProcessTask(os.Getpid()); !task.hasProcess(os.Getpid()) {
		t.Error("a process is not of its own task")
	}
}

// A process in a cgroup that a task has made below its own cgroup belongs to the task.
func TestTaskHoldsTheCgroupsBelowItsOwn(t *testing.T) {
	for _, c := range []struct {
		own, other string
		want       bool
	}{
		{"0::/a/b\n", "0::/a/b\n", true},
		{"0::/a/b\n", "0::/a/b/c\n", true},
		{"0::/a/b\n", "0::/a/bc\n", false},
		{"0::/a/b\n", "0::/a\n", false},
		{"0::/\n", "0::/\n", true},
		{"0::/\n", "0::/a\n", false},
		{"1:cpu:/a\n0::/b\n", "1:cpu:/a\n0::/b/c\n", true},
	} {
		if got := (processTask{cgroup: c.own}).hasCgroup(c.other); got != c.want {
			t.Errorf("%q holds %q: %v, want %v", c.own, c.other, got, c.want)
		}
	}
}
