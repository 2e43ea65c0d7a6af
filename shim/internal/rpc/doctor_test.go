package rpc

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/proto/bootstrap"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// fakeDoctor is a Meter and a Doctor in memory.
type fakeDoctor struct {
	calls []string
	found registry.Diagnosis
	usage []registry.VolumeUsage
	fails error
	hangs chan struct{} // holds one for each call that is to hang; nil: no call hangs
}

func (d *fakeDoctor) answer(ctx context.Context, call string) error {
	d.calls = append(d.calls, call)
	if d.hangs != nil {
		d.hangs <- struct{}{}
		<-ctx.Done()
		return context.Cause(ctx)
	}
	return d.fails
}

func (d *fakeDoctor) Stats(ctx context.Context, name registry.VolumeName) ([]registry.VolumeUsage, error) {
	return d.usage, d.answer(ctx, fmt.Sprintf("stats %s/%s", name.Namespace, name.ID))
}

func (d *fakeDoctor) Examine(ctx context.Context) (registry.Diagnosis, error) {
	return d.found, d.answer(ctx, "examine")
}

func (d *fakeDoctor) Repair(ctx context.Context, digest string) (registry.Diagnosis, error) {
	return d.found, d.answer(ctx, "repair "+digest)
}

type doctorEnv struct {
	*env
	*fakeDoctor
}

func newDoctorEnv(t *testing.T) doctorEnv {
	e, d := newEnv(t), &fakeDoctor{}
	e.active.Meter, e.active.Doctor = d, d
	return doctorEnv{e, d}
}

func (e doctorEnv) stats(ctx context.Context) (*pb.VolumeStatsReply, error) {
	return pb.NewVolumesClient(e.conn).Stats(ctx, &pb.VolumeStatsRequest{Name: &pb.VolumeName{Id: "data"}})
}

func (e doctorEnv) examine(ctx context.Context, o ...grpc.CallOption) (*pb.DoctorReply, error) {
	return pb.NewControlClient(e.conn).Doctor(ctx, &pb.DoctorRequest{}, o...)
}

func (e doctorEnv) repair(ctx context.Context, operation string) (*pb.DoctorReply, error) {
	return pb.NewControlClient(e.conn).Doctor(ctx,
		&pb.DoctorRequest{Call: &pb.Call{OperationId: operation}, Repair: true, Digest: "d1"})
}

func TestVolumeStatsCrossTheWire(t *testing.T) {
	e := newDoctorEnv(t)
	e.usage = []registry.VolumeUsage{{Unit: "bytes", Total: 9, Used: 4, Available: 5}, {Unit: "inodes", Total: 3}}
	reply, err := e.stats(t.Context())
	must(t, err)
	if got := reply.GetUsage(); len(got) != 2 || wire.VolumeUsage(got[0]) != e.usage[0] ||
		reply.GetAnswer().GetGeneration() != 7 {
		t.Errorf("%v", reply)
	}
	e.fails = registry.Errorf(registry.ErrConflict, "volume data is not mounted here")
	_, err = e.stats(t.Context())
	if err = wire.Error(err); !errors.Is(err, registry.ErrConflict) || err.Error() != e.fails.Error() {
		t.Errorf("%v", err)
	}
	if want := []string{"stats default/data", "stats default/data"}; !reflect.DeepEqual(e.calls, want) {
		t.Errorf("calls: %q", e.calls)
	}
}

// A repair needs an operation ID. A shim that hands over still examines, but does not repair.
func TestDoctorExaminesAndRepairs(t *testing.T) {
	e := newDoctorEnv(t)
	e.found = registry.Diagnosis{Digest: "d1", Repaired: true, Findings: []registry.Finding{
		{Kind: registry.FoundOrphan, Action: registry.ActUnmount, Path: "/mnt/x", Detail: "is mounted",
			Advice: "repair"},
		{Kind: registry.FoundLost, Name: registry.VolumeName{Namespace: "default", ID: "data"}},
	}}
	for _, call := range []func() (*pb.DoctorReply, error){
		func() (*pb.DoctorReply, error) { return e.examine(t.Context()) },
		func() (*pb.DoctorReply, error) { return e.repair(t.Context(), "op") },
	} {
		reply, err := call()
		must(t, err)
		if got := wire.Diagnosis(reply); !reflect.DeepEqual(got, e.found) || reply.GetAnswer().GetGeneration() != 7 {
			t.Errorf("%+v", got)
		}
	}
	if _, err := e.repair(t.Context(), ""); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a repair without an operation id: %v", err)
	}
	e.server.Quiesce()
	if _, err := e.repair(t.Context(), "op-2"); !notActive(err) {
		t.Errorf("a repair while quiesced: %v", err)
	}
	_, err := e.examine(t.Context())
	must(t, err)
	if want := []string{"examine", "repair d1", "examine"}; !reflect.DeepEqual(e.calls, want) {
		t.Errorf("calls: %q", e.calls)
	}
}

// If the shim ceases to be active during a call, the host is told to repeat the call at the next shim.
func TestReadsEndWithTheirShim(t *testing.T) {
	for what, call := range map[string]func(e doctorEnv) error{
		"stats":   func(e doctorEnv) error { _, err := e.stats(t.Context()); return err },
		"examine": func(e doctorEnv) error { _, err := e.examine(t.Context()); return err },
		"repair":  func(e doctorEnv) error { _, err := e.repair(t.Context(), "op"); return err },
	} {
		e := newDoctorEnv(t)
		e.hangs = make(chan struct{}, 1)
		ended := make(chan error, 1)
		go func() { ended <- call(e) }()
		<-e.hangs
		e.release(registry.Errorf(registry.ErrUnavailable, "released"))
		if err := <-ended; !notActive(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// A diagnosis that is too long for one message is cut, and counts the rest.
func TestDiagnosisFitsIntoAMessage(t *testing.T) {
	e := newDoctorEnv(t)
	const all = 3000
	for range all {
		e.found.Findings = append(e.found.Findings,
			registry.Finding{Kind: registry.FoundLeft, Detail: strings.Repeat("x", 8<<10)})
	}
	reply, err := e.examine(t.Context(), grpc.MaxCallRecvMsgSize(bootstrap.MaxMessage))
	must(t, err)
	list := wire.Diagnosis(reply).Findings
	last := list[len(list)-1]
	more := fmt.Sprintf("%d more findings", all-len(list)+1)
	if last.Kind != registry.FoundUnseen || !strings.HasPrefix(last.Detail, more) || len(list) < 500 ||
		len(list) > 513 {
		t.Errorf("%d findings, the last %+v", len(list), last)
	}
}
