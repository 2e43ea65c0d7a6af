package rpc

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// request is a mutating request.
type request interface {
	proto.Message
	GetCall() *pb.Call
}

// once answers a mutating call: run does it, unless it is under way or answered already.
func once[T any](ctx context.Context, s *Server, method string, req request, run func(context.Context, *Active, registry.Call) (T, error)) (T, error) {
	var none T
	a, err := s.now(req)
	if err != nil {
		return none, err
	}
	call, err := callOf(method, req)
	if err != nil {
		return none, err
	}
	for {
		f, first, err := s.flights.board(call)
		if err != nil {
			return none, err
		}
		if first {
			answer, err := fly(ctx, a, call, run)
			f.answer, f.err, f.abandoned = answer, err, err != nil && ctx.Err() != nil
			s.flights.land(f)
			s.log.Debug("call", "method", method, "operation", call.ID, "error", err)
			return answer, err
		}
		answer, again, err := join[T](ctx, f)
		if !again {
			return answer, err
		}
	}
}

// callLimit is how long a call may take whose caller has set no deadline: whatever waits has one.
const callLimit = 15 * time.Minute

// limited is ctx with a deadline, if it has none.
func limited(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has {
		return ctx, func() {}
	}
	return context.WithTimeoutCause(ctx, callLimit, registry.Errorf(context.DeadlineExceeded,
		"no success within %v; set a deadline of your own to wait for longer, or call again", callLimit))
}

// fly looks for a stored answer, and else runs the call. An error that only tells of this shim's end is nobody's answer.
func fly[T any](caller context.Context, a *Active, call registry.Call, run func(context.Context, *Active, registry.Call) (T, error)) (T, error) {
	caller, end := limited(caller)
	defer end()
	ctx, cancel := a.bound(caller)
	defer cancel()
	answer, found, err := replay[T](ctx, a, call)
	if !found && err == nil {
		answer, err = run(ctx, a, call)
	}
	if err != nil && caller.Err() == nil && a.over(caller, err) {
		return answer, errNotActive
	}
	return answer, err
}

// replay is the answer that was stored with the operation.
func replay[T any](ctx context.Context, a *Active, call registry.Call) (answer T, found bool, err error) {
	err = a.Log.View(ctx, func(v registry.View) error {
		op, ok := v.Operation(call.ID)
		if !ok {
			return nil
		}
		if op.Method != call.Method || op.Digest != call.Digest {
			return registry.Invalid("operation id %q was used for another request (%s); mint a new one", call.ID, op.Method)
		}
		if len(op.Answer) == 0 {
			return nil // it has only begun
		}
		found = true
		return json.Unmarshal(op.Answer, &answer)
	})
	return answer, found, err
}

func callOf(method string, req request) (registry.Call, error) {
	id, err := registry.ParseOperationID(req.GetCall().GetOperationId())
	if err != nil {
		return registry.Call{}, fmt.Errorf("%s changes state: %w", method, err)
	}
	encoded, err := proto.MarshalOptions{Deterministic: true}.Marshal(req)
	if err != nil {
		return registry.Call{}, registry.Invalid("%s: %w", method, err)
	}
	sum := sha256.Sum256(encoded)
	return registry.Call{ID: id, Method: method, Digest: hex.EncodeToString(sum[:])}, nil
}

// flights are the mutating calls under way.
type flights struct {
	mu     sync.Mutex // guards all below; held for no longer than a look-up
	under  map[registry.OperationID]*flight
	closed bool
	landed chan struct{} // closed when the next flight lands, or begins to wait for the end of a pause; nil: nobody waits for that
}

// flight is one call under way. What follows done is readable once that is closed.
type flight struct {
	call      registry.Call
	since     time.Time
	waits     bool // for the end of a pause: it lands after that, or not here. Guarded by flights
	done      chan struct{}
	answer    any
	err       error
	abandoned bool // its caller went away before there was an answer
}

// board joins the flight of the call's id, or is its first.
func (fs *flights) board(call registry.Call) (f *flight, first bool, err error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if f := fs.under[call.ID]; f != nil {
		if f.call != call {
			return nil, false, registry.Invalid("operation id %q is in use for another request (%s); mint a new one", call.ID, f.call.Method)
		}
		return f, false, nil
	}
	if fs.closed {
		return nil, false, errNotActive
	}
	if fs.under == nil {
		fs.under = map[registry.OperationID]*flight{}
	}
	f = &flight{call: call, since: time.Now(), done: make(chan struct{})}
	fs.under[call.ID] = f
	return f, true, nil
}

func (fs *flights) land(f *flight) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	delete(fs.under, f.call.ID)
	close(f.done)
	fs.look()
}

// paused notes that a call of the flight of an operation waits for the end of a pause, or does not wait any more.
func (fs *flights) paused(op registry.OperationID, waits bool) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if f := fs.under[op]; f != nil {
		f.waits = waits
		fs.look()
	}
}

// look has whoever waits for flights look again.
func (fs *flights) look() {
	if fs.landed != nil {
		close(fs.landed)
		fs.landed = nil
	}
}

// join waits for another caller's flight. again: that caller gave up, so this one has to run the call itself.
func join[T any](ctx context.Context, f *flight) (answer T, again bool, err error) {
	select {
	case <-f.done:
	case <-ctx.Done():
		return answer, false, context.Cause(ctx)
	}
	if f.abandoned && ctx.Err() == nil {
		return answer, true, nil
	}
	answer, _ = f.answer.(T)
	return answer, false, f.err
}

// close refuses new flights and waits for those under way; with long only for those that have not been under way for so long, and do not wait for the
// end of a pause.
func (fs *flights) close(ctx context.Context, long time.Duration) error {
	for {
		landed, wait := fs.closing(long)
		if landed == nil {
			return nil
		}
		timer := time.NewTimer(wait)
		select {
		case <-landed:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		}
		timer.Stop()
	}
}

// forEver is how long a flight is waited for that may take as long as it likes.
const forEver = 24 * time.Hour

// closing is how long a flight is to be waited for still, and what is closed when one lands; nil: none is.
func (fs *flights) closing(long time.Duration) (landed chan struct{}, wait time.Duration) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.closed = true
	if long <= 0 {
		long = forEver
	}
	for _, f := range fs.under {
		if long == forEver || !f.waits {
			wait = max(wait, long-time.Since(f.since))
		}
	}
	if wait <= 0 {
		return nil, 0
	}
	if fs.landed == nil {
		fs.landed = make(chan struct{})
	}
	return fs.landed, wait
}

func (fs *flights) open() {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.closed = false
}
