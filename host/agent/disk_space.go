package agent

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// minFree is the free space that the state directory must have before anything new is started.
const minFree = 1 << 20

// checkSpace returns an error if there is no space to start anything new. Otherwise it enlarges the ledger's reserve
// for one more alloc. Running allocs need no space beyond the reserve. The caller holds a.writing.
func (a *Agent) checkSpace() error {
	dir := filepath.Join(a.config.StateDir, "agent")
	err := checkFree(dir)
	if err == nil {
		err = a.ledger.reserve(len(unended(a.Allocs(), lastRank)) + 1)
	}
	if errors.Is(err, registry.ErrExhausted) {
		err = registry.Errorf(registry.ErrExhausted, "no space to start anything new in %s: %w; free space there "+
			"(running tasks continue, and holdfast job stop and volume delete work)", dir, err)
	}
	return err
}

func checkFree(dir string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("statfs %s: %w", dir, err)
	}
	free := st.Bavail * uint64(st.Bsize) // not Bfree: a file system may keep blocks from root too
	switch {
	case st.Blocks == 0: // the file system does not report its size
		return nil
	case free < minFree:
		return registry.Errorf(registry.ErrExhausted, "%s free, %s needed", units.BytesSize(float64(free)),
			units.BytesSize(minFree))
	case st.Files > 0 && st.Ffree == 0:
		return registry.Errorf(registry.ErrExhausted, "no free inode")
	}
	return nil
}

// Shortage returns why the agent starts nothing new, and what to do about it. It is empty if nothing waits for space.
func (a *Agent) Shortage() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.shortage
}

// setShortage records why something waits for space; nil means that nothing does. While something waits, Run reconciles
// again after maxPause. The caller does not hold a.mu.
func (a *Agent) setShortage(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	a.mu.Lock()
	before := a.shortage
	a.shortage = text
	if text != "" && !a.retrying {
		a.retrying = true
		time.AfterFunc(maxPause, func() {
			a.mu.Lock()
			a.retrying = false
			a.mu.Unlock()
			a.wakeRun()
		})
	}
	a.mu.Unlock()
	switch {
	case text != "" && before == "":
		a.log.Error("the state directory can take nothing new; retrying", "error", text)
	case text == "" && before != "":
		a.log.Info("the state directory has space again")
	}
}

// retryWhileFull repeats a write while the disk is full and ctx has not ended. It returns the last error.
func (a *Agent) retryWhileFull(ctx context.Context, write func() error) error {
	for b := newBackoff(); ; {
		err := write()
		if !errors.Is(err, registry.ErrExhausted) || ctx.Err() != nil {
			return err
		}
		sleep(ctx, b.NextBackOff(), nil)
	}
}
