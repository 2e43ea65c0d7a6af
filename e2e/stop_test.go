package e2e

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// An alloc is released while its Prepare waits and the shim dies. The Prepare, which is made again at the next shim, does not come after the
// release and bring the alloc back.
func TestReleaseOvertakesAReplayedPrepare(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	w.exit(p)
	for _, id := range []string{"alloc-1", "alloc-2", "alloc-3", "alloc-4"} {
		done := make(chan error, 1)
		group := w.group(id, "vol", "single-node-writer")
		go func() { _, err := w.prepare(group); done <- err }()
		w.until(func(e host.Event) bool { return e.Kind == "claimed" && string(e.Alloc) == id })
		w.killShim()
		w.must(w.release(id))
		if err := <-done; !errors.Is(err, host.ErrConflict) || !strings.Contains(err.Error(), "released") {
			t.Errorf("Prepare of %s ended with %v", id, err)
		}
		list, _, err := w.host.Allocs(w.ctx(), "")
		if w.must(err); len(list) > 0 {
			t.Fatalf("%s is back: %+v", id, list)
		}
	}
	q := w.plugin("alloc-r", csifake.Monolith)
	w.must(w.delete("vol"))
	w.exit(q)
}

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
