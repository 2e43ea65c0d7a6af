package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/registry"
)

// The protocol. This file is its heart: the steps, and quiesce to resume, which hold calls, as one state machine over two sides that need not be
// processes. verify and prepare, before them, hold nobody (replace.go); bake and commit, after them, are the keeper's, as the new shim serves
// already (keep.go). What a side does at each step is one call of the control service (side.go); how calls are held, gate.go.

// SwapStep is one of the eight steps of a swap.
type SwapStep string

// The steps, in their order. What fails up to quiesce leaves the old shim as it was. From fence on there is only forward: to the new shim, or
// back to the old one, or to its binary.
const (
	SwapVerify   SwapStep = "verify"   // the binary's digest is compared, and the binary is copied to where it is executed from
	SwapPrepare  SwapStep = "prepare"  // it runs as a candidate beside the old one, and takes a copy of the state over
	SwapQuiesce  SwapStep = "quiesce"  // calls that change something are held; those under way that are short end
	SwapFence    SwapStep = "fence"    // the old one lets the state and the plugins go, or is killed
	SwapActivate SwapStep = "activate" // the new one takes the state, and raises the generation
	SwapResume   SwapStep = "resume"   // what was held goes to the new one
	SwapBake     SwapStep = "bake"     // the old one stays, and takes over again if the new one dies
	SwapCommit   SwapStep = "commit"   // the old one ends
)

// SwapStepTime is how long a step took.
type SwapStepTime struct {
	Step SwapStep      `json:"step"`
	Took time.Duration `json:"took"`
}

// SwapOutcome says what has become of a swap.
type SwapOutcome string

const (
	SwapBaking     SwapOutcome = "baking"      // the new shim serves, the old one stands by
	SwapCommitted  SwapOutcome = "committed"   // the new shim serves, the old one has ended
	SwapRefused    SwapOutcome = "refused"     // nothing has changed
	SwapRolledBack SwapOutcome = "rolled back" // the old shim serves again, or its binary is started again
)

// SwapReport is what a swap came to.
type SwapReport struct {
	By         string        `json:"by,omitempty"` // the operator, as SwapAs was told
	Began      time.Time     `json:"began"`
	Path       string        `json:"path"` // of the new binary, as it was given
	From       string        `json:"from"` // SHA-256, hex
	To         string        `json:"to,omitempty"`
	Protocol   int           `json:"protocol,omitempty"`   // that the new shim and this host have agreed on
	Generation uint64        `json:"generation,omitempty"` // that began with it
	Steps      []SwapStepTime    `json:"steps"`
	Held       int           `json:"held"`                // calls that had to wait
	HeldSince  time.Time     `json:"held_since,omitzero"` // the first moment in which one would have had to; zero: none
	Hold       time.Duration `json:"hold"`                // at most, from quiesce to resume
	Outcome    SwapOutcome   `json:"outcome"`
	Failed     SwapStep      `json:"failed,omitempty"` // the step that failed
	Reason     string        `json:"reason,omitempty"`
	Warnings   []string      `json:"warnings,omitempty"` // of the candidate
}

const (
	shortCall     = 10 * time.Millisecond // a call under way for longer is not waited for: it is made again at the new shim
	activateLater = 10 * time.Second      // for a shim that has to read the whole state: its predecessor was killed
)

// limits are those of the steps that hold calls. What is not over by then is dealt with as a failure of the step.
type limits struct {
	budget   time.Duration // for all of them: what is left of it is the new shim's
	quiesce  time.Duration // for the old shim to say that short calls have ended
	fence    time.Duration // for it to let go; then it is killed
	activate time.Duration // for the new shim, which knows the state
	again    time.Duration // for the old one to go on, where it knows the state
}

// within splits what a swap may hold calls for among its steps. They are not all late at once.
func within(budget time.Duration) limits {
	return limits{budget, budget * 3 / 10, budget / 2, budget * 6 / 10, budget * 4}
}

