package host

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v5"
)

// supervisor keeps one shim active until its context ends. It restarts a shim that has died, kills a shim that does not
// answer, carries out swaps, and keeps the old shim on standby while the new one bakes.
//
// One goroutine does all of this, so only one change of shim is under way at a time. Slow work runs on other
// goroutines: starting a shim, and ending an old one.
type supervisor struct {
	*Host
	gate         swapGate
	active       peer            // nil: none, and the next start is due or under way
	activeCtx    context.Context // ends when active is not the active shim any more
	deactivate   context.CancelFunc
	activeSince  time.Time
	unresponsive chan struct{} // closed once active has not answered for too long
	killed       bool          // active was killed because it did not answer
	pauses       *startPauses
	nextStart    *time.Timer   // nil: no start is planned
	starting     *pendingStart // nil: none is under way
	baking       *bake         // nil: no swap is in its bake
	committing   *bake         // a swap whose old shim is being ended; nil: none
	waiting      *preparedSwap // a swap that waits for starting or committing; nil: none
	unkillable   []peer        // killed shims that may still write the state; no shim is started before they exit
}

// pendingStart is a start that is under way.
type pendingStart struct {
	done   chan struct{} // closed once shim and err are set
	shim   *shim         // with an err: a shim that could not be killed; nil: no process is left
	err    error
	cancel context.CancelCauseFunc
}

// startGrace is how long a start may go on once the candidate of a swap is ready. A healthy start ends sooner.
const startGrace = time.Second

var errCalledOff = errors.New("the start was called off for a swap whose candidate is ready")

// bake is a swap whose old shim stands by.
type bake struct {
	report   SwapReport
	standby  peer // nil: it has died since
	digest   digest
	began    time.Time
	over     *time.Timer
	answered chan struct{} // closed once the new shim has answered after over has fired; nil: over has not fired
	stopped  chan error    // the result of ending standby after the bake
}

// step notes that a step of the swap has ended.
func (b *bake) step(name SwapStep, began time.Time) {
	b.report.Steps = append(b.report.Steps, SwapStepTime{name, time.Since(began)})
}

const (
	goodLife      = time.Minute // a shim that lived for longer is started again at once
	firstPause    = 10 * time.Millisecond
	longestPause  = 5 * time.Second
	pauseMultiple = 2
)

// startPauses spaces starts. The first start follows at once; then the pause doubles up to a ceiling.
type startPauses struct {
	backoff  *backoff.ExponentialBackOff
	failures int
}

func newStartPauses() *startPauses {
	return &startPauses{backoff: newBackoff(firstPause, longestPause)}
}

// next counts a failure, and returns how long to wait before the next start.
func (p *startPauses) next() time.Duration {
	if p.failures++; p.failures == 1 {
		return 0
	}
	return p.backoff.NextBackOff()
}

// newBackoff returns pauses that double, without jitter: one host waits for one shim.
func newBackoff(first, longest time.Duration) *backoff.ExponentialBackOff {
	return &backoff.ExponentialBackOff{InitialInterval: first, Multiplier: pauseMultiple, MaxInterval: longest}
}

// newSupervisor returns a supervisor of a shim that is active already, and sends calls to that shim.
func newSupervisor(h *Host, gate swapGate, first peer) *supervisor {
	s := &supervisor{Host: h, gate: gate, deactivate: func() {}, pauses: newStartPauses()}
	s.serve(first)
	return s
}

// run runs until ctx ends. It returns the error of ending the last shim.
func (s *supervisor) run(ctx context.Context) error {
	for {
		if p := s.takeReadySwap(); p != nil {
			p.done <- s.runSwap(ctx, p)
		}
		c := s.signals()
		select {
		case <-c.activeExited:
			s.restart(ctx)
		case <-s.unresponsive:
			s.killUnresponsive(ctx)
		case <-c.startDue:
			s.start(ctx)
		case <-c.standbyExited:
			s.config.Logger.Warn("the standby shim has died; a rollback would start its binary again")
			s.cleanUp(ctx, s.baking.standby)
			s.baking.standby = nil
		case <-c.bakeOver:
			s.awaitAnswer()
		case <-c.bakeAnswered:
			s.commit(ctx)
		case err := <-c.oldStopped:
			s.recordCommit(err)
		case <-c.startEnded:
			s.handleStartEnd(ctx)
		case <-c.unkillableExited:
			s.reap(ctx)
		case s.waiting = <-c.nextSwap: // it runs once the swap before it is committed and no start is under way
			s.commit(ctx)
			s.limitStart()
		case <-ctx.Done():
			return s.stopAll(ctx)
		}
	}
}

