package host

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/host/internal/launch"
	"holdfast/registry"
)

// Host is one orchestrator's connection to its shim. Its methods may be called at the same time.
type Host struct {
	config    Config
	lock      *os.File
	binaries  *launch.Store
	running   running // which binary
	choice    *choice // the same, for the next host; the keeper's, once it runs
	standing  standing
	closing   context.Context // ends as Close begins
	swaps     chan *ask
	swapping  chan struct{} // holds one token while a swap is under way
	history   *history
	gate      *gate
	living    living
	preparing preparing
	launches  atomic.Uint64 // how many shims were started
	cancel    context.CancelCauseFunc
	keeper    sync.WaitGroup // the keeper's run
	asked     sync.WaitGroup // answers to what shims ask; a new shim does not wait for those to the old one
	ended     error          // what the keeper could not end; readable after it
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
	h := &Host{config: c, gate: newGate(), living: newLiving(c.Workload), swaps: make(chan *ask), swapping: make(chan struct{}, 1)}
	if err := h.take(ctx); err != nil {
		return nil, errors.Join(err, h.drop())
	}
	run, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	h.closing, h.cancel = run, cancel
	first, err := h.first(ctx, run)
	if err != nil {
		cancel(errClosed)
		h.asked.Wait()
		return nil, errors.Join(err, h.drop())
	}
	k := newKeeper(h, h.doors(), first)
	h.keeper.Go(func() { h.ended = k.run(run) })
	return h, nil
}

// first starts the first shim of this host: the binary that is decided for, or the one before, if that one had not proven itself yet.
func (h *Host) first(ctx, run context.Context) (*shim, error) {
	defer func() { h.history.settle(h.running.now().SHA256) }()
	binary, fallback := h.decide(ctx, h.running.now())
	h.choose(binary, fallback)
	sh, err := h.persist(ctx, run)
	switch {
	case err == nil:
		h.chosen(binary, digest{})
		return sh, nil
	case fallback.SHA256 == "" || ctx.Err() != nil || sh != nil:
		return nil, err
	}
	h.config.Logger.Error("the shim that was swapped to last cannot be started; the one before is", "error", err)
	h.chosen(fallback, digest{})
	return h.persist(ctx, run)
}

// startTries is how many starts may fail because the shim exits, crashes, does not answer in time or is cut off. After that
// its binary is taken for broken.
const startTries = 3

// persist starts the shim until it is active, with a back-off between the tries. A shim that was killed from outside
// is started again until ctx ends. After any other registry.ErrUnavailable it is started startTries times in all. Errors of
// other kinds would come again, and are returned at once.
func (h *Host) persist(ctx, run context.Context) (*shim, error) {
	wait, failed := &backoff{}, 0
	for {
		sh, err := h.start(ctx, run)
		if err == nil {
			return sh, nil
		}
		exit, died := errors.AsType[*launch.Exit](err)
		switch {
		case ctx.Err() != nil:
			return sh, gaveUp(ctx, err)
		case sh != nil:
			return sh, err
		case died && exit.Outside():
		case errors.Is(err, registry.ErrUnavailable):
			failed++
		default:
			return nil, err
		}
		if failed == startTries {
			return nil, fmt.Errorf("the shim did not start in %d tries: %w", wait.taken+1, err)
		}
		pause := wait.take()
		h.config.Logger.Error("the shim did not start; it is started again", "in", pause, "failures in a row", wait.taken, "error", err)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, gaveUp(ctx, err)
		}
	}
}

// gaveUp adds to the error of the last start why there is no other one.
func gaveUp(ctx context.Context, last error) error {
	if end := context.Cause(ctx); !errors.Is(last, end) {
		return fmt.Errorf("gave up starting the shim: %w; the last start: %w", end, last)
	}
	return last
}

// take locks the state directory, sees to it that no shim of an earlier host lives, and verifies the shim's binary.
func (h *Host) take(ctx context.Context) error {
	var err error
	if h.lock, err = lockState(h.config.layout().HostLock()); err != nil {
		return err
	}
	if h.binaries, err = launch.OpenStore(h.config.layout().Binaries()); err != nil {
		return err
	}
	if err := h.binaries.EndOrphans(ctx, h.config.layout().Database(), h.config.Logger); err != nil {
		return err
	}
	if err := h.config.removeCopies(); err != nil {
		return err
	}
	h.history, h.choice = openHistory(h.config.StateDir), openChoice(h.config.StateDir)
	h.binaries.Keep(h.choice.kept()...)
	binary, err := h.verify(ctx, h.config.Shim)
	if err != nil {
		return err
	}
	h.running.set(binary)
	return nil
}

// verify copies a binary into the store, if it is the one that it is to be; without a path it is there already.
func (h *Host) verify(ctx context.Context, b Binary) (digest, error) {
	switch {
	case b.Path == "" && b.SHA256 == "":
		return digest{}, registry.Invalid("no shim is named: give the path of a binary, or the SHA-256 of one that is kept")
	case b.Path == "":
		return h.binaries.Stored(ctx, b.SHA256)
	}
	d, err := h.binaries.Add(ctx, b.Path, b.SHA256)
	if err != nil {
		return d, err
	}
	for _, warning := range d.Warnings() {
		h.config.Logger.Warn(warning, "path", b.Path)
	}
	return d, nil
}

// digest is what the store knows a binary by.
type digest = launch.Digest

// running is the binary of the active shim, or of the one to be started next.
type running struct {
	mu sync.Mutex // guards is; held for no longer than a look-up
	is digest
}

func (r *running) set(d digest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.is = d
}

func (r *running) now() digest {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.is
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

// LockHolder returns the process that is the host of the state directory, if there is one. It looks at which process has
// the lock file open, because taking the lock, even for a moment, could keep a host from starting.
func LockHolder(stateDir string) (pid string, held bool) {
	path := hooks.Layout{State: stateDir}.HostLock()
	text, err := os.ReadFile(path)
	if err != nil || len(text) == 0 {
		return "", false
	}
	lock, err := os.Stat(path)
	if err != nil {
		return "", false
	}
	dir := filepath.Join("/proc", string(text), "fd")
	entries, _ := os.ReadDir(dir) // none: the process is gone
	for _, e := range entries {
		if open, err := os.Stat(filepath.Join(dir, e.Name())); err == nil && os.SameFile(open, lock) {
			return string(text), true
		}
	}
	return "", false
}

// drop gives back what take took.
func (h *Host) drop() error {
	var errs []error
	if h.history != nil {
		h.history.pen.rest()
		h.choice.pen.rest()
	}
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
		h.swapping <- struct{}{} // for good: the one that is under way has ended, and there is none after it
		h.keeper.Wait()
		h.asked.Wait()
		h.closed = errors.Join(h.ended, h.drop())
	})
	return h.closed
}

const (
	goodLife       = time.Minute
	backoffFirst   = 10 * time.Millisecond
	backoffCeiling = 5 * time.Second
)

// backoff is the waits between starts: the first is none, then it doubles up to a ceiling.
type backoff struct {
	next  time.Duration
	taken int
}

// take is how long to wait now.
func (b *backoff) take() time.Duration {
	wait := b.next
	b.next = min(max(2*wait, backoffFirst), backoffCeiling)
	b.taken++
	return wait
}

// newOperation mints an id for a mutating call.
func newOperation() string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	return hex.EncodeToString(id[:])
}
