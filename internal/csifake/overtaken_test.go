package csifake

import (
	"context"
	"os"
	"os/exec"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake/journal"
)

// A call whose caller is gone before the call begins has no effect, because a later call of that caller may have
// overtaken it.
func TestOvertakenCallHasNoEffect(t *testing.T) {
	fake := Start(t, Config{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := fake.handle(ctx, csi.Node_NodeStageVolume_FullMethodName, &csi.NodeStageVolumeRequest{VolumeId: "v"},
		func(context.Context) (proto.Message, error) {
			t.Error("it took effect")
			return nil, nil
		})
	if status.Code(err) != codes.Canceled {
		t.Errorf("%v", err)
	}
	if calls, err := fake.Calls(); err != nil || len(calls) > 0 {
		t.Errorf("the journal has %v, %v", calls, err)
	}
}

// Plugins that share a storage system do not change one volume at the same time.
func TestOneChangeAtATimeOverPlugins(t *testing.T) {
	path, backend := NewJournal(t, journal.Options{Allow: []string{"R3"}}), NewBackend("")
	one := Start(t, Config{Journal: path, Backend: backend, Caps: AllCaps, Instance: "one"})
	two := Start(t, Config{Journal: path, Backend: backend, Caps: AllCaps, Instance: "two"})
	c1, c2, ctx := dial(t, "unix:"+one.Socket()).learn(), dial(t, "unix:"+two.Socket()).learn(), t.Context()
	gate := one.On("DeleteVolume").Times(1).Hold()
	done := make(chan error, 1)
	go func() { _, err := c1.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: "v"}); done <- err }()
	<-gate.Arrived()
	if _, err := c2.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: "v"}); status.Code(err) != codes.Aborted {
		t.Errorf("beside another call: %v", err)
	}
	gate.Open()
	must(t, <-done)
	_, err := c2.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: "v"})
	must(t, err)
}

// If a plugin dies during a change of a volume, the volume is free, even if the call has not noticed the death yet.
func TestDeadPluginHoldsNoVolume(t *testing.T) {
	fake, c := start(t, Config{Caps: AllCaps})
	arrived, end := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(end) })
	fake.On("DeleteVolume").Answer(func(_ context.Context, _, reply proto.Message, err error) (proto.Message, error) {
		close(arrived)
		<-end
		return reply, err
	})
	done := make(chan error, 1)
	go func() {
		_, err := c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "v"})
		done <- err
	}()
	<-arrived
	fake.Kill()
	wantCode(t, <-done, "UNAVAILABLE")
	_, err := dial(t, "unix:"+Start(t, fake.Config()).Socket()).learn().DeleteVolume(t.Context(),
		&csi.DeleteVolumeRequest{VolumeId: "v"})
	must(t, err)
}

// A call whose caller was killed is not in flight, even if the end of its connection was not read yet.
func TestCallOfADeadCallerIsNotInFlight(t *testing.T) {
	fake := Start(t, Config{Caps: AllCaps})
	caller := exec.Command("true")
	must(t, caller.Run())
	from := func(pid int) context.Context {
		return peer.NewContext(t.Context(), &peer.Peer{Addr: peerAddr{pid: pid}})
	}
	request := &csi.DeleteVolumeRequest{VolumeId: "v"}
	arrived, end, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		_, _ = fake.handle(from(caller.Process.Pid), csi.Controller_DeleteVolume_FullMethodName, request,
			func(context.Context) (proto.Message, error) {
				close(arrived)
				<-end
				return &csi.DeleteVolumeResponse{}, nil
			})
	}()
	<-arrived
	_, _ = fake.handle(from(os.Getpid()), csi.Controller_DeleteVolume_FullMethodName, request,
		func(context.Context) (proto.Message, error) {
			return &csi.DeleteVolumeResponse{}, nil
		})
	close(end)
	<-done
	calls, err := fake.Calls()
	must(t, err)
	if len(calls) != 2 || len(calls[1].Beside) > 0 {
		t.Errorf("%+v", calls)
	}
}