// signals are the channels that run waits for. A nil channel never becomes ready.
type signals struct {
	activeExited, standbyExited, bakeAnswered, startEnded, unkillableExited <-chan struct{}

	bakeOver, startDue <-chan time.Time
	oldStopped         <-chan error
	nextSwap           <-chan *preparedSwap
}

// signals returns the channels of everything that can happen in the current state.
func (s *supervisor) signals() (c signals) {
	if s.active != nil {
		c.activeExited = s.active.exited()
	}
	if s.baking != nil {
		c.bakeOver, c.bakeAnswered = s.baking.over.C, s.baking.answered
		if s.baking.standby != nil {
			c.standbyExited = s.baking.standby.exited()
		}
	}
	if s.committing != nil {
		c.oldStopped = s.committing.stopped
	}
	if s.starting != nil {
		c.startEnded = s.starting.done
	}
	if len(s.unkillable) > 0 {
		c.unkillableExited = s.unkillable[0].exited()
	} else if s.nextStart != nil { // no shim is started before every unkillable one has exited
		c.startDue = s.nextStart.C
	}
	if s.waiting == nil { // one at a time
		c.nextSwap = s.swaps
	}
	return c
}

// takeReadySwap takes the waiting swap out of s once no start and no commit is under way; nil: none.
func (s *supervisor) takeReadySwap() *preparedSwap {
	if s.committing != nil || s.starting != nil {
		return nil
	}
	p := s.waiting
	s.waiting = nil
	return p
}

// stopAll ends all shims.
func (s *supervisor) stopAll(ctx context.Context) error {
	if s.nextStart != nil {
		s.nextStart.Stop()
	}
	if s.waiting != nil {
		s.waiting.done <- s.waiting.swap.abandon(ctx, SwapQuiesce, errClosed)
	}
	var err error
	if s.active != nil {
		err = s.active.stop(ctx)
	}
	if b := s.endBake(); b != nil && b.standby != nil {
		err = errors.Join(err, b.standby.stop(ctx))
	}
	if s.starting != nil {
		<-s.starting.done // soon, as ctx has ended
		if s.starting.shim != nil {
			err = errors.Join(err, s.starting.shim.stop(ctx))
		}
	}
	for _, p := range s.unkillable {
		err = errors.Join(err, p.stop(ctx))
	}
	if s.committing != nil {
		s.recordCommit(<-s.committing.stopped)
	}
	return err
}

var errDied = errors.New("the shim has died")

// restart replaces a shim that has died, by the standby shim or by a new process. Calls are held until then, so slow
// work comes afterwards: the removal of the dead shim's files, and writes to a disk that may hang.
func (s *supervisor) restart(ctx context.Context) {
	dead, baked, killed := s.active, s.endBake(), s.killed
	s.holdCalls(errDied, time.Time{})
	revived := baked != nil && s.rollBack(ctx, baked)
	why := dead.exitError()
	if killed {
		why = fmt.Errorf("it gave no answer for %s, and was killed", s.config.AnswerTimeout)
	}
	if baked != nil {
		baked.report.Outcome, baked.report.Failed, baked.report.Reason = SwapRolledBack, SwapBake, why.Error()
		s.history.note(baked.report) // written below
	}
	if revived {
		s.shimState.setReason(why)
		s.config.Logger.Error("the new shim has died; the old one has taken over again", "error", why)
	} else {
		if time.Since(s.activeSince) > goodLife {
			s.pauses = newStartPauses()
		}
		if s.planStart("the shim has died", why) == 0 && len(s.unkillable) == 0 {
			s.start(ctx)
		}
	}
	s.cleanUp(ctx, dead)
	if baked != nil {
		s.history.add(baked.report)
		s.recordActive(baked.digest, digest{})
	}
}

