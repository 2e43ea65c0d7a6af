package host

import (
	"context"
	"errors"
	"time"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// WatchOptions select events.
type WatchOptions struct {
	After    Seq  // number of the last event seen, or 0
	Snapshot bool // begin with a resync, whatever After is
	Past     bool // end after the events that existed at the call
	Role     Role
	Plugin   PluginID
	Kinds    []EventKind
}

// Watch calls fn with every event after the cursor, in order, until fn returns an error or ctx ends. If the shim ends,
// Watch continues at the next shim. If the cursor is too old or unknown, the first event is a resync, which carries the
// current state instead. Watch returns fn's error, the context's cause, or the error of invalid options.
//
// With Past, Watch returns nil after every event of a change that was acknowledged before the call, and maybe some
// later ones. Such a Watch waits for shims for at most MaxHold in all, as a call does, and then returns ErrUnavailable.
func (h *Host) Watch(ctx context.Context, o WatchOptions, fn func(Event) error) error {
	req := &pb.WatchRequest{
		Call: &pb.Call{}, After: uint64(o.After), Snapshot: o.Snapshot, Role: string(o.Role), Plugin: string(o.Plugin),
	}
	for _, k := range o.Kinds {
		req.Kinds = append(req.Kinds, string(k))
	}
	err := h.follow(ctx, o.Past, req, func(reply *pb.WatchReply) error {
		req.After, req.Snapshot = reply.GetAnswer().GetIndex(), false // where the next shim continues
		switch {
		case reply.GetEvent() != nil:
			return fn(wire.Event(reply.GetEvent()))
		case o.Past: // a message without an event follows the last past one
			return errPastEnded
		}
		return nil
	})
	if err == errPastEnded {
		return nil
	}
	return err
}

// errPastEnded ends a watch of past events.
var errPastEnded = errors.New("all past events have been received")

// A stream that ends is opened again after a pause that doubles until it brings a message.
const (
	firstReopen   = 20 * time.Millisecond
	longestReopen = time.Second
)

// follow calls fn with each message of a stream, and opens the stream again whenever it ends. follow returns when ctx
// ends, fn returns an error, the host is closed, or the shim refuses the request itself. If ends is set, the stream has
// an end, and follow waits for shims for at most MaxHold in all, as a call does.
func (h *Host) follow(ctx context.Context, ends bool, req *pb.WatchRequest, fn func(*pb.WatchReply) error) error {
	pauses, wait := newBackoff(firstReopen, longestReopen), shimWait{left: h.config.MaxHold}
	var stop error
	for {
		err := h.openOnce(ctx, &wait, req, func(m *pb.WatchReply) error {
			pauses.Reset()
			stop = fn(m)
			return stop
		})
		pause := pauses.NextBackOff()
		switch {
		case stop != nil:
			return stop
		case ctx.Err() != nil:
			return causeOf(ctx, err)
		case errors.Is(err, registry.ErrInvalid),
			errors.Is(err, registry.ErrUnsupported),
			errors.Is(err, registry.ErrDenied),
			errors.Is(err, registry.ErrExhausted): // a message beyond the size limit would come again
			return err
		case !ends:
			wait.left = h.config.MaxHold
		case wait.left <= pause:
			return err
		}
		if h.closing.Err() != nil {
			return context.Cause(h.closing)
		}
		h.config.Logger.Debug("opening a stream again", "in", pause, "error", err)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return causeOf(ctx, err)
		}
		wait.left -= pause
	}
}

// causeOf returns the cause of a context that has ended, with why there was no shim if the call waited for one.
func causeOf(ctx context.Context, err error) error {
	end := context.Cause(ctx)
	if errors.Is(err, registry.ErrUnavailable) && errors.Is(err, end) {
		return err
	}
	return end
}

// openOnce waits for an active shim, opens a stream there, and calls fn with each message until the stream ends.
func (h *Host) openOnce(
	ctx context.Context, wait *shimWait, req *pb.WatchRequest, fn func(*pb.WatchReply) error,
) error {
	sh, err := h.gate.enter(ctx, reads, wait, nil)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := pb.NewEventsClient(sh.process.Conn()).Watch(ctx, req)
	for err == nil {
		var m *pb.WatchReply
		if m, err = stream.Recv(); err == nil {
			err = fn(m)
		}
	}
	return wire.Error(err)
}
