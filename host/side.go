package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// A shim is a side of a swap, and kept: each call is one of Control's.
var _ kept = (*shim)(nil)

func (s *shim) control() pb.ControlClient { return pb.NewControlClient(s.process.Conn()) }

// answers says why the shim does not answer.
func (s *shim) answers(ctx context.Context) error {
	_, err := s.control().Status(ctx, &pb.StatusRequest{Call: &pb.Call{}})
	return wire.Error(err)
}

// noticed is how long after the end of its connection a process may still seem to live.
const noticed = 100 * time.Millisecond

// deathNoticed is how long the error of a broken connection waits for the death that explains it: the kernel closes the
// connections of a process long before the process is gone if one of its threads waits for a disk.
const deathNoticed = 5 * time.Second

// errLate is the cause of a context of noLongerThan that has ended.
var errLate = errors.New("there was no answer")

// noLongerThan bounds the wait for a shim's answer.
func noLongerThan(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, limit, registry.Errorf(registry.ErrUnavailable, "%w within %s", errLate, limit))
}

// said is the error of a call at this shim. One that was cut off by the shim's death tells of that, and of its last words; one that ended with
// its context tells why that did.
func (s *shim) said(ctx context.Context, err error) error {
	if overdue(ctx, err) {
		<-ctx.Done()
		return registry.Errorf(registry.ErrUnavailable, "%w", context.Cause(ctx))
	}
	if !cutOff(err) {
		return wire.Error(err)
	}
	select {
	case <-s.dead():
		return registry.Errorf(registry.ErrUnavailable, "%w", withLastWords(s.process.Err(), s.process))
	case <-time.After(deathNoticed):
	case <-ctx.Done():
	}
	return wire.Error(err)
}

// overdue says whether a call has ended because its time was up. The shim has the same deadline, and its clock may be the first: the call is then
// cut off before the deadline here.
func overdue(ctx context.Context, err error) bool {
	return err != nil && timeIsUp(ctx) && (cutOff(err) || status.Code(err) == codes.DeadlineExceeded)
}

// explained is said, with the last words of a shim that lives as well: a candidate is about to be ended.
func (s *shim) explained(ctx context.Context, err error) error {
	if err = s.said(ctx, err); err == nil || gone(s) {
		return err
	}
	return withLastWords(err, s.process)
}

func (s *shim) snapshot(ctx context.Context, file string) (err error) {
	to, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return forWantOfRoom(err)
	}
	defer func() {
		if err = errors.Join(err, to.Close()); err != nil {
			_ = os.Remove(file)
		}
	}()
	stream, err := s.control().Snapshot(ctx, &pb.SnapshotRequest{Call: &pb.Call{}, File: file})
	if err != nil {
		return s.said(ctx, err)
	}
	for { // one that writes the file sends nothing of it
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return s.said(ctx, err)
		}
		if _, err := to.Write(chunk.GetData()); err != nil {
			return forWantOfRoom(err)
		}
	}
}

// forWantOfRoom says what to do where the copy of a state has no room.
func forWantOfRoom(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return registry.Errorf(registry.ErrExhausted, "%w: a swap needs room for a copy of the state; free some there", err)
	}
	return err
}

func (s *shim) rehearse(ctx context.Context, file string) (rehearsal, error) {
	reply, err := s.control().Rehearse(ctx, &pb.RehearseRequest{Call: &pb.Call{}, Copy: file})
	if err != nil {
		return rehearsal{}, s.explained(ctx, err)
	}
	return rehearsal{reply.GetWarnings(), reply.GetReadable()}, nil
}

// couldRead is nil if this shim could take a state over that shims of a schema and newer ones can read: it has to, if its successor fails.
func (s *shim) couldRead(readable uint32) error {
	if s.schema == 0 || readable <= s.schema {
		return nil
	}
	return registry.Errorf(registry.ErrUnsupported, "the new shim would make the state one that only shims of schema %d or newer can read; the running "+
		"shim knows none newer than %d, and could not take over again: swap to a release between the two first", readable, s.schema)
}

func (s *shim) quiesce(ctx context.Context, short time.Duration) error {
	_, err := s.control().Quiesce(ctx, &pb.QuiesceRequest{Call: &pb.Call{}, Long: durationpb.New(short)})
	return s.said(ctx, err)
}

func (s *shim) release(ctx context.Context) (left, error) {
	reply, err := s.control().Release(ctx, &pb.ReleaseRequest{Call: &pb.Call{}})
	if err != nil {
		return left{}, s.said(ctx, err)
	}
	return left{reply.GetAnswer().GetGeneration(), reply.GetAnswer().GetIndex()}, nil
}

// activate makes the shim active. One that takes the state from nobody who let go of it is told what lives, as something may have been missed.
func (s *shim) activate(ctx context.Context, l left) (generation uint64, err error) {
	reply, err := s.control().Activate(ctx, &pb.ActivateRequest{Call: &pb.Call{}, Generation: l.generation, Index: l.index})
	if err != nil {
		return 0, fmt.Errorf("activate the shim: %w", s.said(ctx, err))
	}
	if l == (left{}) {
		if err := s.sync(ctx); err != nil {
			return 0, fmt.Errorf("tell the shim what lives: %w", s.said(ctx, err))
		}
	}
	return reply.GetAnswer().GetGeneration(), nil
}

func (s *shim) again(ctx context.Context) error {
	_, err := s.control().Activate(ctx, &pb.ActivateRequest{Call: &pb.Call{}, Resume: true})
	return s.said(ctx, err)
}

func (s *shim) kill(ctx context.Context) error {
	s.cancel()
	return s.process.Kill(ctx)
}

func (s *shim) pid() int { return s.process.PID() }

func (s *shim) dead() <-chan struct{} { return s.process.Done() }

func (s *shim) death() error {
	if err := s.process.Err(); err != nil {
		return registry.Errorf(registry.ErrUnavailable, "%w", withLastWords(err, s.process))
	}
	return nil
}
