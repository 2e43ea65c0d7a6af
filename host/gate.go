package host

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/host/internal/launch"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// gate lets calls through to the active shim and holds them while there is none. Those that change something go out in the order in which they
// came; those that do not wait for nobody but the shim.
type gate struct {
	mu      sync.Mutex // guards all below; held for no longer than a look-up
	current *shim      // nil: closed
	quiet   bool       // what changes something waits, what does not goes on
	waited  int        // calls that had to wait since quiet was last set
	line    line       // of what changes something
	why     error      // why it is closed
	shutFor error      // set for good by shut
	changed chan struct{}
}

func newGate() *gate { return &gate{changed: make(chan struct{})} }

func (g *gate) set(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f()
	close(g.changed)
	g.changed = make(chan struct{})
}

func (g *gate) open(sh *shim)   { g.set(func() { g.current, g.quiet, g.why = sh, false, nil }) }
func (g *gate) close(why error) { g.set(func() { g.current, g.why = nil, why }) }

// serving is the shim that calls go to; nil: none.
func (g *gate) serving() *shim {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.current
}

// hush holds what changes something, and begins to count who waits.
func (g *gate) hush() { g.set(func() { g.quiet, g.waited = true, 0 }) }

// held is how many calls had to wait since hush.
func (g *gate) held() (calls int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.waited
}

// doors are the gate as a swap uses it.
func (h *Host) doors() doors {
	return doors{
		holdWrites: h.gate.hush, holdAll: h.gate.close, held: h.gate.held,
		open: func(s side) { h.gate.open(s.(*shim)) },
	}
}

// shut fails whoever waits, and whoever comes, with why.
func (g *gate) shut(why error) { g.set(func() { g.current, g.shutFor = nil, why }) }

// kind is what a call does to the state.
type kind bool

const (
	reads  kind = false
	writes kind = true
)

var errQuiet = errors.New("it is being replaced")

// waiter is one call at the gate.
type waiter struct {
	kind  kind
	not   *shim  // to be avoided: the call was cut off there
	place *place // in the line; nil: in none
}

// sight is what a waiter sees of the gate.
type sight struct {
	shim    *shim // nil: it has to wait
	changed chan struct{}
	why     error
	shut    error
}

// look says whether the call may go. One that changes something and may not, or finds others waiting, joins the line. One that avoids a shim
// is in none: nobody should wait for it.
func (g *gate) look(w *waiter) sight {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := sight{changed: g.changed, why: g.why, shut: g.shutFor}
	switch {
	case g.current == nil || g.current == w.not:
	case g.quiet && w.kind == writes:
		s.why = errQuiet
	case w.kind == reads || w.not != nil || len(g.line) == 0 || g.line.first(w.place):
		s.shim = g.current
	}
	if s.shim == nil && w.kind == writes && w.not == nil && w.place == nil {
		w.place = g.line.join()
	}
	return s
}

// turn is sent to when the call becomes the first of the line.
func (w *waiter) turn() <-chan struct{} {
	if w.place == nil {
		return nil
	}
	return w.place.turn
}

// leave ends the call's place in the line, if it has one.
func (g *gate) leave(w *waiter) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.line.leave(w.place)
}

// waits counts a call that has to wait.
func (g *gate) waits() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waited++
}

// sameAgain is when a call that was cut off at a shim is made again there, if that shim is still the active one: only its connection broke.
const sameAgain = 100 * time.Millisecond

// enter waits for an active shim, until what is left of the caller's hold is used up, or ctx ends. A shim that the call was cut off at is
// most likely dead: not is avoided, for a while. sent is to be called once the call is on its way: who waits behind it goes then.
func (g *gate) enter(ctx context.Context, k kind, hold *time.Duration, not *shim) (sh *shim, sent func(), err error) {
	w := &waiter{kind: k, not: not}
	sent = func() { g.leave(w) }
	if sh, err = g.wait(ctx, w, hold); err != nil {
		sent()
	}
	return sh, sent, err
}

func (g *gate) wait(ctx context.Context, w *waiter, hold *time.Duration) (*shim, error) {
	began := time.Now()
	limit := time.NewTimer(*hold)
	defer limit.Stop()
	defer func() { *hold -= time.Since(began) }()
	again := time.NewTimer(sameAgain)
	defer again.Stop()
	for first := true; ; first = false {
		seen := g.look(w)
		switch {
		case seen.shut != nil:
			return nil, seen.shut
		case seen.shim != nil:
			return seen.shim, nil
		case first:
			g.waits()
		}
		select {
		case <-seen.changed:
		case <-w.turn():
		case <-again.C:
			w.not = nil
		case <-ctx.Done():
			return nil, noShim(seen.why, context.Cause(ctx))
		case <-limit.C:
			return nil, noShim(seen.why, errHeld)
		}
	}
}

