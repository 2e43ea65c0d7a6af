package mount

import (
	"net"
	"os"
	"path/filepath"
	"testing"
)

// A task is found by its socket, and with it the processes that have /dev/fuse open. Without a listener nothing is known.
func TestServesFUSE(t *testing.T) {
	dir, err := os.MkdirTemp("", "m-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	if !ServesFUSE(socket) {
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
	if opensFUSE(os.Getpid()) {
		t.Skip("another test of this process has /dev/fuse open")
	}
	dev, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Skip(err)
	}
	defer dev.Close()
	if !opensFUSE(os.Getpid()) || !ServesFUSE(socket) {
		t.Error("the open /dev/fuse of the listener is not found")
	}
	if task := newTaskOf(os.Getpid()); !task.has(os.Getpid()) {
		t.Error("a process is not of its own task")
	}
}
