package e2e

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/internal/csifake"
)

// A closed host's state directory is free at once, though a child that the process is just forking still has every descriptor open.
func TestReopenWhileAChildIsForked(t *testing.T) {
	w := newWorld(t, everything...)
	w.exit(w.plugin("alloc-p", csifake.Monolith))
	lock, err := filepath.EvalSymlinks(filepath.Join(w.config.StateDir, "host.lock"))
	w.must(err)
	fds, err := os.ReadDir("/proc/self/fd")
	w.must(err)
	copied := -1
	for _, fd := range fds {
		if at, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && at == lock {
			n, err := strconv.Atoi(fd.Name())
			w.must(err)
			copied, err = unix.Dup(n)
			w.must(err)
		}
	}
	if copied < 0 {
		t.Fatal("the host has no lock open")
	}
	defer unix.Close(copied)
	w.must(w.host.Close())
	w.open()
}
