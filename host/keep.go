package host

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// keeper has one shim active until ctx ends: it starts one that dies again, kills one that is mute, carries out swaps, and stands by while the new
// one bakes. All of it is done on one goroutine, so there is never more than one change of shim at a time. What takes long is
// done beside it: a start, and the end of an old shim that is not needed any more.
type keeper struct {
	*Host
	doors
	active   kept            // nil: none, and the next start is due at next, or under way
	acting   context.Context // ends when active is it no more
	resign   context.CancelFunc
	born     time.Time     // of active
	muted    chan struct{} // closed once active has given no answer for too long
	silenced bool          // active was killed for that
	wait     *backoff
	next     *time.Timer // nil: no start is planned
	starting *start      // nil: none is under way
	baking   *bake       // nil: no swap is young
	leaving  *bake       // is over, and its old shim is being ended; nil: none is
	waiting  *ask        // for either; nil: none does
	undead   []kept      // were killed, may have the state, and have not died: nobody takes their place before they have
}

// start is a start that is under way.
type start struct {
	done    chan struct{} // closed once shim and err are there
	shim    *shim         // with an err: one that does not die; nil: none is left
	err     error
	callOff context.CancelCauseFunc
}

const startGrace = time.Second // for a start that is under way when a candidate is ready: one that goes well is done by then

var errCalledOff = errors.New("the start was called off for a swap whose candidate is ready")

// kept is a side as it is kept: active, or standing by.
type kept interface {
	side
	// answers says why it does not answer.
	answers(ctx context.Context) error
	// end ends the process, which may tidy up first.
	end(ctx context.Context) error
	pid() int
}

// bake is a swap whose old shim stands by.
type bake struct {
	swapped SwapReport
	parked  kept // nil: it has died since
	digest  digest
	began   time.Time
	over    *time.Timer
	proven  chan struct{} // closed once the new shim has answered after that; nil: it is not over yet
	left    chan error    // how parked has ended, once it is not needed any more
}

// step notes that a step of the swap has ended.
func (b *bake) step(name SwapStep, began time.Time) {
	b.swapped.Steps = append(b.swapped.Steps, SwapStepTime{name, time.Since(began)})
}

// ask is a swap that is prepared: its candidate has rehearsed.
type ask struct {
	ctx    context.Context
	swap   *swap
	fresh  kept
	digest digest
	done   chan error
}

// newKeeper keeps what begins with an active shim.
func newKeeper(h *Host, d doors, first kept) *keeper {
	k := &keeper{Host: h, doors: d, resign: func() {}, wait: &backoff{}}
	k.serves(first)
	return k
}

// run returns what went wrong with the end of the last shim.
func (k *keeper) run(ctx context.Context) error {
	for {
		if a := k.ready(); a != nil {
			a.done <- k.swap(ctx, a)
		}
		select {
		case <-k.dead():
			k.died(ctx)
		case <-k.mute():
			k.silence(ctx)
		case <-k.due():
			k.start(ctx)
		case <-k.parkedDied():
			k.config.Logger.Warn("the shim that stands by has died; a rollback would start its binary anew")
			if err := k.baking.parked.end(ctx); err != nil {
				k.config.Logger.Warn("a dead shim has left something", "error", err)
			}
			k.baking.parked = nil
		case <-k.baked():
			k.prove()
		case <-k.proven():
			k.commit(ctx)
		case err := <-k.left():
			k.committed(err)
		case <-k.started():
			k.begun(ctx)
		case <-k.departed():
			k.buries(ctx)
		case k.waiting = <-k.asks():
			k.commit(ctx)
			k.hasten()
		case <-ctx.Done():
			return k.end(ctx)
		}
	}
}

func (k *keeper) dead() <-chan struct{} {
	if k.active == nil {
		return nil
	}
	return k.active.dead()
}

func (k *keeper) mute() <-chan struct{} {
	if k.active == nil {
		return nil
	}
	return k.muted
}

func (k *keeper) due() <-chan time.Time {
	if k.next == nil || len(k.undead) > 0 {
		return nil
	}
	return k.next.C
}

func (k *keeper) parkedDied() <-chan struct{} {
	if k.baking == nil || k.baking.parked == nil {
		return nil
	}
	return k.baking.parked.dead()
}

func (k *keeper) baked() <-chan time.Time {
	if k.baking == nil {
		return nil
	}
	return k.baking.over.C
}

func (k *keeper) proven() <-chan struct{} {
	if k.baking == nil {
		return nil
	}
	return k.baking.proven
}

func (k *keeper) left() <-chan error {
	if k.leaving == nil {
		return nil
	}
	return k.leaving.left
}

func (k *keeper) started() <-chan struct{} {
	if k.starting == nil {
		return nil
	}
	return k.starting.done
}

func (k *keeper) departed() <-chan struct{} {
	if len(k.undead) == 0 {
		return nil
	}
	return k.undead[0].dead()
}

// asks are swaps that are prepared. The next one is taken once the one before is done.
func (k *keeper) asks() <-chan *ask {
	if k.waiting != nil {
		return nil
	}
	return k.swaps
}

