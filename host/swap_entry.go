package host

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"holdfast/registry"
)

// Swap replaces the running shim with another binary, while tasks run, calls are under way and watchers listen. It
// returns when the new shim serves. The old one stands by for Config.Bake after that, and takes over again if the new
// one dies. An error says which step failed, and why. The old shim, or a new process of its binary, then serves
// on, unless the error says that no shim is active. One swap runs at a time; another Swap returns ErrConflict.
func (h *Host) Swap(ctx context.Context, b Binary) (SwapReport, error) { return h.SwapAs(ctx, b, "") }

// SwapAs is Swap for an operator, whose name is in the report and in the history.
func (h *Host) SwapAs(ctx context.Context, b Binary, operator string) (SwapReport, error) {
	if h.closing.Err() != nil {
		return SwapReport{}, errClosed
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stopWaiting := context.AfterFunc(h.closing, func() { cancel(errClosed) })
	defer stopWaiting()
	select {
	case h.swapping <- struct{}{}:
		defer func() { <-h.swapping }()
	default:
		return SwapReport{}, registry.Errorf(registry.ErrConflict, "a swap is under way already; wait for its end")
	}
	s := &swap{progress: h.shimState.setSwapStep, report: SwapReport{
		By: operator, Began: time.Now(), Path: b.Path, From: h.running.Load().SHA256, Outcome: SwapRefused,
	}}
	err := h.swapTo(ctx, s, b)
	h.shimState.setSwapStep(s.report, "")
	h.pruneBinaries()
	if s.report.Outcome != SwapBaking { // else the supervisor records how it ends
		h.history.add(s.report)
	}
	return s.report, err
}

// Swaps returns the last swaps, newest first.
func (h *Host) Swaps() []SwapReport { return h.history.list() }

// preparedSwap is a swap whose candidate has rehearsed. The supervisor runs the rest of it.
type preparedSwap struct {
	ctx    context.Context // ends when the host is closed, or the caller has gone
	swap   *swap
	digest digest
	done   chan error
}

// swapTo runs all steps up to resume.
func (h *Host) swapTo(ctx context.Context, s *swap, b Binary) error {
	var binary digest
	err := s.step(SwapVerify, func() (err error) {
		binary, err = h.storeBinary(ctx, b)
		return err
	})
	if err != nil {
		return err
	}
	s.report.To = binary.SHA256
	next, err := h.prepare(ctx, s, binary)
	if err != nil {
		return err
	}
	s.next, s.gate, s.limits = next, h.gate, limitsWithin(h.config.SwapBudget)
	err = h.superviseSwap(&preparedSwap{ctx: ctx, swap: s, digest: binary, done: make(chan error, 1)})
	if err == nil {
		h.serveCallbacks(next)
	}
	return err
}

// superviseSwap has the supervisor run the steps that hold calls. If the supervisor is busy until the context of the
// swap ends, the swap has failed.
func (h *Host) superviseSwap(p *preparedSwap) error {
	select {
	case h.swaps <- p:
		return <-p.done
	case <-p.ctx.Done():
		return p.swap.abandon(p.ctx, SwapQuiesce, context.Cause(p.ctx))
	}
}

// prepare starts the binary beside the active shim and has it rehearse. After an error, the candidate is stopped.
func (h *Host) prepare(ctx context.Context, s *swap, binary digest) (*shim, error) {
	limited, cancel := withLimit(ctx, h.config.PrepareTimeout)
	defer cancel()
	var next *shim
	err := s.step(SwapPrepare, func() (err error) {
		if next, err = h.startCandidate(limited, h.closing, binary); err != nil {
			return err
		}
		s.report.Protocol = next.process.Protocol()
		s.report.Warnings, err = h.rehearse(limited, next)
		return err
	})
	if err != nil && next != nil {
		err = errors.Join(err, next.stop(ctx))
	}
	return next, err
}

const (
	pingLimit = 2 * time.Second // for the active shim to be there and to answer
	copyShare = 2               // 1/copyShare of Config.PrepareTimeout is for the copy
)

// errNoCopy means that the active shim writes no copy of the state, so a candidate cannot rehearse. The swap continues
// without a rehearsal: its purpose may be to replace such a shim.
var errNoCopy = errors.New(
	"the running shim gives no copy of the state, so the new one takes over without a rehearsal",
)

// rehearse has a candidate take over a copy of the active shim's state. The active shim must be able to read the
// result. The warnings are for people.
func (h *Host) rehearse(ctx context.Context, candidate *shim) (warnings []string, err error) {
	const files = rehearsalFile + "*"
	if err := h.config.removeFiles(files); err != nil {
		return nil, err
	}
	defer func() { _ = h.config.removeFiles(files) }() // the candidate has removed them, unless it died
	file := filepath.Join(h.config.StateDir, rehearsalFile)
	old, err := h.copyState(ctx, file)
	switch {
	case errors.Is(err, errNoCopy) && ctx.Err() == nil:
		return []string{err.Error()}, nil
	case err != nil:
		return nil, fmt.Errorf("copy the state: %w", err)
	}
	warnings, readable, err := candidate.rehearse(ctx, file)
	if err == nil {
		err = old.checkReadable(readable)
	}
	return warnings, err
}

// copyState has the active shim write a copy of its state to a file, and returns that shim. It returns errNoCopy if no
// shim is active, or if the active one does not answer in time or dies.
func (h *Host) copyState(ctx context.Context, file string) (*shim, error) {
	old, err := h.gate.enter(ctx, reads, &shimWait{left: pingLimit}, nil)
	if err == nil {
		limited, cancel := context.WithTimeout(ctx, pingLimit)
		defer cancel()
		err = old.ping(limited)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNoCopy, err)
	}
	limited, cancel := context.WithTimeout(ctx, h.config.PrepareTimeout/copyShare)
	defer cancel()
	err = old.snapshot(limited, file)
	if err != nil && (limited.Err() != nil || isDead(old)) {
		return nil, fmt.Errorf("%w: %w", errNoCopy, err)
	}
	return old, err
}
