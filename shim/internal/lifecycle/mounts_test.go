package lifecycle

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/proc"
	"holdfast/registry"
)

// fuse mounts a file system whose server never answers, so a call to it hangs. After dies was called, calls return
// ENOTCONN.
func fuse(t *testing.T, at string) (dies func()) {
	t.Helper()
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("there is no FUSE for this user: %v", err)
	}
	must(t, os.MkdirAll(at, 0o700))
	must(t, unix.Mount("test", at, "fuse.test", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", dev)))
	dies = sync.OnceFunc(func() { _ = unix.Close(dev) })
	t.Cleanup(dies)
	return dies
}

// A mount whose server dies or hangs is reported with its alloc, and blocks neither calls nor the release.
func TestDeadAndHungMountsAreReported(t *testing.T) {
	for what, c := range map[string]struct {
		dies bool
		says string
	}{"it dies": {true, "ENOTCONN"}, "it hangs": {false, "hangs"}} {
		t.Run(what, func(t *testing.T) {
			l := shared(t)
			boot, err := proc.BootID()
			must(t, err)
			records, at := inUse(l, boot)
			writeState(t, l.Database(), records...)
			dies := fuse(t, at.Host)
			if c.dies {
				dies()
			}
			p := newProcess(t)
			p.activate(l)
			must(t, p.starting("other"))
			lost := p.waitFor(registry.EventMountLost)
			if lost.Alloc != "a1" || lost.Volume.ID != "data" || !strings.Contains(lost.Detail, c.says) {
				t.Errorf("the event is %s", lost)
			}
			if mounted(t, l)[at.Host] != 1 {
				t.Error("it was unmounted")
			}
			mustRelease(t, p) // while the server still hangs
			dies()
		})
	}
}

// waitFor waits for an event of a kind.
func (p *process) waitFor(kind registry.EventKind) (found registry.Event) {
	p.t.Helper()
	for end := time.Now().Add(time.Minute); time.Now().Before(end) &&
		found.Seq == 0; time.Sleep(20 * time.Millisecond) {
		must(p.t, p.active.store.View(p.t.Context(), func(v registry.View) error {
			events, _ := v.Events(0, 1000)
			for _, e := range events {
				if e.Kind == kind {
					found = e
				}
			}
			return nil
		}))
	}
	if found.Seq == 0 {
		p.t.Fatalf("there is no event %q", kind)
	}
	return found
}
