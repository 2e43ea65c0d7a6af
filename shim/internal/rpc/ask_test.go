package rpc

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/proto/bootstrap"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// expert is a meter and a doctor in memory.
type expert struct {
	asked []string
	found registry.Diagnosis
	usage []registry.VolumeUsage
	fails error
	hangs chan struct{} // has one for each call that hangs; nil: none does
}

func (e *expert) answer(ctx context.Context, what string) error {
	e.asked = append(e.asked, what)
	if e.hangs != nil {
		e.hangs <- struct{}{}
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return e.fails
}

func (e *expert) Stats(ctx context.Context, name registry.VolumeName) ([]registry.VolumeUsage, error) {
	return e.usage, e.answer(ctx, fmt.Sprintf("stats %s/%s", name.Namespace, name.ID))
}

func (e *expert) Examine(ctx context.Context) (registry.Diagnosis, error) {
	return e.found, e.answer(ctx, "examine")
}

func (e *expert) Repair(ctx context.Context, digest string) (registry.Diagnosis, error) {
	return e.found, e.answer(ctx, "repair "+digest)
}

// consulted is a stage with an expert.
func consulted(t *testing.T) (*stage, *expert) {
	s, e := newStage(t), &expert{}
	s.active.Meter, s.active.Doctor = e, e
	return s, e
}

func (e *expert) expect(t *testing.T, calls ...string) {
	t.Helper()
	if !reflect.DeepEqual(e.asked, calls) {
		t.Errorf("asked %q, want %q", e.asked, calls)
	}
	e.asked = nil
}

func TestStatsAreAskedFor(t *testing.T) {
	s, e := consulted(t)
	volumes := pb.NewVolumesClient(s.conn)
	e.usage = []registry.VolumeUsage{{Unit: "bytes", Total: 9, Used: 4, Available: 5}, {Unit: "inodes", Total: 3}}
	reply, err := volumes.Stats(t.Context(), &pb.VolumeStatsRequest{Name: &pb.VolumeName{Id: "data"}})
	must(t, err)
	for i, u := range reply.GetUsage() {
		if wire.VolumeUsage(u) != e.usage[i] {
			t.Errorf("unit %d is %v", i, u)
		}
	}
	if len(reply.GetUsage()) != 2 || reply.GetAnswer().GetIndex() != uint64(s.index()) ||
		reply.GetAnswer().GetGeneration() != 7 {
		t.Errorf("%v", reply)
	}
	e.expect(t, "stats default/data")
	e.fails = registry.Errorf(registry.ErrConflict, "volume data is not mounted here")
	_, err = volumes.Stats(t.Context(), &pb.VolumeStatsRequest{Name: &pb.VolumeName{Namespace: "n", Id: "data"}})
	if err = wire.Error(err); !errors.Is(err, registry.ErrConflict) ||
		err.Error() != "volume data is not mounted here" {
		t.Errorf("%v", err)
	}
	e.expect(t, "stats n/data")
}

func TestDoctorExaminesAndRepairs(t *testing.T) {
	s, e := consulted(t)
	control := pb.NewControlClient(s.conn)
	e.found = registry.Diagnosis{Digest: "d1", Findings: []registry.Finding{
		{Kind: registry.FoundOrphan, Action: registry.ActUnmount, Path: "/mnt/x", Detail: "is mounted",
			Advice: "repair"},
		{Kind: registry.FoundLost, Name: registry.VolumeName{Namespace: "default", ID: "data"}},
	}}
	reply, err := control.Doctor(t.Context(), &pb.DoctorRequest{})
	must(t, err)
	if got := wire.Diagnosis(reply); !reflect.DeepEqual(got, e.found) || reply.GetAnswer().GetGeneration() != 7 {
		t.Errorf("%+v", got)
	}
	e.expect(t, "examine")
	if _, err := control.Doctor(t.Context(), &pb.DoctorRequest{Repair: true,
		Digest: "d1"}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a repair without an operation id: %v", err)
	}
	e.expect(t)
	e.found.Repaired = true
	reply, err = control.Doctor(t.Context(), &pb.DoctorRequest{Call: &pb.Call{OperationId: "op"}, Repair: true,
		Digest: "d1"})
	if err != nil || !reply.GetRepaired() {
		t.Errorf("%v, %v", reply, err)
	}
	e.expect(t, "repair d1")
}

// A shim that hands over repairs nothing any more, and still examines.
func TestNoRepairWhileQuiesced(t *testing.T) {
	s, e := consulted(t)
	control := pb.NewControlClient(s.conn)
	must(t, s.server.Quiesce(t.Context(), 0))
	if _, err := control.Doctor(t.Context(), &pb.DoctorRequest{Call: &pb.Call{OperationId: "op"},
		Repair: true}); !nobody(err) {
		t.Errorf("%v", err)
	}
	_, err := control.Doctor(t.Context(), &pb.DoctorRequest{})
	must(t, err)
	e.expect(t, "examine")
}

// Without anybody to ask the answer says so, and no candidate is looked for.
func TestNobodyToConsult(t *testing.T) {
	s := newStage(t)
	_, stats := pb.NewVolumesClient(s.conn).Stats(t.Context(), &pb.VolumeStatsRequest{Name: &pb.VolumeName{Id: "data"}})
	_, examine := pb.NewControlClient(s.conn).Doctor(t.Context(), &pb.DoctorRequest{})
	_, repair := pb.NewControlClient(s.conn).Doctor(t.Context(),
		&pb.DoctorRequest{Call: &pb.Call{OperationId: "op"}, Repair: true})
	for what, err := range map[string]error{"stats": stats, "examine": examine, "repair": repair} {
		if err := wire.Error(err); !errors.Is(err, registry.ErrUnsupported) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// Whatever is asked for when the shim ceases to be active is asked of the next one.
func TestConsultationsEndWithTheirShim(t *testing.T) {
	for what, ask := range map[string]func(context.Context, *stage) error{
		"stats": func(ctx context.Context, s *stage) error {
			_, err := pb.NewVolumesClient(s.conn).Stats(ctx, &pb.VolumeStatsRequest{Name: &pb.VolumeName{Id: "data"}})
			return err
		},
		"examine": func(ctx context.Context, s *stage) error {
			_, err := pb.NewControlClient(s.conn).Doctor(ctx, &pb.DoctorRequest{})
			return err
		},
		"repair": func(ctx context.Context, s *stage) error {
			_, err := pb.NewControlClient(s.conn).Doctor(ctx,
				&pb.DoctorRequest{Call: &pb.Call{OperationId: "op"}, Repair: true})
			return err
		},
	} {
		s, e := consulted(t)
		e.hangs = make(chan struct{}, 1)
		ended := make(chan error, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		go func() { ended <- ask(ctx, s) }()
		<-e.hangs
		s.release(registry.Errorf(registry.ErrUnavailable, "released"))
		if err := <-ended; !nobody(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// A diagnosis that is too long for a message is cut, and says so.
func TestDiagnosisFitsIntoAMessage(t *testing.T) {
	s, e := consulted(t)
	const all = 3000
	for range all {
		e.found.Findings = append(e.found.Findings,
			registry.Finding{Kind: registry.FoundLeft, Detail: strings.Repeat("x", 8<<10)})
	}
	reply, err := pb.NewControlClient(s.conn).Doctor(t.Context(), &pb.DoctorRequest{},
		grpc.MaxCallRecvMsgSize(bootstrap.MaxMessage))
	must(t, err)
	list := wire.Diagnosis(reply).Findings
	last := list[len(list)-1]
	more := fmt.Sprintf("%d more findings", all-len(list)+1)
	if last.Kind != registry.FoundUnseen || !strings.HasPrefix(last.Detail, more) || len(list) < 500 ||
		len(list) > 513 {
		t.Errorf("%d findings, the last %+v", len(list), last)
	}
}
