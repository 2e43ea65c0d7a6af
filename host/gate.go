package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/proto/wire"
	"holdfast/registry"
)

// gate lets calls through to the active shim and holds them while there is none. While it is quiet it holds writes only.
type gate struct {
	mu      sync.Mutex // guards all below; held for no longer than a look-up
	current *shim      // nil: closed
	quiet   bool       // what changes something waits, what does not goes on
	waited  int        // calls that had to wait since quiet was last set
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

// sight is what a call sees of the gate.
type sight struct {
	shim    *shim // nil: it has to wait
	changed chan struct{}
	why     error
	shut    error
}

// look returns the shim that a call may go to, or why it has to wait. The call was cut off at the shim avoid, if any.
func (g *gate) look(k kind, avoid *shim) sight {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := sight{changed: g.changed, why: g.why, shut: g.shutFor}
	switch {
	case g.current == nil || g.current == avoid:
	case g.quiet && k == writes:
		s.why = errQuiet
	default:
		s.shim = g.current
	}
	return s
}

// waits counts a call that has to wait.
func (g *gate) waits() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.waited++
}

// sameAgain is when a call that was cut off at a shim is made again there, if that shim is still the active one: only its connection broke.
const sameAgain = 100 * time.Millisecond

// enter waits for an active shim, until what is left of the caller's hold is used up, or ctx ends. A call that was cut off at a
// shim avoids that shim for a while: it is most likely dead.
func (g *gate) enter(ctx context.Context, k kind, hold *time.Duration, avoid *shim) (*shim, error) {
	began := time.Now()
	limit := time.NewTimer(*hold)
	defer limit.Stop()
	defer func() { *hold -= time.Since(began) }()
	again := time.NewTimer(sameAgain)
	defer again.Stop()
	for first := true; ; first = false {
		seen := g.look(k, avoid)
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
		case <-again.C:
			avoid = nil
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
	for {
		sh, err := h.gate.enter(ctx, k, &hold, cut)
		if err != nil {
			return err
		}
		err = f(ctx, sh)
		switch {
		case !cutOff(err):
			return late(ctx, wire.Error(err))
		case outOfTime(ctx, err):
			<-ctx.Done()
			return h.gate.unanswered(context.Cause(ctx))
		}
		cut = sh
	}
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
