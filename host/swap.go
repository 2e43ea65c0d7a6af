package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/registry"
)

// This file names all steps of a swap. It implements those that hold calls, quiesce to resume, as one state machine
// over two peers. The earlier steps, verify and prepare, hold no call (swap_entry.go). During bake and commit the new
// shim already serves (supervisor.go). shim_control.go implements the peers, and gate.go holds the calls.

// SwapStep is one of the eight steps of a swap.
type SwapStep string

// The steps, in their order. A failure up to quiesce leaves the old shim as it was. From fence on, a swap cannot be
// given up: it ends with the new shim, the old shim, or a new process of the old binary.
const (
	SwapVerify   SwapStep = "verify"   // compare the digest of the new binary, and copy the binary into the store
	SwapPrepare  SwapStep = "prepare"  // start the new shim as a candidate, and have it take over a copy of the state
	SwapQuiesce  SwapStep = "quiesce"  // hold calls that change something
	SwapFence    SwapStep = "fence"    // the old shim releases the state and the plugins, or is killed
	SwapActivate SwapStep = "activate" // the new shim opens the state under a new generation
	SwapResume   SwapStep = "resume"   // held calls go to the new shim
	SwapBake     SwapStep = "bake"     // the old shim stands by, and takes over again if the new one dies
	SwapCommit   SwapStep = "commit"   // the old shim ends
)

// SwapStepTime is how long a step took.
type SwapStepTime struct {
	Step SwapStep      `json:"step"`
	Took time.Duration `json:"took"`
}

// SwapOutcome is how far a swap has come, or how it ended.
type SwapOutcome string

const (
	SwapBaking     SwapOutcome = "baking"      // the new shim serves, the old one stands by
	SwapCommitted  SwapOutcome = "committed"   // the new shim serves, the old one has ended
	SwapRefused    SwapOutcome = "refused"     // nothing has changed
	SwapRolledBack SwapOutcome = "rolled back" // the old shim serves again, or its binary is started again
)

// SwapReport describes a swap: what was wanted, what was done, and its outcome.
type SwapReport struct {
	By         string         `json:"by,omitempty"` // the operator, as given to SwapAs
	Began      time.Time      `json:"began"`
	Path       string         `json:"path"`                 // of the new binary, as given
	From       string         `json:"from"`                 // SHA-256 of the old binary, hex
	To         string         `json:"to,omitempty"`         // SHA-256 of the new binary, hex
	Protocol   int            `json:"protocol,omitempty"`   // version that the new shim and this host agreed on
	Generation uint64         `json:"generation,omitempty"` // of the new shim
	Steps      []SwapStepTime `json:"steps"`
	Held       int            `json:"held"`                // calls that waited
	HeldSince  time.Time      `json:"held_since,omitzero"` // when calls began to be held; zero: the swap held none
	Hold       time.Duration  `json:"hold"`                // the longest possible wait, from quiesce to resume
	Outcome    SwapOutcome    `json:"outcome"`
	Failed     SwapStep       `json:"failed,omitempty"` // the step that failed
	Reason     string         `json:"reason,omitempty"` // of the failure
	Warnings   []string       `json:"warnings,omitempty"`
}

// noHandoffLimit bounds an activate without a handoff: the shim reads the whole state.
const noHandoffLimit = 10 * time.Second

// limits bound the steps that hold calls. A step that exceeds its limit has failed.
type limits struct {
	budget   time.Duration // for all steps together; activate gets the rest of it
	quiesce  time.Duration // for the old shim to refuse new calls
	fence    time.Duration // for the old shim to release the state
	activate time.Duration // for the new shim to open it
	resume   time.Duration // for the old shim to go on after a failure
}

// limitsWithin derives the limits from a budget. Those of quiesce, fence and activate add up to more than the budget,
// as these steps are rarely all late at once.
func limitsWithin(budget time.Duration) limits {
	return limits{
		budget:   budget,
		quiesce:  budget * 3 / 10,
		fence:    budget * 5 / 10,
		activate: budget * 6 / 10,
		resume:   budget * 4,
	}
}

// handoff is the generation and index at which a shim has released the state. The zero value means that no shim has
// released it.
type handoff struct{ generation, index uint64 }

