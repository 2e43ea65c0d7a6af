package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/host/internal/launch"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// A shim implements peer by calls of the Control service.
var _ peer = (*shim)(nil)

func (s *shim) control() pb.ControlClient { return pb.NewControlClient(s.process.Conn()) }

func (s *shim) pid() int { return s.process.PID() }

func (s *shim) exited() <-chan struct{} { return s.process.Done() }

func (s *shim) exitError() error {
	if err := s.process.Err(); err != nil {
		return registry.Errorf(registry.ErrUnavailable, "%w", withLastLines(err, s.process))
	}
	return nil
}

func (s *shim) kill(ctx context.Context) error {
	s.cancel()
	return s.process.Kill(ctx)
}

// stop ends the process even if ctx has ended. If ctx has not ended and the process lives, stop first reads the counts
// of the shim's calls.
func (s *shim) stop(ctx context.Context) error {
	if ctx.Err() == nil && !isDead(s) {
		limited, cancel := context.WithTimeout(ctx, lastMetricsLimit)
		_ = s.metrics.read(limited, s)
		cancel()
	}
	s.cancel()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	return s.process.Stop(ctx, stopGrace)
}

func (s *shim) ping(ctx context.Context) error {
	_, err := s.control().Status(ctx, &pb.StatusRequest{Call: &pb.Call{}})
	return wire.Error(err)
}

func (s *shim) quiesce(ctx context.Context) error {
	_, err := s.control().Quiesce(ctx, &pb.QuiesceRequest{Call: &pb.Call{}})
	return s.callError(ctx, err)
}

func (s *shim) release(ctx context.Context) (handoff, error) {
	reply, err := s.control().Release(ctx, &pb.ReleaseRequest{Call: &pb.Call{}})
	if err != nil {
		return handoff{}, s.callError(ctx, err)
	}
	return handoff{reply.GetAnswer().GetGeneration(), reply.GetAnswer().GetIndex()}, nil
}

// activate makes the shim active. Without a handoff it also calls sync: the shim may have missed something.
func (s *shim) activate(ctx context.Context, from handoff) (generation uint64, err error) {
	req := &pb.ActivateRequest{Call: &pb.Call{}, Generation: from.generation, Index: from.index}
	reply, err := s.control().Activate(ctx, req)
	if err != nil {
		return 0, fmt.Errorf("activate the shim: %w", s.callError(ctx, err))
	}
	if from == (handoff{}) {
		if err := s.sync(ctx); err != nil {
			return 0, fmt.Errorf("send the shim what runs: %w", s.callError(ctx, err))
		}
	}
	return reply.GetAnswer().GetGeneration(), nil
}

func (s *shim) resume(ctx context.Context) error {
	_, err := s.control().Activate(ctx, &pb.ActivateRequest{Call: &pb.Call{}, Resume: true})
	return s.callError(ctx, err)
}

// snapshot makes a new file and has the shim write a consistent copy of the state to it.
func (s *shim) snapshot(ctx context.Context, file string) error {
	to, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := to.Close(); err != nil {
		return err
	}
	stream, err := s.control().Snapshot(ctx, &pb.SnapshotRequest{Call: &pb.Call{}, File: file})
	for err == nil {
		_, err = stream.Recv()
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return s.callError(ctx, err)
}

// rehearse has a candidate take over a copy of the state. readable is the oldest schema that can read the copy after
// its migration; zero: unknown.
func (s *shim) rehearse(ctx context.Context, file string) (warnings []string, readable uint32, err error) {
	reply, err := s.control().Rehearse(ctx, &pb.RehearseRequest{Call: &pb.Call{}, Copy: file})
	if err != nil {
		return nil, 0, s.candidateError(ctx, err)
	}
	return reply.GetWarnings(), reply.GetReadable(), nil
}

// checkReadable returns an error unless this shim can read a state that requires at least the given schema. This shim
// has to take over again if its successor fails.
func (s *shim) checkReadable(schema uint32) error {
	if s.schema == 0 || schema <= s.schema {
		return nil
	}
	return registry.Errorf(registry.ErrUnsupported,
		"after this swap, only shims of schema %d or newer could read the state; the running shim knows none newer "+
			"than %d, and could not take over again: swap to a release between the two first", schema, s.schema)
}

// errTooLate is wrapped by the cause of a context that has ended at the limit of withLimit.
var errTooLate = errors.New("there was no answer")

// withLimit bounds the wait for a shim's answer.
func withLimit(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	cause := registry.Errorf(registry.ErrUnavailable, "%w within %s", errTooLate, limit)
	return context.WithTimeoutCause(ctx, limit, cause)
}

// callError returns the error of a call at this shim. If the shim died during the call, the error says so, with the
// shim's last lines. If the call ended with its context, the error is the context's cause.
func (s *shim) callError(ctx context.Context, err error) error {
	if endedByDeadline(ctx, err) {
		<-ctx.Done()
		return registry.Errorf(registry.ErrUnavailable, "%w", context.Cause(ctx))
	}
	if !hasNoAnswer(err) {
		return wire.Error(err)
	}
	select {
	case <-s.exited():
		return s.exitError()
	case <-time.After(launch.ExitWait):
	case <-ctx.Done():
	}
	return wire.Error(err)
}

// candidateError is callError for a candidate. If the candidate lives, the error includes its last lines, because it is
// ended next.
func (s *shim) candidateError(ctx context.Context, err error) error {
	if err = s.callError(ctx, err); err == nil || isDead(s) {
		return err
	}
	return withLastLines(err, s.process)
}

// endedByDeadline reports whether a call ended because its time was up. The shim has the same deadline and may notice
// it first: the call is then cut off before its context ends here.
func endedByDeadline(ctx context.Context, err error) bool {
	return err != nil && timeIsUp(ctx) && (hasNoAnswer(err) || status.Code(err) == codes.DeadlineExceeded)
}
