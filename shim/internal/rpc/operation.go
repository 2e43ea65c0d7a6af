package rpc

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// request is a request with an operation ID. Requests that change nothing may leave the ID empty.
type request interface {
	proto.Message
	GetCall() *pb.Call
}

// change is mutate with the error as a gRPC status. It also returns the Answer to put into the reply.
func change[T any](
	ctx context.Context, s *Server, method string, req request,
	run func(context.Context, *Active, registry.Call) (T, error),
) (T, *pb.Answer, error) {
	answer, err := mutate(ctx, s, method, req, run)
	if err != nil {
		return answer, nil, wire.Status(err)
	}
	return answer, s.latest(ctx), nil
}

// do answers a mutating call as change does. The answer has nothing but the index.
func do(
	ctx context.Context, s *Server, method string, req request,
	run func(context.Context, *Active, registry.Call) error,
) (*pb.Answer, error) {
	_, at, err := change(ctx, s, method, req,
		func(ctx context.Context, a *Active, call registry.Call) (struct{}, error) {
			return struct{}{}, run(ctx, a, call)
		})
	return at, err
}

// mutate answers a mutating call. It runs the operation, unless the operation has a stored answer. If another call runs
// the operation already, mutate returns the answer of that call. If that caller gave up, mutate runs the operation.
func mutate[T any](
	ctx context.Context, s *Server, method string, req request,
	run func(context.Context, *Active, registry.Call) (T, error),
) (T, error) {
	var none T
	a, err := s.activeFor(req)
	if err != nil {
		return none, err
	}
	call, err := a.callOf(method, req)
	if err != nil {
		return none, err
	}
	for {
		running, first, err := s.operations.start(call)
		if err != nil {
			return none, err
		}
		if first {
			answer, err := execute(ctx, a, call, run)
			running.answer, running.err, running.abandoned = answer, err, err != nil && ctx.Err() != nil
			s.operations.finish(running)
			s.log.Debug("call", "method", method, "operation", call.ID, "error", err)
			return answer, err
		}
		answer, again, err := join[T](ctx, running)
		if !again {
			return answer, err
		}
	}
}

// callLimit bounds a call whose caller has set no deadline.
const callLimit = 15 * time.Minute

// withDeadline returns ctx. If ctx has no deadline, it adds one after limit.
func withDeadline(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if _, has := ctx.Deadline(); has {
		return ctx, func() {}
	}
	return context.WithTimeoutCause(ctx, limit, noSuccess(limit))
}

// noSuccess is the cause of the context of a call that ended at its limit, because its caller set no deadline.
type noSuccess time.Duration

func (n noSuccess) Error() string {
	return fmt.Sprintf("no success within %v; set a deadline of your own to wait for longer, or call again",
		time.Duration(n))
}

func (n noSuccess) Unwrap() error { return context.DeadlineExceeded }

// execute returns the stored answer of the operation, or runs the operation. If the shim cannot answer any more, it
// returns errNotActive, and the host repeats the call at the next shim.
func execute[T any](
	caller context.Context, a *Active, call registry.Call, run func(context.Context, *Active, registry.Call) (T, error),
) (T, error) {
	caller, end := withDeadline(caller, callLimit)
	defer end()
	ctx, cancel := a.whileActive(caller)
	defer cancel()
	answer, found, err := replay[T](ctx, a, call)
	if !found && err == nil {
		answer, err = run(ctx, a, call)
	}
	if err != nil && caller.Err() == nil && a.cannotAnswer(caller, err) {
		return answer, errNotActive
	}
	return answer, err
}

// replay returns the stored answer of the operation. found is false if the operation is unknown, or has begun without
// an answer yet. If the operation ID was used for another request, replay returns an ErrInvalid.
func replay[T any](ctx context.Context, a *Active, call registry.Call) (answer T, found bool, err error) {
	err = a.State.View(ctx, func(v registry.View) error {
		op, ok := v.Operation(call.ID)
		if !ok {
			return nil
		}
		if op.Method != call.Method || op.Digest != call.Digest {
			return registry.Invalid("operation id %q was used for another request (%s); mint a new one", call.ID,
				op.Method)
		}
		if len(op.Answer) == 0 {
			return nil // the operation has only begun
		}
		found = true
		return json.Unmarshal(op.Answer, &answer)
	})
	return answer, found, err
}

// callOf returns the call with a digest of its request. The digest shows whether a request with the same ID is a
// replay.
func (a *Active) callOf(method string, req request) (registry.Call, error) {
	id, err := registry.ParseOperationID(req.GetCall().GetOperationId())
	if err != nil {
		return registry.Call{}, fmt.Errorf("%s changes state: %w", method, err)
	}
	if req, err = a.Literals.hashSecrets(req); err != nil {
		return registry.Call{}, fmt.Errorf("%s: %w", method, err)
	}
	encoded, err := proto.MarshalOptions{Deterministic: true}.Marshal(req)
	if err != nil {
		return registry.Call{}, registry.Invalid("%s: %w", method, err)
	}
	sum := sha256.Sum256(encoded)
	return registry.Call{ID: id, Method: method, Digest: hex.EncodeToString(sum[:])}, nil
}

// operations holds the mutating calls in flight.
type operations struct {
	mu       sync.Mutex // guards the fields below; held only briefly
	inFlight map[registry.OperationID]*operation
	closed   bool
}

// operation is one mutating call in flight. The fields after done are set before done is closed.
type operation struct {
	call      registry.Call
	done      chan struct{}
	answer    any
	err       error
	abandoned bool // the caller gave up before there was an answer
}

// start returns the operation with the ID of the call. first reports whether this call started it.
func (o *operations) start(call registry.Call) (running *operation, first bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if running := o.inFlight[call.ID]; running != nil {
		if running.call != call {
			return nil, false, registry.Invalid("operation id %q is in use for another request (%s); mint a new one",
				call.ID, running.call.Method)
		}
		return running, false, nil
	}
	if o.closed {
		return nil, false, errNotActive
	}
	if o.inFlight == nil {
		o.inFlight = map[registry.OperationID]*operation{}
	}
	running = &operation{call: call, done: make(chan struct{})}
	o.inFlight[call.ID] = running
	return running, true, nil
}

func (o *operations) finish(running *operation) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.inFlight, running.call.ID)
	close(running.done)
}

// join waits for an operation that another call has started. again means that the other caller gave up, so this call
// has to run the operation.
func join[T any](ctx context.Context, running *operation) (answer T, again bool, err error) {
	select {
	case <-running.done:
	case <-ctx.Done():
		return answer, false, context.Cause(ctx)
	}
	if running.abandoned && ctx.Err() == nil {
		return answer, true, nil
	}
	answer, _ = running.answer.(T)
	return answer, false, running.err
}

// close refuses new operations.
func (o *operations) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
}

// await waits for the operations in flight, once new ones are refused.
func (o *operations) await(ctx context.Context) error {
	o.mu.Lock()
	inFlight := slices.Collect(maps.Values(o.inFlight))
	o.mu.Unlock()
	for _, running := range inFlight {
		select {
		case <-running.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

func (o *operations) open() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = false
}