// ready is the swap that waits, once nothing is in its way; nil: none.
func (k *keeper) ready() *ask {
	if k.leaving != nil || k.starting != nil {
		return nil
	}
	a := k.waiting
	k.waiting = nil
	return a
}

// end ends whoever lives.
func (k *keeper) end(ctx context.Context) error {
	if k.next != nil {
		k.next.Stop()
	}
	if k.waiting != nil {
		k.waiting.done <- errors.Join(errClosed, k.waiting.swap.drop(ctx))
	}
	var err error
	if k.active != nil {
		err = k.active.end(ctx)
	}
	if b := k.over(); b != nil && b.parked != nil {
		err = errors.Join(err, b.parked.end(ctx))
	}
	if k.starting != nil {
		<-k.starting.done // soon, as ctx has ended
		if k.starting.shim != nil {
			err = errors.Join(err, k.starting.shim.end(ctx))
		}
	}
	for _, sh := range k.undead {
		err = errors.Join(err, sh.end(ctx))
	}
	if k.leaving != nil {
		k.committed(<-k.leaving.left)
	}
	return err
}

var errDied = errors.New("it has died")

// died handles the death of the active shim. Calls are held until another shim serves, so that is done first. What may
// take long comes after it: reading the dead shim's last words, removing what it left, and writing to a disk that may hang.
func (k *keeper) died(ctx context.Context) {
	dead, young := k.active, k.over()
	k.holdAll(errDied)
	k.standing.fails(errDied, k.wait.taken, k.running.now(), time.Time{})
	revived := young != nil && k.rollBack(ctx, young)
	silenced := k.silenced
	if revived {
		k.serves(young.parked)
	}
	why := dead.death()
	if silenced {
		why = fmt.Errorf("it gave no answer for %s, and was killed", k.config.AnswerTimeout)
	}
	if young != nil {
		young.swapped.Outcome, young.swapped.Failed, young.swapped.Reason = SwapRolledBack, SwapBake, why.Error()
		k.history.note(young.swapped) // on disk later
	}
	if revived {
		k.standing.explains(why)
		k.config.Logger.Error("the new shim has died; the old one has taken over again", "error", why)
	} else {
		if time.Since(k.born) > goodLife {
			k.wait = &backoff{}
		}
		if k.none("the shim has died", why) == 0 && len(k.undead) == 0 {
			k.start(ctx)
		}
	}
	if err := dead.end(ctx); err != nil {
		k.config.Logger.Warn("a dead shim has left something", "error", err)
	}
	if young != nil {
		k.history.add(young.swapped)
		k.chosen(young.digest, digest{})
	}
}

// silence kills a shim that gives no answer. Where it does not die, calls wait until it does.
func (k *keeper) silence(ctx context.Context) {
	k.muted, k.silenced = nil, true
	why := fmt.Errorf("the shim has given no answer for %s, and is killed", k.config.AnswerTimeout)
	k.holdAll(why)
	k.standing.fails(why, k.wait.taken, k.running.now(), time.Time{})
	ctx, cancel := context.WithTimeout(ctx, killLimit)
	defer cancel()
	if err := k.active.kill(ctx); err != nil {
		why = fmt.Errorf("%w: %w: %w", why, errNobody, err)
		k.holdAll(why)
		k.standing.fails(why, k.wait.taken, k.running.now(), time.Time{})
		k.outlived(k.active)
		k.config.Logger.Error("the shim gives no answer and does not die; calls wait until it does", "error", err)
	}
}

// outlived notes those of the sides that were killed and live.
func (k *keeper) outlived(sides ...kept) {
	for _, sh := range sides {
		if !gone(sh) {
			k.undead = append(k.undead, sh)
			k.config.Logger.Error("a shim does not die; none is started before it does", "pid", sh.pid())
		}
	}
}

// buries forgets one that has died at last. Once there is no other, the start that is planned is due.
func (k *keeper) buries(ctx context.Context) {
	if err := k.undead[0].end(ctx); err != nil {
		k.config.Logger.Warn("a dead shim has left something", "error", err)
	}
	k.undead = k.undead[1:]
}

// none records that no shim is active, what happened and why, and plans the next start. It returns the wait until then.
func (k *keeper) none(what string, why error) (wait time.Duration) {
	k.active = nil
	k.resign()
	k.holdAll(why)
	wait = k.wait.take()
	k.next = time.NewTimer(wait)
	due := time.Now().Add(wait)
	if len(k.undead) > 0 {
		due = time.Time{} // nobody knows
	}
	k.standing.fails(why, k.wait.taken, k.running.now(), due)
	k.config.Logger.Error(what+"; it is started again", "in", wait, "failures in a row", k.wait.taken, "error", why)
	return wait
}

// start starts the shim's binary.
func (k *keeper) start(ctx context.Context) {
	k.next.Stop()
	k.next = nil
	limited, callOff := context.WithCancelCause(ctx)
	s := &start{done: make(chan struct{}), callOff: callOff}
	k.starting = s
	go func() {
		s.shim, s.err = k.Host.start(limited, ctx)
		close(s.done)
	}()
	if k.waiting != nil {
		k.hasten()
	}
}