// unanswered is the error of a call that its shim has not answered in time: if nobody is active any more, that is why.
func (g *gate) unanswered(end error) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.current != nil || g.why == nil {
		return end
	}
	return noShim(g.why, end)
}

var errHeld = errors.New("the call was held as long as it may be")

// noShim is the error of a call that nobody answered: why there is no shim, and what ended the wait.
func noShim(why, end error) error {
	if why == nil {
		why = errors.New("the active one does not answer")
	}
	return registry.Errorf(registry.ErrUnavailable, "no shim is active (%w): %w", end, why)
}

// read makes a call that changes nothing at the active shim.
func (h *Host) read(ctx context.Context, f func(ctx context.Context, conn grpc.ClientConnInterface) error) error {
	return h.make(ctx, reads, at(f))
}

// call makes one that changes something.
func (h *Host) call(ctx context.Context, f func(ctx context.Context, conn grpc.ClientConnInterface) error) error {
	return h.make(ctx, writes, at(f))
}

// at is a call at a shim, of which only the connection counts.
func at(f func(ctx context.Context, conn grpc.ClientConnInterface) error) func(context.Context, *shim) error {
	return func(ctx context.Context, sh *shim) error { return f(ctx, sh.process.Conn()) }
}

// make makes a call at the active shim. One that is cut off, because that shim died, is made again at the next: reads may be repeated,
// and what changes state carries an operation id. All waiting for shims together is at most MaxHold, so that a call which kills every
// shim ends.
func (h *Host) make(ctx context.Context, k kind, f func(ctx context.Context, sh *shim) error) error {
	hold := h.config.MaxHold
	var cut *shim
	var had time.Duration // so long shims have had it that were cut off
	if k == writes {
		defer h.traffic.begins()()
	}
	for {
		sh, sent, err := h.gate.enter(ctx, k, &hold, cut)
		if err != nil {
			return err
		}
		began := time.Now()
		err = f(launch.OnSent(ctx, sent), sh)
		sent()
		switch {
		case !cutOff(err):
			return late(ctx, wire.Error(err))
		case outOfTime(ctx, err):
			<-ctx.Done()
			return h.gate.unanswered(context.Cause(ctx))
		}
		if cut = sh; k == writes {
			had += time.Since(began)
			hold -= giveWay(ctx, had)
		}
	}
}

const (
	longCall = 500 * time.Millisecond // what was at shims for so long when it is cut off waits for something slow
	wayGiven = 50 * time.Millisecond  // about as long as a new shim needs for the calls that were held
	mostWay  = 250 * time.Millisecond // that is given
	wayShare = 16                     // of the time that the call took so far, more is given
)

// giveWay lets calls that were held go first where a call that was cut off is made again, after shims have had it for a long time anyway. With many
// of those a new shim would have them to do first; so they do not come all at once either.
func giveWay(ctx context.Context, after time.Duration) (waited time.Duration) {
	if after < longCall {
		return 0
	}
	began := time.Now()
	timer := time.NewTimer(wayGiven/2 + rand.N(min(max(wayGiven, after/wayShare), mostWay)))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return time.Since(began)
}

// mayBeLate are the errors that a call may have because its caller's time was up.
var mayBeLate = []error{registry.ErrUnavailable, registry.ErrUncertain, context.DeadlineExceeded}

// late is the error of a call. Where the caller's time is up, it says so as well: what was waited for is one matter, that the wait has ended another.
func late(ctx context.Context, err error) error {
	if !slices.ContainsFunc(mayBeLate, func(kind error) bool { return errors.Is(err, kind) }) || !timeIsUp(ctx) {
		return err
	}
	<-ctx.Done()
	if end := context.Cause(ctx); !errors.Is(err, end) {
		return fmt.Errorf("%w: %w", end, err)
	}
	return err
}

// timeIsUp says whether the caller's time is up, or is in a moment: the shim has the same deadline, and its clock may be the first.
func timeIsUp(ctx context.Context) bool {
	end, limited := ctx.Deadline()
	return ctx.Err() != nil || limited && time.Until(end) < 50*time.Millisecond
}

// outOfTime says whether a call was cut off because its caller's time is up. Where its shim has ended, or is not active, what time is left is for the next
// one: it may need less.
func outOfTime(ctx context.Context, err error) bool {
	return ctx.Err() != nil || timeIsUp(ctx) && status.Code(err) != codes.Unavailable
}

// cutOff says whether nobody has answered a call whose caller still waits: the transport failed, its connection was closed after the
// shim's death, the time was up as the transport has it, or the shim is not active. An answer of the shim carries a detail.
func cutOff(err error) bool {
	st, is := status.FromError(err)
	return is && len(st.Details()) == 0 && slices.Contains([]codes.Code{codes.Unavailable, codes.Canceled, codes.DeadlineExceeded}, st.Code())
}
