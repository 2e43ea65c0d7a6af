package host

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/gofrs/flock"

	"holdfast/hooks"
	"holdfast/host/internal/launch"
	"holdfast/internal/proc"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// Host is one orchestrator's connection to its shim. It is safe for concurrent use.
type Host struct {
	config     Config
	lock       *flock.Flock // of the state directory
	binaries   *launch.Store
	running    atomic.Pointer[digest] // the binary that runs, or is started next
	choice     *choice                // running, on disk; once the supervisor runs, only it changes choice
	shimState  shimState
	closing    context.Context    // ends as Close begins
	swaps      chan *preparedSwap // to the supervisor
	swapping   chan struct{}      // holds one token while a swap is under way
	history    *history
	metrics    callMetrics
	gate       *gate
	workload   *workload
	prepares   prepareCalls
	launches   atomic.Uint64           // how many shims were started
	cancel     context.CancelCauseFunc // ends closing
	supervisor sync.WaitGroup
	background sync.WaitGroup // callbacks and pings, of all shims
	endErr     error          // error of ending the shims; valid once supervisor is done
	closeOnce  sync.Once
	closeErr   error
}

var errClosed = registry.Errorf(registry.ErrUnavailable, "this host is closed")

// Open locks the state directory, starts the shim, and returns when it is active and knows what runs. ctx bounds only
// the call of Open. Close ends the shim.
func Open(ctx context.Context, c Config) (*Host, error) {
	if err := c.complete(); err != nil {
		return nil, err
	}
	h := &Host{
		config: c, gate: newGate(), workload: newWorkload(c.Workload),
		swaps: make(chan *preparedSwap), swapping: make(chan struct{}, 1),
	}
	if err := h.openState(ctx); err != nil {
		return nil, errors.Join(err, h.closeState())
	}
	run, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	h.closing, h.cancel = run, cancel
	first, err := h.startFirst(ctx, run)
	if err != nil {
		cancel(errClosed)
		h.background.Wait()
		return nil, errors.Join(err, h.closeState())
	}
	h.pruneBinaries()
	s := newSupervisor(h, h.gate, first)
	h.supervisor.Go(func() { h.endErr = s.run(run) })
	return h, nil
}

// openState locks the state directory, ends shims of an earlier host, and removes that host's temporary files. It reads
// which shims ran, verifies the configured binary, and sets it as the one to run.
func (h *Host) openState(ctx context.Context) (err error) {
	if h.lock, err = lockFile(h.config.layout().HostLock()); err != nil {
		return err
	}
	if h.binaries, err = launch.OpenStore(h.config.layout().Binaries()); err != nil {
		return err
	}
	if err := launch.EndOrphans(ctx, h.config.layout().Database(), h.config.Logger); err != nil {
		return err
	}
	if err := h.config.removeUnfinished(); err != nil {
		return err
	}
	h.history, h.choice = openHistory(h.config.StateDir), openChoice(h.config.StateDir)
	binary, err := h.storeConfigured(ctx)
	if err != nil {
		return err
	}
	h.running.Store(&binary)
	return nil
}

// closeState unlocks the state directory, once all writes to it have ended. If the disk hangs, closeState waits for it.
func (h *Host) closeState() error {
	if h.history != nil {
		h.history.writer.wait()
		h.choice.writer.wait()
	}
	if h.lock == nil {
		return nil
	}
	return h.lock.Unlock() // explicitly: a process that is being forked keeps the lock by its copy of the descriptor
}

// storeBinary stores the binary at a path (Store.Add). A binary without a path must be stored already.
func (h *Host) storeBinary(ctx context.Context, b Binary) (digest, error) {
	switch {
	case b.Path == "" && b.SHA256 == "":
		return digest{}, registry.Invalid(
			"no shim binary is given: give its path, or the SHA-256 of a stored one")
	case b.Path == "":
		return h.binaries.Stored(ctx, b.SHA256)
	}
	return h.binaries.Add(ctx, b.Path, b.SHA256, "")
}

// pruneBinaries removes the binaries that are not needed any more. It does not wait for a disk that hangs.
func (h *Host) pruneBinaries() {
	if err := h.history.writer.do(h.binaries.Prune); err != nil {
		h.config.Logger.Warn("cannot remove binaries that are not needed any more", "error", err)
	}
}

// storeConfigured is storeBinary for the configured binary, which has a path. If its file is gone, the stored copy of
// the last one is used. A replaced binary without a digest is trusted as at first use, and logged.
func (h *Host) storeConfigured(ctx context.Context) (digest, error) {
	b := h.config.Shim
	known := "" // SHA-256 of the last binary at this path
	if h.choice.Path == b.Path {
		known = h.choice.Configured
	}
	d, err := h.binaries.Add(ctx, b.Path, b.SHA256, known)
	switch {
	case err != nil:
	case d.SourceGone:
		h.config.Logger.Warn("the shim's binary is gone; its verified copy is used: install the binary again", "path",
			b.Path)
	case d.FirstUse && known != "" && known != d.SHA256:
		h.config.Logger.Warn("the shim's binary was replaced, and no digest was given for it; the new one is trusted",
			"path", b.Path, "was", known, "is", d.SHA256)
	}
	return d, err
}

// lockFile makes this process the only host of a state directory, until the lock is released. The file names the
// process.
func lockFile(path string) (*flock.Flock, error) {
	lock := flock.New(path, flock.SetFlag(os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW), flock.SetPermissions(0o600))
	locked, err := lock.TryLock()
	if err != nil {
		return nil, fmt.Errorf("lock the state directory: %w", err)
	}
	if !locked {
		holder, _ := os.ReadFile(path)
		return nil, errors.Join(
			registry.Errorf(registry.ErrConflict, "another host (process %s) uses this state directory: %s is locked; "+
				"end it, or choose another state directory", holder, path),
			lock.Close(),
		)
	}
	_ = os.WriteFile(path, []byte(strconv.Itoa(os.Getpid())), 0o600) // for people and LockHolder
	return lock, nil
}

// LockHolder returns the process that is the host of the state directory, if there is one. It does not try the lock, as
// taking it even for a moment could keep a host from starting.
func LockHolder(stateDir string) (pid string, held bool) {
	path := hooks.Layout{State: stateDir}.HostLock()
	text, err := os.ReadFile(path)
	if err != nil {
		return "", false
	}
	pid = strings.TrimSpace(string(text))
	n, err := strconv.Atoi(pid)
	if err != nil || !proc.Opens(n, path) {
		return "", false
	}
	return pid, true
}

// Close ends the shim and unlocks the state directory. Tasks, mounts and records outlive a host. Calls under way end
// with ErrUnavailable. An error means that something may be left, such as a process that does not exit. Close may be
// called again.
func (h *Host) Close() error {
	h.closeOnce.Do(func() {
		h.gate.shut(errClosed)
		h.cancel(errClosed)
		h.swapping <- struct{}{} // for good: the swap under way has ended, and no other follows
		h.supervisor.Wait()
		h.background.Wait()
		h.closeErr = errors.Join(h.endErr, h.closeState())
	})
	return h.closeErr
}

// mutating returns the call data of a mutating request, with an operation ID of its own.
func mutating() *pb.Call {
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	return &pb.Call{OperationId: hex.EncodeToString(id[:])}
}