// hasten has a start that is under way end soon, well or not: it may hang, and the candidate that waits takes its place.
func (k *keeper) hasten() {
	if s := k.starting; s != nil {
		time.AfterFunc(startGrace, func() { s.callOff(errCalledOff) })
	}
}

// begun goes on from a start that has ended.
func (k *keeper) begun(ctx context.Context) {
	s := k.starting
	k.starting = nil
	s.callOff(nil)
	if s.err != nil && s.shim != nil {
		k.outlived(s.shim)
	}
	switch {
	case s.err == nil:
		k.serves(s.shim)
	case ctx.Err() == nil:
		k.none("the shim cannot be started", s.err)
	}
}

// serves has calls go to the shim.
func (k *keeper) serves(sh kept) {
	k.took(sh)
	k.open(sh)
}

// took notes that the shim is the active one.
func (k *keeper) took(sh kept) {
	if k.next != nil {
		k.next.Stop()
		k.next = nil
	}
	k.resign()
	k.active, k.born, k.silenced = sh, time.Now(), false
	k.acting, k.resign = context.WithCancel(k.closing)
	k.standing.serves(sh.pid(), k.running.now())
	k.heed()
}

// swap hands over to the candidate.
func (k *keeper) swap(ctx context.Context, a *ask) error {
	if err := k.allDead(ctx); err != nil {
		return errors.Join(a.swap.step(SwapActivate, func() error { return err }), a.swap.drop(ctx))
	}
	old := k.active
	a.swap.old = old
	a.swap.report.From = k.running.now().SHA256 // which a rollback may have changed since the swap began
	active, err := a.swap.handOver(a.ctx)
	switch {
	case active == side(a.fresh):
		k.swapped(a, old)
	case old == nil: // nobody is, as before: the next start is planned
		k.outlived(a.fresh)
	case active == side(old): // as before
	default:
		if !errors.Is(err, errNobody) {
			_ = old.end(ctx)
		}
		k.outlived(old, a.fresh)
		k.none("no shim is left of a swap", err)
	}
	return err
}

// allDead is why nobody may be active.
func (k *keeper) allDead(ctx context.Context) error {
	soon, cancel := context.WithTimeout(ctx, noticed)
	defer cancel()
	for len(k.undead) > 0 {
		if err := k.undead[0].kill(soon); err != nil {
			return fmt.Errorf("%w: %w", errNobody, err)
		}
		k.buries(ctx)
	}
	return nil
}

// swapped begins the bake.
func (k *keeper) swapped(a *ask, old kept) {
	now, bakes := time.Now(), k.config.Bake
	k.baking = &bake{swapped: a.swap.report, digest: k.running.now(), began: now, over: time.NewTimer(bakes)}
	k.standing.bakes(now.Add(bakes))
	k.baking.parked = old // if it has died, that is noticed next
	k.running.set(a.digest)
	k.took(a.fresh)
	k.history.add(k.baking.swapped)
	k.chosen(a.digest, k.baking.digest)
}

// commit ends the bake: the old shim is not needed any more.
func (k *keeper) commit(ctx context.Context) {
	b := k.over()
	if b == nil {
		return
	}
	k.chosen(k.running.now(), digest{})
	b.left = make(chan error, 1)
	k.leaving = b
	b.began = time.Now()
	go func() {
		if b.parked == nil {
			b.left <- nil
			return
		}
		b.left <- b.parked.end(ctx)
	}()
}

// committed notes that the old shim has ended.
func (k *keeper) committed(err error) {
	b := k.leaving
	k.leaving = nil
	if err != nil {
		k.config.Logger.Warn("the replaced shim has left something", "error", err)
	}
	b.step(SwapCommit, b.began)
	b.swapped.Outcome = SwapCommitted
	k.history.add(b.swapped)
}

// over ends the bake, whatever follows; nil: no swap is young.
func (k *keeper) over() *bake {
	b := k.baking
	k.baking = nil
	if b != nil {
		b.over.Stop()
		k.standing.bakes(time.Time{})
		b.step(SwapBake, b.began)
	}
	return b
}

// rollBack returns to the binary before a shim that died while its swap baked. It reports whether the old shim is active
// again; if not, its binary has to be started.
func (k *keeper) rollBack(ctx context.Context, b *bake) bool {
	k.running.set(b.digest)
	if b.parked == nil {
		return false
	}
	if err := k.revive(ctx, b.parked); err != nil {
		k.config.Logger.Error("the old shim cannot take over again; its binary is started", "error", errors.Join(err, ended(ctx, b.parked)))
		k.outlived(b.parked)
		return false
	}
	return true
}

// revive makes a shim active that stood by. One that does not answer is not waited for, as calls are held.
func (k *keeper) revive(ctx context.Context, sh kept) error {
	soon, done := context.WithTimeout(ctx, k.config.SwapBudget)
	defer done()
	if err := sh.answers(soon); err != nil {
		return fmt.Errorf("it does not answer: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, activateLater)
	defer cancel()
	if _, err := sh.activate(ctx, left{}); err != nil {
		return fmt.Errorf("activate: %w", err)
	}
	return nil
}