// peer is one of the two shims of a swap.
type peer interface {
	// quiesce refuses new calls that change something.
	quiesce(ctx context.Context) error
	// release closes the state and the connections to plugins.
	release(ctx context.Context) (handoff, error)
	// activate opens the state as it was released.
	activate(ctx context.Context, from handoff) (generation uint64, err error)
	// resume continues after quiesce or release, unless another shim has opened the state since.
	resume(ctx context.Context) error
	// ping returns an error if the shim does not answer.
	ping(ctx context.Context) error
	// stop ends the process, which may clean up first.
	stop(ctx context.Context) error
	// kill returns when the process is dead.
	kill(ctx context.Context) error
	exited() <-chan struct{}
	// exitError returns how the process died; nil: it lives.
	exitError() error
	pid() int
}

// swapGate holds calls during a swap.
type swapGate interface {
	holdWrites()       // hold calls that change something
	holdAll(why error) // hold the others too
	open(peer)         // send all calls to a shim
	countHeld() int    // calls that had to wait since holdWrites
}

// swap is one run of the protocol.
type swap struct {
	old, next peer // old is nil if no shim is active
	gate      swapGate
	limits    limits
	heldSince time.Time // when calls began to be held; zero: the swap has held none
	handoff   handoff
	report    SwapReport
	progress  func(SwapReport, SwapStep) // is called as each step begins
}

// errUnkillable means that no shim can become active, because a killed one does not exit.
var errUnkillable = errors.New("a killed shim does not exit, so no other may take over: it hangs in the kernel; " +
	"bring back the disk or the server that it waits for, or reboot the node: everything else follows by itself")

// step runs one step and notes how long it took. Its error names the step.
func (s *swap) step(name SwapStep, do func() error) error {
	s.progress(s.report, name)
	began := time.Now()
	err := do()
	s.report.Steps = append(s.report.Steps, SwapStepTime{name, time.Since(began)})
	if err != nil {
		s.report.Failed, s.report.Reason = name, err.Error()
		return fmt.Errorf("swap: %s: %w", name, err)
	}
	return nil
}

// handOver runs quiesce, fence, activate and resume, or the last two if no shim is active. It returns the shim that is
// active afterwards; nil: none.
func (s *swap) handOver(ctx context.Context) (active peer, err error) {
	if s.old == nil {
		return s.activateOnly(ctx)
	}
	defer s.recordHold()
	if err := s.step(SwapQuiesce, func() error { return s.quiesce(ctx) }); err != nil {
		return s.refuse(ctx, err)
	}
	if err := s.step(SwapFence, func() error { return s.fence(ctx) }); err != nil {
		s.report.Outcome = SwapRolledBack
		return nil, errors.Join(err, s.killNext(ctx))
	}
	if err := s.step(SwapActivate, func() error { return s.activate(ctx) }); err != nil {
		return s.rollBack(ctx, err)
	}
	return s.resume(), nil
}

// activateOnly takes over a state that no shim has open. All calls are held already.
func (s *swap) activateOnly(ctx context.Context) (active peer, err error) {
	if err := s.step(SwapActivate, func() error { return s.activate(ctx) }); err != nil {
		return nil, errors.Join(err, s.killNext(ctx))
	}
	return s.resume(), nil
}

// resume sends the held calls to the new shim, and returns it.
func (s *swap) resume() (active peer) {
	_ = s.step(SwapResume, func() error { s.gate.open(s.next); return nil })
	s.report.Outcome = SwapBaking
	return s.next
}

// recordHold notes in the report how long the swap held calls, if it held any.
func (s *swap) recordHold() {
	if !s.heldSince.IsZero() {
		s.report.HeldSince, s.report.Hold, s.report.Held = s.heldSince, time.Since(s.heldSince), s.gate.countHeld()
	}
}

