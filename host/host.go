package host

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
	"holdfast/registry"
)

// Host is one orchestrator's connection to its shim. Its methods may be called at the same time.
type Host struct {
	config    Config
	lock      *os.File
	binaries  *launch.Store
	digest    launch.Digest
	gate      *gate
	living    living
	preparing preparing
	launches  atomic.Uint64 // how many shims were started
	cancel    context.CancelCauseFunc
	keeper    sync.WaitGroup // keep
	asked     sync.WaitGroup // answers to what shims ask; a new shim does not wait for those to the old one
	ended     error          // what keep could not end; readable after keeper
	close     sync.Once
	closed    error // what Close returned
}

var errClosed = registry.Errorf(registry.ErrUnavailable, "this host is closed")

// Open takes the state directory, starts the shim and returns when it is active and has been told what lives. ctx bounds that only;
// Close ends the shim.
func Open(ctx context.Context, c Config) (*Host, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	h := &Host{config: c, gate: newGate(), living: newLiving(c.Living)}
	if err := h.take(ctx); err != nil {
		return nil, errors.Join(err, h.drop())
	}
	run, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	h.cancel = cancel
	first, err := h.start(ctx, run)
	if err != nil {
		cancel(errClosed)
		h.asked.Wait()
		return nil, errors.Join(err, h.drop())
	}
	h.gate.open(first)
	h.keeper.Go(func() { h.ended = h.keep(run, first) })
	return h, nil
}

// take locks the state directory and verifies the shim's binary.
func (h *Host) take(ctx context.Context) error {
	var err error
	if h.lock, err = lockState(h.config.layout().HostLock()); err != nil {
		return err
	}
	if h.binaries, err = launch.OpenStore(h.config.layout().Binaries()); err != nil {
		return err
	}
	if h.digest, err = h.binaries.Add(ctx, h.config.Shim.Path, h.config.Shim.SHA256); err != nil {
		return err
	}
	for _, warning := range h.digest.Warnings() {
		h.config.Logger.Warn(warning, "path", h.config.Shim.Path)
	}
	return nil
}

// lockState makes this process the one host of the state directory, until the file is closed.
func lockState(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the state directory: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		holder, _ := os.ReadFile(path)
		_ = f.Close()
		return nil, registry.Errorf(registry.ErrConflict,
			"another host (process %s) uses this state directory: %s is locked; end it, or choose another state directory", holder, path)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	if err := f.Truncate(0); err == nil {
		_, _ = f.WriteAt([]byte(fmt.Sprint(os.Getpid())), 0)
	}
	return f, nil
}

// drop gives back what take took.
func (h *Host) drop() error {
	var errs []error
	if h.binaries != nil {
		errs = append(errs, h.binaries.Close())
	}
	if h.lock != nil { // unlocked first: a process that is just being forked has a copy of the descriptor until it executes
		errs = append(errs, unix.Flock(int(h.lock.Fd()), unix.LOCK_UN), h.lock.Close())
	}
	return errors.Join(errs...)
}

// Close ends the shim and gives the state directory back. What it holds stays: tasks, mounts and records outlive a host. Calls under
// way end with ErrUnavailable. An error means that something may be left, such as a process that does not die. Close may be called again.
func (h *Host) Close() error {
	h.close.Do(func() {
		h.gate.shut(errClosed)
		h.cancel(errClosed)
		h.keeper.Wait()
		h.asked.Wait()
		h.closed = errors.Join(h.ended, h.drop())
	})
	return h.closed
}

// keep has a shim running until ctx ends: one that dies is started again, with a back-off that a minute of good life resets. It returns
// what went wrong with the end of the last one.
func (h *Host) keep(ctx context.Context, sh *shim) error {
	wait := newBackoff()
	for {
		born := time.Now()
		select {
		case <-sh.process.Done():
		case <-ctx.Done():
			return sh.end(ctx)
		}
		h.gate.close(sh.process.Err())
		if err := sh.end(ctx); err != nil {
			h.config.Logger.Warn("a dead shim has left something", "error", err)
		}
		why := withLastWords(sh.process.Err(), sh.process)
		h.gate.close(why)
		h.config.Logger.Error("the shim has died; it is started again", "error", why)
		if time.Since(born) > goodLife {
			wait = newBackoff()
		}
		if sh = h.restart(ctx, wait); sh == nil {
			return nil
		}
		h.gate.open(sh)
	}
}

// restart tries to start a shim until one is active or ctx ends; then it returns nil.
func (h *Host) restart(ctx context.Context, wait *backoff) *shim {
	for {
		if !wait.sleep(ctx) {
			return nil
		}
		sh, err := h.start(ctx, ctx)
		if err == nil {
			return sh
		}
		if ctx.Err() != nil {
			return nil
		}
		h.gate.close(err)
		h.config.Logger.Error("the shim cannot be started", "error", err)
	}
}

const (
	goodLife       = time.Minute
	backoffFirst   = 10 * time.Millisecond
	backoffCeiling = 5 * time.Second
)

// backoff is the waits between starts: the first is none, then it doubles up to a ceiling.
type backoff struct{ next time.Duration }

func newBackoff() *backoff { return &backoff{} }

func (b *backoff) sleep(ctx context.Context) bool {
	wait := b.next
	b.next = min(max(2*wait, backoffFirst), backoffCeiling)
	if wait == 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// newOperation mints an id for a mutating call.
func newOperation() string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	return hex.EncodeToString(id[:])
}