// cleanUp stops a dead shim, which removes its files.
func (s *supervisor) cleanUp(ctx context.Context, dead peer) {
	if err := dead.stop(ctx); err != nil {
		s.config.Logger.Warn("a dead shim has left something", "error", err)
	}
}

// killUnresponsive kills a shim that does not answer. If it does not exit, calls wait until it does.
func (s *supervisor) killUnresponsive(ctx context.Context) {
	s.unresponsive, s.killed = nil, true
	silent := fmt.Errorf("the shim has given no answer for %s", s.config.AnswerTimeout)
	s.holdCalls(fmt.Errorf("%w, and is killed", silent), time.Time{})
	if err := kill(ctx, s.active); err != nil {
		s.holdCalls(fmt.Errorf("%w: %w: %w", silent, errUnkillable, err), time.Time{})
		s.noteUnkillable(s.active)
	}
}

// holdCalls holds all calls, and records why and when the next start is due; zero: unknown.
func (s *supervisor) holdCalls(why error, nextStart time.Time) {
	s.gate.holdAll(why)
	s.shimState.setDown(why, s.pauses.failures, *s.running.Load(), nextStart)
}

// noteUnkillable adds the killed shims that have not exited to s.unkillable.
func (s *supervisor) noteUnkillable(shims ...peer) {
	for _, p := range shims {
		if !isDead(p) {
			s.unkillable = append(s.unkillable, p)
			s.config.Logger.Error("a killed shim does not exit; none is started before it does", "pid", p.pid())
		}
	}
}

// reap forgets an unkillable shim that has exited. After the last one, the planned start is due.
func (s *supervisor) reap(ctx context.Context) {
	s.cleanUp(ctx, s.unkillable[0])
	s.unkillable = s.unkillable[1:]
}

// planStart records that no shim is active and why, and plans the next start. It returns the pause until then.
func (s *supervisor) planStart(what string, why error) (pause time.Duration) {
	s.active, s.unresponsive = nil, nil
	s.deactivate()
	pause = s.pauses.next()
	s.nextStart = time.NewTimer(pause)
	due := time.Now().Add(pause)
	if len(s.unkillable) > 0 {
		due = time.Time{} // unknown
	}
	s.holdCalls(why, due)
	s.config.Logger.Error(what+"; it is started again", "in", pause, "failures in a row", s.pauses.failures, "error",
		why)
	return pause
}

// start starts the shim's binary.
func (s *supervisor) start(ctx context.Context) {
	s.nextStart.Stop()
	s.nextStart = nil
	limited, cancel := context.WithCancelCause(ctx)
	p := &pendingStart{done: make(chan struct{}), cancel: cancel}
	s.starting = p
	go func() {
		p.shim, p.err = s.startActive(limited, ctx)
		close(p.done)
	}()
	if s.waiting != nil {
		s.limitStart()
	}
}

// limitStart ends a start after startGrace: it may hang, and a candidate is ready to take its place.
func (s *supervisor) limitStart() {
	if p := s.starting; p != nil {
		time.AfterFunc(startGrace, func() { p.cancel(errCalledOff) })
	}
}

// handleStartEnd handles the end of a start.
func (s *supervisor) handleStartEnd(ctx context.Context) {
	p := s.starting
	s.starting = nil
	p.cancel(nil)
	if p.err != nil && p.shim != nil {
		s.noteUnkillable(p.shim)
	}
	switch {
	case p.err == nil:
		s.serve(p.shim)
	case ctx.Err() == nil:
		s.planStart("the shim cannot be started", p.err)
	}
}

// serve makes a shim the active one and sends calls to it.
func (s *supervisor) serve(p peer) {
	s.setActive(p)
	s.gate.open(p)
}

func (s *supervisor) setActive(p peer) {
	if s.nextStart != nil {
		s.nextStart.Stop()
		s.nextStart = nil
	}
	s.deactivate()
	s.active, s.activeSince, s.killed = p, time.Now(), false
	s.activeCtx, s.deactivate = context.WithCancel(s.closing)
	s.shimState.setServing(p.pid(), *s.running.Load())
	s.watchActive()
}

