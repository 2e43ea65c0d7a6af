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

// operatorKey is the context's key of who acts, a string.
type operatorKey struct{}

// As is ctx for what a person wants: swaps remember who.
func As(ctx context.Context, who string) context.Context {
	return context.WithValue(ctx, operatorKey{}, who)
}

// prepareLimit is how long a candidate may take to take a copy of the state over.
const prepareLimit = time.Minute

// Swap replaces the running shim by another binary, while tasks run, calls are under way and watchers listen. It returns when the new shim
// serves; the old one stands by for Config.Bake after that, and takes over again if the new one dies. An error names the step that failed and
// why; unless it says that nobody is active, the old shim, or its binary, serves on. One swap at a time.
func (h *Host) Swap(ctx context.Context, b Binary) (Swapped, error) {
	select {
	case h.swapping <- struct{}{}:
		defer func() { <-h.swapping }()
	default:
		return Swapped{}, registry.Errorf(registry.ErrConflict, "a swap is under way already; wait for its end")
	}
	s := &swap{report: Swapped{Began: time.Now(), Path: b.Path, From: h.running.now().SHA256, Outcome: SwapRefused}}
	s.report.By, _ = ctx.Value(operatorKey{}).(string)
	err := h.swap(ctx, s, b)
	h.history.add(s.report)
	return s.report, err
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
		return <-a.done
	case <-h.closing.Done():
		return errors.Join(errClosed, s.drop(ctx))
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), s.drop(ctx))
	}
}

// candidate runs the binary beside the active shim, and has it rehearse.
func (h *Host) candidate(ctx context.Context, s *swap, binary digest) (*shim, error) {
	limited, cancel := context.WithTimeoutCause(ctx, prepareLimit, registry.Errorf(registry.ErrUnavailable, "it took longer than %s", prepareLimit))
	defer cancel()
	var fresh *shim
	hold := h.config.MaxHold
	err := s.step(SwapPrepare, func() (err error) {
		old, _, err := h.gate.enter(limited, reads, &hold, nil)
		if err != nil {
			return err
		}
		if fresh, err = h.launch(limited, h.closing, binary); err != nil {
			return err
		}
		s.report.Protocol = fresh.process.Protocol()
		s.report.Warnings, err = rehearsed(limited, old, fresh, h.config.StateDir)
		return err
	})
	if err != nil && fresh != nil {
		err = errors.Join(err, fresh.end(ctx))
	}
	return fresh, err
}

// rehearsed has the candidate take a copy of the old shim's state over.
func rehearsed(ctx context.Context, old, fresh side, dir string) (warnings []string, err error) {
	file := filepath.Join(dir, "rehearsal.db")
	if err := os.Remove(file); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err // of a host that died in the middle
	}
	if err := old.snapshot(ctx, file); err != nil {
		return nil, fmt.Errorf("copy the state: %w", err)
	}
	defer os.Remove(file) // the candidate has, unless it died
	return fresh.rehearse(ctx, file)
}

// Swaps is what earlier swaps came to, the newest first.
func (h *Host) Swaps() []Swapped { return h.history.list() }