// quiesce holds calls that change something, and has the old shim refuse them. An old shim that does not answer is
// fenced next. quiesce is the last step that can refuse the swap, for example because the caller is gone or the
// candidate has died.
func (s *swap) quiesce(ctx context.Context) error {
	if err := s.next.exitError(); err != nil {
		return err
	}
	s.heldSince = time.Now()
	s.gate.holdWrites()
	limited, cancel := context.WithTimeout(ctx, s.limits.quiesce)
	defer cancel()
	err := s.old.quiesce(limited)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil && limited.Err() == nil && !isDead(s.old):
		return err
	}
	return s.next.exitError()
}

// fence returns when the old shim neither writes nor calls plugins any more: it has released the state, or is dead.
// Until then it answers calls that change nothing.
func (s *swap) fence(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx) // from here on the swap cannot be given up
	limited, cancel := context.WithTimeout(ctx, s.limits.fence)
	defer cancel()
	var err error
	s.handoff, err = s.old.release(limited)
	s.gate.holdAll(errReplacing)
	if err == nil {
		return nil
	}
	s.handoff = handoff{}
	if killErr := kill(ctx, s.old); killErr != nil {
		return fmt.Errorf("%w: %w (it was killed because it did not release the state: %w)", errUnkillable, killErr,
			err)
	}
	return nil
}

// activate has the candidate open the state within the rest of the budget. If the old shim has not released the state,
// the candidate reads all of it, and noHandoffLimit applies instead.
func (s *swap) activate(ctx context.Context) (err error) {
	limit := min(s.limits.activate, s.limits.budget-time.Since(s.heldSince))
	if s.handoff == (handoff{}) {
		limit = noHandoffLimit
	}
	ctx, cancel := withLimit(context.WithoutCancel(ctx), limit)
	defer cancel()
	s.report.Generation, err = s.next.activate(ctx, s.handoff)
	if s.handoff != (handoff{}) && errors.Is(err, errTooLate) {
		err = fmt.Errorf("%w; if the disk of the state directory is slow, allow swaps to hold calls for longer than "+
			"%s (--shim-swap-budget, Config.SwapBudget)", err, s.limits.budget)
	}
	return err
}

// refuse ends a swap that has changed nothing: the old shim continues. If it cannot, it is killed, and its binary is
// started again.
func (s *swap) refuse(ctx context.Context, why error) (active peer, err error) {
	s.report.Outcome = SwapRefused
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.limits.resume)
	defer cancel()
	if err := s.old.resume(ctx); err != nil {
		s.report.Outcome = SwapRolledBack
		return nil, errors.Join(why, err, kill(ctx, s.old), s.killNext(ctx))
	}
	s.gate.open(s.old)
	return s.old, errors.Join(why, s.killNext(ctx))
}

// rollBack returns to the old shim after the candidate failed to open the state. If the old one is dead or cannot
// continue, no shim is active, and its binary is started again.
func (s *swap) rollBack(ctx context.Context, why error) (active peer, err error) {
	s.report.Outcome = SwapRolledBack
	ctx = context.WithoutCancel(ctx)
	if err := s.killNext(ctx); err != nil {
		return nil, errors.Join(why, err)
	}
	if isDead(s.old) {
		return nil, why
	}
	if err := s.resumeOld(ctx); err != nil {
		return nil, errors.Join(why, err, kill(ctx, s.old))
	}
	s.gate.open(s.old)
	return s.old, why
}

// resumeOld has the old shim continue: as it was, or under a new generation if the candidate had already begun one.
func (s *swap) resumeOld(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, s.limits.resume)
	defer cancel()
	err := s.old.resume(limited)
	if errors.Is(err, registry.ErrFenced) {
		limited, cancel := context.WithTimeout(ctx, noHandoffLimit)
		defer cancel()
		_, err = s.old.activate(limited, handoff{})
	}
	return err
}

// abandon kills the candidate of a swap that fails at a step before that step begins. The error names the step.
func (s *swap) abandon(ctx context.Context, at SwapStep, why error) error {
	return errors.Join(s.step(at, func() error { return why }), s.killNext(ctx))
}

func (s *swap) killNext(ctx context.Context) error { return kill(ctx, s.next) }

// kill kills a shim, even if ctx has ended.
func kill(ctx context.Context, p peer) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	return p.kill(ctx)
}

func isDead(p peer) bool {
	select {
	case <-p.exited():
		return true
	default:
		return false
	}
}
