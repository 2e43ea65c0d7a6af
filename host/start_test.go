package host_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"holdfast/host"
)

// failing makes the shim run a shell command at the beginning of each of its first starts. The command has the number
// of the start in $n. The file count gets a line for each start.
func (w *env) failing(starts int, command string) (count string) {
	count = filepath.Join(w.dir, "starts")
	w.config.Shim = w.wrapped("shim", fmt.Sprintf("echo >> %s\nn=$(wc -l < %s)\nif [ $n -le %d ]; then\n%s\nfi",
		count, count, starts, command))
	return count
}

// The shim is killed at several moments of its start, by Open and after a crash.
func TestShimKilledAtItsStartIsStartedAgain(t *testing.T) {
	t.Parallel()
	const kills = 6
	w := newEnv(t)
	starts := w.failing(kills, "(sleep 0.0$n; kill -9 $$) >/dev/null 2>&1 &")
	w.open()
	if _, _, err := w.host.Volumes(w.ctx(), host.VolumeQuery{}); err != nil {
		t.Errorf("after Open: %v", err)
	}
	must(t, os.Truncate(starts, 0))
	w.kill()
	w.until("started again", func(s host.ShimState) bool { return s.Serving && s.Failures > 1 })
	if err := w.host.ReleaseAlloc(w.ctx(), "some"); err != nil {
		t.Errorf("after crashes: %v", err)
	}
}

// After three starts that fail by themselves, Open fails with the shim's last lines.
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
	w.config.StartTimeout = patience / 8 // one of two later starts has to keep to it
	starts := w.failing(1, "exec sleep 3600")
	w.open()
	if text, _ := os.ReadFile(starts); len(text) < 2 || len(w.shims()) != 1 {
		t.Errorf("%d starts, and the processes %v", len(text), w.shims())
	}
}

// The error of Open has the cause of its context. The log has the exit of the shim.
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
	if !errors.Is(err, enough) || !strings.Contains(w.log.String(), "was killed by signal 9") {
		t.Error(err)
	}
}
