package host_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"holdfast/host"
)

// killer kills a number of shims, each at a random moment of its first 150 ms.
type killer struct {
	env   *env
	mu    sync.Mutex
	left  int
	known map[string]bool
	done  chan struct{}
	all   sync.WaitGroup
}

func newKiller(w *env) *killer {
	a := &killer{env: w, known: map[string]bool{}, done: make(chan struct{})}
	a.all.Go(func() {
		for {
			select {
			case <-a.done:
				return
			case <-time.After(time.Millisecond):
				for _, pid := range a.env.shims() {
					a.plan(pid)
				}
			}
		}
	})
	w.t.Cleanup(a.end)
	return a
}

func (a *killer) end() {
	close(a.done)
	a.all.Wait()
}

func (a *killer) plan(child string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.left == 0 || a.known[child] {
		return
	}
	a.known[child] = true
	a.left--
	pid, _ := strconv.Atoi(child)
	time.AfterFunc(rand.N(150*time.Millisecond), func() {
		if slices.Contains(a.env.shims(), child) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	})
}

// kill makes it kill the next n shims.
func (a *killer) kill(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.left = n
}

// The shim is killed at random moments of its start, by Open and after a crash.
func TestShimKilledAtItsStartIsStartedAgain(t *testing.T) {
	t.Parallel()
	const kills = 6
	w := newEnv(t)
	a := newKiller(w)
	a.kill(kills)
	w.open()
	if _, _, err := w.host.Volumes(w.ctx(), host.VolumeQuery{}); err != nil {
		t.Errorf("after Open: %v", err)
	}
	a.kill(kills)
	w.kill()
	w.until("started again", func(s host.ShimState) bool { return s.Serving && s.Failures >= kills-1 })
	if err := w.host.ReleaseAlloc(w.ctx(), "some"); err != nil {
		t.Errorf("after crashes: %v", err)
	}
}

// failing has the shim run a shell command instead at its first starts. The file gets a line for each start.
func (w *env) failing(starts int, command string) (count string) {
	w.t.Helper()
	path, count := filepath.Join(w.dir, "shim"), filepath.Join(w.dir, "starts")
	script := fmt.Sprintf("#!/bin/sh\necho >> %s\nif [ $(wc -l < %s) -le %d ]; then %s; fi\nexec %s \"$@\"\n", count,
		count, starts, command, shimBinary)
	must(w.t, os.WriteFile(path, []byte(script), 0o700))
	w.config.Shim = host.Binary{Path: path}
	return count
}

// After three such starts Open fails, with the shim's last lines.
func TestShimThatEndsAtItsStartIsTriedAFewTimes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ failures, starts int }{{2, 3}, {100, 3}} {
		w := newEnv(t)
		starts := w.failing(c.failures, "echo no memory >&2; exit 3")
		h, err := host.Open(w.ctx(), w.config)
		if err == nil {
			must(t, h.Close())
		}
		if bad := err != nil; bad != (c.failures > c.starts) || bad && !strings.Contains(err.Error(), "no memory") {
			t.Errorf("%d failures: %v", c.failures, err)
		}
		if text, _ := os.ReadFile(starts); len(text) != c.starts {
			t.Errorf("%d failures: %d starts", c.failures, len(text))
		}
	}
}

// A node that boots may be too slow for the first start.
func TestShimThatIsLateAtItsStartIsTriedAgain(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	w.config.StartTimeout = 5 * time.Second // the second start has to keep to it
	starts := w.failing(1, "exec sleep 3600")
	w.open()
	if text, _ := os.ReadFile(starts); len(text) < 2 || len(w.shims()) != 1 {
		t.Errorf("%d starts, and the processes %v", len(text), w.shims())
	}
}

// The error has the cause of the context and the exit of the shim.
func TestOpenEndsWhileItsShimIsKilled(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	w.failing(1<<20, "kill -9 $$")
	enough := errors.New("enough of this")
	ctx, cancel := context.WithCancelCause(w.ctx())
	go func() {
		for strings.Count(w.log.String(), "it is started again") < 5 && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		cancel(enough)
	}()
	h, err := host.Open(ctx, w.config)
	if err == nil {
		must(t, h.Close())
	}
	if !errors.Is(err, enough) || !strings.Contains(err.Error(), "was killed by signal 9") {
		t.Error(err)
	}
}
