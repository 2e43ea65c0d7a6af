package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"holdfast/registry"
)

// Swap replaces the running shim by another binary, while tasks run, calls are under way and watchers listen. It returns when the new shim
// serves; the old one stands by for Config.Bake after that, and takes over again if the new one dies. An error names the step that failed and
// why; unless it says that nobody is active, the old shim, or its binary, serves on. One swap at a time.
func (h *Host) Swap(ctx context.Context, b Binary) (SwapReport, error) { return h.SwapAs(ctx, b, "") }

// SwapAs is Swap for an operator, whose name is in the report and in the history.
func (h *Host) SwapAs(ctx context.Context, b Binary, operator string) (SwapReport, error) {
	if h.closing.Err() != nil {
		return SwapReport{}, errClosed
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(h.closing, func() { cancel(errClosed) })()
	select {
	case h.swapping <- struct{}{}:
		defer func() { <-h.swapping }()
	default:
		return SwapReport{}, registry.Errorf(registry.ErrConflict, "a swap is under way already; wait for its end")
	}
	s := &swap{tell: h.standing.swaps, report: SwapReport{By: operator, Began: time.Now(), Path: b.Path, From: h.running.now().SHA256, Outcome: SwapRefused}}
	err := h.swap(ctx, s, b)
	if s.report.Failed == SwapActivate && errors.Is(err, errLate) {
		if slow := h.slowDisk(); slow != "" {
			err = fmt.Errorf("%w; %s", err, slow)
			s.report.Reason += "; " + slow
		}
	}
	h.standing.swaps(s.report, "")
	if err := h.binaries.Prune(); err != nil {
		h.config.Logger.Warn("binaries that are not needed any more could not be removed", "error", err)
	}
	if s.report.Outcome != SwapBaking { // else the keeper tells what becomes of it
		h.history.add(s.report)
	}
	return s.report, err
}

// slowDisk measures a durable write to the state directory: an activation makes one within the budget of a swap. If the
// write takes a large part of the budget, slowDisk returns what to do about it.
func (h *Host) slowDisk() string {
	file, began := h.history.path+".probe", time.Now()
	err := h.history.pen.write(func() error { return errors.Join(writeDurably(file, nil), os.Remove(file)) })
	took := time.Since(began).Round(time.Millisecond)
	if !errors.Is(err, errDiskHangs) && took < h.config.SwapBudget/10 {
		return ""
	}
	return fmt.Sprintf("the disk of %s is slow: one small write took %s or more just now, and a swap may hold calls for %s; allow it longer "+
		"(--shim-swap-budget, Config.SwapBudget), or move the state directory to a faster disk", h.config.StateDir, took, h.config.SwapBudget)
}

func (h *Host) swap(ctx context.Context, s *swap, b Binary) error {
	var binary digest
	err := s.step(SwapVerify, func() (err error) {
		binary, err = h.verify(ctx, b)
		return err
	})
	if err != nil {
		return err
	}
	s.report.To = binary.SHA256
	fresh, err := h.candidate(ctx, s, binary)
	if err != nil {
		return err
	}
	s.fresh, s.doors, s.limits = fresh, h.doors(), within(h.config.SwapBudget)
	a := &ask{ctx: ctx, swap: s, fresh: fresh, digest: binary, done: make(chan error, 1)}
	select {
	case h.swaps <- a:
		if err = <-a.done; err == nil {
			h.answerFor(fresh)
		}
		return err
	case <-h.closing.Done():
		return errors.Join(errClosed, s.drop(ctx))
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), s.drop(ctx))
	}
}

// candidate runs the binary beside the active shim, and has it rehearse.
func (h *Host) candidate(ctx context.Context, s *swap, binary digest) (*shim, error) {
	limit := h.config.PrepareTimeout
	limited, cancel := noLongerThan(ctx, limit)
	defer cancel()
	var fresh *shim
	err := s.step(SwapPrepare, func() (err error) {
		if fresh, err = h.launch(limited, h.closing, binary); err != nil {
			return err
		}
		s.report.Protocol = fresh.process.Protocol()
		s.report.Warnings, err = h.rehearsed(limited, fresh)
		return err
	})
	if err != nil && fresh != nil {
		err = errors.Join(err, fresh.end(ctx))
	}
	return fresh, err
}

const (
	predecessorLimit = 2 * time.Second // for there to be an active shim that answers, if there is one
	copyShare        = 2               // half of the time to prepare is for the copy
)

// errBlind is why a candidate has no copy of the state to rehearse on. It is no reason to go without it: the shim that should give the copy is
// the one to be rid of.
var errBlind = errors.New("the running shim gives no copy of the state, so the new one takes it over without having tried that")

// rehearsalFile is, in the state directory, the copy of the state that a candidate rehearses on.
const rehearsalFile = "rehearsal.db"

// removeCopies removes the copy, and what the store has put aside of one that was damaged. A host that dies leaves them.
func (c *Config) removeCopies() error {
	left, err := filepath.Glob(filepath.Join(c.StateDir, rehearsalFile+"*"))
	for _, file := range left {
		if gone := os.Remove(file); !errors.Is(gone, os.ErrNotExist) {
			err = errors.Join(err, gone)
		}
	}
	return err
}

// rehearsed has the candidate take a copy of the active shim's state over. What it makes of it, the active one has to be able to read.
func (h *Host) rehearsed(ctx context.Context, fresh side) (warnings []string, err error) {
	file := filepath.Join(h.config.StateDir, rehearsalFile)
	if err := h.config.removeCopies(); err != nil {
		return nil, err
	}
	defer func() { _ = h.config.removeCopies() }() // the candidate has, unless it died
	old, err := h.copied(ctx, file)
	switch {
	case errors.Is(err, errBlind) && ctx.Err() == nil:
		return []string{err.Error()}, nil
	case err != nil:
		return nil, fmt.Errorf("copy the state: %w", err)
	}
	tried, err := fresh.rehearse(ctx, file)
	if err == nil {
		err = old.couldRead(tried.readable)
	}
	return tried.warnings, err
}

// copied has the active shim write a copy of its state. It is errBlind where there is no such shim, where it does not answer, and where it ends.
func (h *Host) copied(ctx context.Context, file string) (*shim, error) {
	old, err := h.predecessor(ctx)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errBlind, err)
	}
	limited, cancel := context.WithTimeout(ctx, h.config.PrepareTimeout/copyShare)
	defer cancel()
	err = old.snapshot(limited, file)
	if err != nil && (limited.Err() != nil || gone(old)) {
		return nil, fmt.Errorf("%w: %w", errBlind, err)
	}
	return old, err
}

// predecessor is the active shim, if there is one that answers.
func (h *Host) predecessor(ctx context.Context) (*shim, error) {
	hold := predecessorLimit
	old, err := h.gate.enter(ctx, reads, &hold, nil)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, predecessorLimit)
	defer cancel()
	return old, old.answers(ctx)
}

// Swaps is what earlier swaps came to, the newest first.
func (h *Host) Swaps() []SwapReport { return h.history.list() }