// left is as what a shim has left the state; the zero value: not known.
type left struct{ generation, index uint64 }

// rehearsal is what a candidate says of a copy of the state.
type rehearsal struct {
	warnings []string // for people
	readable uint32   // the oldest schema whose shims can read the state once the candidate has migrated it; zero: not said
}

// side is one of the two shims of a swap.
type side interface {
	// snapshot writes a consistent copy of the state to a new file.
	snapshot(ctx context.Context, file string) error
	// rehearse has a candidate take the copy over.
	rehearse(ctx context.Context, file string) (rehearsal, error)
	// quiesce refuses what changes something, and waits for what is short.
	quiesce(ctx context.Context, short time.Duration) error
	// release lets the state and the plugins go.
	release(ctx context.Context) (left, error)
	// activate takes the state, as it was left.
	activate(ctx context.Context, l left) (generation uint64, err error)
	// again goes on after quiesce or release, with nothing written, if nobody else has taken the state.
	again(ctx context.Context) error
	// kill returns when the process is dead.
	kill(ctx context.Context) error
	dead() <-chan struct{}
	// death is how it has died; nil: it lives.
	death() error
}

// doors are how a swap holds calls.
type doors struct {
	holdWrites func()          // those that change something
	holdAll    func(why error) // the others too
	open       func(side)      // to whom they go from now on
	held       func() int      // how many had to wait since holdWrites
}

// swap is one run of the protocol. It knows no process: its sides do.
type swap struct {
	old, fresh side // old is nil where no shim is active
	doors
	limits limits
	began  time.Time // that calls were held
	left   left
	report SwapReport
	tell   func(SwapReport, SwapStep) // of each step as it begins
}

// errNobody is why no shim is active: one that was is to be dead, and does not die.
var errNobody = errors.New("a shim that was killed does not die, so nobody may take its place: it hangs in the kernel; bring back the disk or the server " +
	"that it waits for, or restart the machine: all else goes on by itself")

// step does one step and notes how long it took. Its error names the step.
func (s *swap) step(name SwapStep, do func() error) error {
	s.tell(s.report, name)
	began := time.Now()
	err := do()
	s.report.Steps = append(s.report.Steps, SwapStepTime{name, time.Since(began)})
	if err != nil {
		s.report.Failed, s.report.Reason = name, err.Error()
		return fmt.Errorf("swap: %s: %w", name, err)
	}
	return nil
}

// handOver is quiesce, fence, activate and resume: the steps that hold calls. It returns who is active after it; nil: nobody.
func (s *swap) handOver(ctx context.Context) (active side, err error) {
	if s.old == nil {
		return s.takeOver(ctx)
	}
	defer s.measure()
	if err := s.step(SwapQuiesce, func() error { return s.quiesce(ctx) }); err != nil {
		return s.stay(ctx, err)
	}
	if err := s.step(SwapFence, func() error { return s.fence(ctx) }); err != nil {
		s.report.Outcome = SwapRolledBack
		return nil, errors.Join(err, s.drop(ctx))
	}
	if err := s.step(SwapActivate, func() error { return s.activate(ctx) }); err != nil {
		return s.back(ctx, err)
	}
	_ = s.step(SwapResume, func() error { s.open(s.fresh); return nil })
	s.report.Outcome = SwapBaking
	return s.fresh, nil
}

// measure notes how long calls were held, if they were.
func (s *swap) measure() {
	if !s.began.IsZero() {
		s.report.HeldSince, s.report.Hold, s.report.Held = s.began, time.Since(s.began), s.held()
	}
}

// takeOver has the candidate take a state that nobody has: all calls are held already.
func (s *swap) takeOver(ctx context.Context) (active side, err error) {
	if err := s.step(SwapActivate, func() error { return s.activate(ctx) }); err != nil {
		return nil, errors.Join(err, s.drop(ctx))
	}
	_ = s.step(SwapResume, func() error { s.open(s.fresh); return nil })
	s.report.Outcome = SwapBaking
	return s.fresh, nil
}

