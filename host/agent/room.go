package agent

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// leastFree is how many bytes of the state directory's file system have to be free before something new is begun.
const leastFree = 1 << 20

// room is nil if there is room to begin something new. a.writing is held. What runs needs none: it has its reserve, see ledger.reserve.
func (a *Agent) room() error {
	dir := filepath.Join(a.config.StateDir, "agent")
	err := enoughFree(dir)
	if err == nil {
		err = a.ledger.reserve(len(left(a.Allocs(), lastRank)) + 1)
	}
	if errors.Is(err, registry.ErrExhausted) {
		err = registry.Errorf(registry.ErrExhausted, "no room for anything new in %s: %w; free space there: what runs goes on, "+
			"and holdfast job stop and volume delete work", dir, err)
	}
	return err
}

func enoughFree(dir string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("ask for the free space of %s: %w", dir, err)
	}
	free := st.Bavail // not Bfree: a file system may keep blocks from root too
	switch {
	case st.Blocks == 0: // a file system that does not say
		return nil
	case free*uint64(st.Bsize) < leastFree:
		return registry.Errorf(registry.ErrExhausted, "%d KiB are free, and %d are needed", free*uint64(st.Bsize)>>10, leastFree>>10)
	case st.Files > 0 && st.Ffree == 0:
		return registry.Errorf(registry.ErrExhausted, "no inode is free")
	}
	return nil
}

// Shortage is why nothing new is begun at the moment, and what to do; empty: nothing waits for room.
func (a *Agent) Shortage() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.shortage
}

// noteShortage notes what waits for room; nil: nothing does any more. While something waits, reconcile is tried again. a.mu is not held.
func (a *Agent) noteShortage(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	a.mu.Lock()
	before := a.shortage
	a.shortage = text
	if text != "" && !a.retrying {
		a.retrying = true
		time.AfterFunc(a.config.Backoff[1], a.retry)
	}
	a.mu.Unlock()
	switch {
	case text != "" && before == "":
		a.log.Error("the state directory is full; it is tried again", "error", text)
	case text == "" && before != "":
		a.log.Info("the state directory has room again")
	}
}

func (a *Agent) retry() {
	a.mu.Lock()
	a.retrying = false
	a.mu.Unlock()
	a.kick()
}

// untilWritten tries again for as long as there is no room to write down what has happened.
func (a *Agent) untilWritten(ctx context.Context, write func() error) error {
	for wait := newPause(a.config.Backoff); ; {
		err := write()
		if !errors.Is(err, registry.ErrExhausted) || ctx.Err() != nil {
			return err
		}
		wait.sleep(ctx, nil)
	}
}
