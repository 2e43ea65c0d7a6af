package host

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// WatchOptions say from where, and what.
type WatchOptions struct {
	After    Seq  // the number of an event that was seen, or 0
	Snapshot bool // begin with a resync, whatever After says
	Past     bool // end when all is told that had happened when it began
	Role     Role
	Plugin   PluginID
	Kinds    []EventKind
}

// Watch calls fn with every event after the cursor, in order, until fn or ctx ends it, over the death of any number of shims. A cursor that
// is too old, or that nobody gave out, gets a resync event first, which carries what is true instead. It returns fn's error, the context's
// cause, or what is wrong with the options.
//
// One of the past only returns nil when it is told: every event of a change that was acknowledged before the call, and maybe some after it. It
// is held no longer than a call, MaxHold in all, and then returns ErrUnavailable, or what else kept it from being told.
func (h *Host) Watch(ctx context.Context, o WatchOptions, fn func(Event) error) error {
	var stop error
	err := h.follow(ctx, o.Past, func(ctx context.Context, conn grpc.ClientConnInterface, got func()) error {
		req := &pb.WatchRequest{Call: &pb.Call{}, After: uint64(o.After), Snapshot: o.Snapshot, Role: string(o.Role), Plugin: string(o.Plugin)}
		for _, k := range o.Kinds {
			req.Kinds = append(req.Kinds, string(k))
		}
		stream, err := pb.NewEventsClient(conn).Watch(ctx, req)
		if err != nil {
			return err
		}
		return receive(stream, got, &stop, func(reply *pb.WatchReply) error {
			o.After, o.Snapshot = Seq(reply.GetAnswer().GetIndex()), false
			switch {
			case reply.GetEvent() != nil:
				return fn(wire.Event(reply.GetEvent()))
			case o.Past: // only who has been told everything is told of the cursor alone
				return errTold
			}
			return nil
		})
	}, &stop)
	if err == errTold {
		return nil
	}
	return err
}

// errTold ends a watch of the past.
var errTold = errors.New("everything is told")

// Fingerprints calls fn with what is true of every plugin and role, then with those that have changed. Complete marks such a beginning: it
// comes again when the shim has been started anew, and what it does not name is gone.
func (h *Host) Fingerprints(ctx context.Context, q PluginQuery, fn func(changed []PluginFingerprint, complete bool) error) error {
	var stop error
	return h.follow(ctx, false, func(ctx context.Context, conn grpc.ClientConnInterface, got func()) error {
		stream, err := pb.NewPluginsClient(conn).Fingerprints(ctx, &pb.FingerprintsRequest{Call: &pb.Call{}, Role: string(q.Role), Plugin: string(q.Plugin)})
		if err != nil {
			return err
		}
		return receive(stream, got, &stop, func(reply *pb.FingerprintsReply) error {
			return fn(convert(reply.GetPlugins(), wire.PluginFingerprint), reply.GetComplete())
		})
	}, &stop)
}

// Restarts calls fn with the complete list of restarts that the supervisor asks for, at once and whenever it has changed. A request stands
// until TaskStarting reports a newer attempt; honour it once for each.
func (h *Host) Restarts(ctx context.Context, fn func([]PendingRestart) error) error {
	var stop error
	return h.follow(ctx, false, func(ctx context.Context, conn grpc.ClientConnInterface, got func()) error {
		stream, err := pb.NewTasksClient(conn).Restarts(ctx, &pb.RestartsRequest{Call: &pb.Call{}})
		if err != nil {
			return err
		}
		return receive(stream, got, &stop, func(reply *pb.RestartsReply) error {
			return fn(convert(reply.GetRequests(), wire.Restart))
		})
	}, &stop)
}

// receive gives fn each message of a stream. An error of fn is kept in stop.
func receive[M any](stream grpc.ServerStreamingClient[M], got func(), stop *error, fn func(*M) error) error {
	for {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		got()
		if *stop = fn(m); *stop != nil {
			return *stop
		}
	}
}

// A stream that ends is opened again, after a wait that doubles as long as it brings nothing.
const (
	resumeFirst   = 20 * time.Millisecond
	resumeCeiling = time.Second
)

// follow opens a stream again whenever it ends, until ctx ends, stop is set, the host is closed, or the shim refuses the request itself. One that
// is not for good waits MaxHold in all, as a call does.
func (h *Host) follow(
	ctx context.Context, ends bool, open func(ctx context.Context, conn grpc.ClientConnInterface, got func()) error, stop *error,
) error {
	wait, hold := resumeFirst, h.config.MaxHold
	for {
		err := h.once(ctx, &hold, func(ctx context.Context, conn grpc.ClientConnInterface) error {
			return open(ctx, conn, func() { wait = resumeFirst })
		})
		switch {
		case *stop != nil:
			return *stop
		case ctx.Err() != nil:
			return causeOf(ctx, err)
		case errors.Is(err, registry.ErrInvalid), errors.Is(err, registry.ErrUnsupported), errors.Is(err, registry.ErrDenied),
			errors.Is(err, registry.ErrExhausted): // a message beyond the limit would be one again
			return err
		case !ends:
			hold = h.config.MaxHold
		case hold <= wait:
			return err
		}
		if shut := h.gate.look(reads, nil).shut; shut != nil {
			return shut
		}
		h.config.Logger.Debug("a stream is opened again", "wait", wait, "error", err)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return causeOf(ctx, err)
		}
		hold -= wait
		wait = min(2*wait, resumeCeiling)
	}
}

// causeOf is the cause of a finished context, with why there was no shim if it was one that was waited for.
func causeOf(ctx context.Context, err error) error {
	if end := context.Cause(ctx); !errors.Is(err, registry.ErrUnavailable) || !errors.Is(err, end) {
		return end
	}
	return err
}

// once opens a stream at the active shim, for which it waits for no longer than hold, and reads it to its end.
func (h *Host) once(ctx context.Context, hold *time.Duration, open func(context.Context, grpc.ClientConnInterface) error) error {
	sh, err := h.gate.enter(ctx, reads, hold, nil)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return wire.Error(open(ctx, sh.process.Conn()))
}