// runSwap hands over to the candidate.
func (s *supervisor) runSwap(ctx context.Context, p *preparedSwap) error {
	if err := s.reapAll(ctx); err != nil {
		return p.swap.abandon(ctx, SwapActivate, err)
	}
	old, next := s.active, p.swap.next
	p.swap.old = old
	p.swap.report.From = s.running.Load().SHA256 // a rollback may have changed it since the swap began
	active, err := p.swap.handOver(p.ctx)
	switch {
	case active == next:
		s.beginBake(p, old)
	case old == nil: // no shim is active, as before; the next start is planned already
		s.noteUnkillable(next)
	case active == old: // it continues
	default:
		if !errors.Is(err, errUnkillable) { // to stop an unkillable shim would only take time
			_ = old.stop(ctx)
		}
		s.noteUnkillable(old, next)
		s.planStart("no shim is left after a swap", err)
	}
	return err
}

// reapAll waits up to reapLimit for all unkillable shims to exit.
func (s *supervisor) reapAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reapLimit)
	defer cancel()
	for len(s.unkillable) > 0 {
		if err := s.unkillable[0].kill(ctx); err != nil {
			return fmt.Errorf("%w: %w", errUnkillable, err)
		}
		s.reap(ctx)
	}
	return nil
}

// reapLimit is how long a swap waits for unkillable shims to exit.
const reapLimit = 100 * time.Millisecond

// beginBake records the new shim as active, and keeps the old one on standby.
func (s *supervisor) beginBake(p *preparedSwap, old peer) {
	now := time.Now()
	s.baking = &bake{
		report: p.swap.report, digest: *s.running.Load(), began: now, over: time.NewTimer(s.config.Bake),
		standby: old, // if it has died, run notices that next
	}
	s.shimState.setBakeEnd(now.Add(s.config.Bake))
	s.running.Store(&p.digest)
	s.setActive(p.swap.next)
	s.history.add(s.baking.report)
	s.recordActive(p.digest, s.baking.digest)
}

// commit ends the bake: the old shim is not needed any more.
func (s *supervisor) commit(ctx context.Context) {
	b := s.endBake()
	if b == nil {
		return
	}
	s.recordActive(*s.running.Load(), digest{})
	b.stopped = make(chan error, 1)
	s.committing = b
	b.began = time.Now()
	go func() {
		if b.standby == nil {
			b.stopped <- nil
			return
		}
		b.stopped <- b.standby.stop(ctx)
	}()
}

// recordCommit records that the old shim has ended.
func (s *supervisor) recordCommit(err error) {
	b := s.committing
	s.committing = nil
	if err != nil {
		s.config.Logger.Warn("the replaced shim has left something", "error", err)
	}
	b.step(SwapCommit, b.began)
	b.report.Outcome = SwapCommitted
	s.history.add(b.report)
}

// endBake ends the bake and returns it, or nil if there is none.
func (s *supervisor) endBake() *bake {
	b := s.baking
	s.baking = nil
	if b != nil {
		b.over.Stop()
		s.shimState.setBakeEnd(time.Time{})
		b.step(SwapBake, b.began)
	}
	return b
}

// rollBack returns to the binary before a shim that died during its bake. It reports whether the old shim serves again;
// if not, its binary has to be started.
func (s *supervisor) rollBack(ctx context.Context, b *bake) (revived bool) {
	s.running.Store(&b.digest)
	if b.standby == nil {
		return false
	}
	if err := s.reactivate(ctx, b.standby); err != nil {
		err = errors.Join(err, kill(ctx, b.standby))
		s.config.Logger.Error("the old shim cannot take over again; its binary is started", "error", err)
		s.noteUnkillable(b.standby)
		return false
	}
	s.serve(b.standby)
	return true
}

// reactivate makes a standby shim active again. Calls are held meanwhile, so a ping first shows whether the shim
// answers at all.
func (s *supervisor) reactivate(ctx context.Context, p peer) error {
	limited, cancel := context.WithTimeout(ctx, s.config.SwapBudget)
	defer cancel()
	if err := p.ping(limited); err != nil {
		return fmt.Errorf("it does not answer: %w", err)
	}
	ctx, cancel = context.WithTimeout(ctx, noHandoffLimit)
	defer cancel()
	if _, err := p.activate(ctx, handoff{}); err != nil {
		return fmt.Errorf("activate: %w", err)
	}
	return nil
}