// quiesce holds what changes something and lets what is short end. An old shim that does not answer is fenced next. The swap may be given up for the
// last time here, as whoever wants it may have gone, or the candidate died.
func (s *swap) quiesce(ctx context.Context) error {
	if why := s.fresh.death(); why != nil {
		return why
	}
	s.began = time.Now()
	s.holdWrites()
	limited, cancel := context.WithTimeout(ctx, s.limits.quiesce)
	defer cancel()
	err := s.old.quiesce(limited, shortCall)
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil && limited.Err() == nil && !gone(s.old):
		return err
	}
	return s.fresh.death()
}

// fence returns when the old shim writes nothing and calls nobody any more: it says so, or is dead. Until then it answers what changes nothing.
func (s *swap) fence(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx) // there is only forward now
	limited, cancel := context.WithTimeout(ctx, s.limits.fence)
	defer cancel()
	var err error
	s.left, err = s.old.release(limited)
	s.holdAll(errors.New("it is being replaced"))
	if err == nil {
		return nil
	}
	s.left = left{}
	ctx, cancel = context.WithTimeout(ctx, killLimit)
	defer cancel()
	if killed := s.old.kill(ctx); killed != nil {
		return fmt.Errorf("%w: %w (it was killed because it did not let go: %w)", errNobody, killed, err)
	}
	return nil
}

// activate has the candidate take the state, within what is left of the budget. Where the old shim has let nothing go, no budget can be kept.
func (s *swap) activate(ctx context.Context) (err error) {
	limit := min(s.limits.activate, s.limits.budget-time.Since(s.began))
	if s.left == (left{}) {
		limit = activateLater
	}
	ctx, cancel := noLongerThan(context.WithoutCancel(ctx), limit)
	defer cancel()
	s.report.Generation, err = s.fresh.activate(ctx, s.left)
	return err
}

// stay ends a swap that has changed nothing: the old shim takes calls again. Where it cannot, it is killed, and its binary is started anew.
func (s *swap) stay(ctx context.Context, why error) (side, error) {
	s.report.Outcome = SwapRefused
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.limits.again)
	defer cancel()
	if err := s.old.again(ctx); err != nil {
		s.report.Outcome = SwapRolledBack
		return nil, errors.Join(why, err, ended(ctx, s.old), s.drop(ctx))
	}
	s.open(s.old)
	return s.old, errors.Join(why, s.drop(ctx))
}

// back returns to the old shim, whose successor could not take the state. Nobody is active if that one is dead or cannot either: its binary
// is then started anew.
func (s *swap) back(ctx context.Context, why error) (side, error) {
	s.report.Outcome = SwapRolledBack
	ctx = context.WithoutCancel(ctx)
	if err := s.drop(ctx); err != nil {
		return nil, errors.Join(why, err)
	}
	if gone(s.old) {
		return nil, why
	}
	if err := s.retake(ctx); err != nil {
		return nil, errors.Join(why, err, ended(ctx, s.old))
	}
	s.open(s.old)
	return s.old, why
}

// retake has the old shim take the state again: as it was, or, where its successor came so far as to begin a generation, under a new one.
func (s *swap) retake(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, s.limits.again)
	defer cancel()
	err := s.old.again(limited)
	if errors.Is(err, registry.ErrFenced) {
		limited, cancel := context.WithTimeout(ctx, activateLater)
		defer cancel()
		_, err = s.old.activate(limited, left{})
	}
	return err
}

// drop ends the candidate.
func (s *swap) drop(ctx context.Context) error { return ended(ctx, s.fresh) }

// ended kills a side, whatever has ended ctx.
func ended(ctx context.Context, p side) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	return p.kill(ctx)
}

func gone(p side) bool {
	select {
	case <-p.dead():
		return true
	default:
		return false
	}
}
