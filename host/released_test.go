package host_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"holdfast/host"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// A shim that stands by refuses all calls, and cannot activate while the new one has the state.
func TestReleasedShimRefuses(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	w.config.Bake = time.Hour
	w.open()
	task := w.task("a")
	old := w.host.Conn()
	_, err := w.host.Swap(w.ctx(), host.Binary{Path: another(t, w.dir, "next")})
	must(t, err)
	before, err := w.host.Status(w.ctx())
	must(t, err)
	call := &pb.Call{OperationId: "0123456789abcdef0123456789abcdef"}
	for what, ask := range map[string]func(context.Context) error{
		"Tasks.Starting": func(ctx context.Context) error {
			return failed(pb.NewTasksClient(old).Starting(ctx,
				&pb.TaskStartingRequest{Call: call, Task: wire.AllocTaskProto(task)}))
		},
		"Allocs.Release": func(ctx context.Context) error {
			return failed(pb.NewAllocsClient(old).Release(ctx, &pb.ReleaseAllocRequest{Call: call, Alloc: "a"}))
		},
		"Allocs.Sync": func(ctx context.Context) error {
			return failed(pb.NewAllocsClient(old).Sync(ctx, &pb.SyncRequest{Call: call}))
		},
		"Volumes.Delete": func(ctx context.Context) error {
			return failed(pb.NewVolumesClient(old).Delete(ctx,
				&pb.DeleteVolumeRequest{Call: call, Name: &pb.VolumeName{Namespace: "default", Id: "v"}}))
		},
		"Volumes.List": func(ctx context.Context) error {
			return failed(pb.NewVolumesClient(old).List(ctx, &pb.ListVolumesRequest{Call: &pb.Call{}}))
		},
	} {
		st := status.Convert(ask(w.ctx()))
		if st.Code() != codes.Unavailable || len(st.Details()) > 0 {
			t.Errorf("%s at a released shim: %v", what, st)
		}
	}
	everyMethod(func(name string, req protoreflect.Message, reply any) {
		if err := old.Invoke(w.ctx(), name, req.Interface(), reply); err == nil {
			t.Errorf("%s was answered by a released shim", name)
		}
	})
	for _, req := range []*pb.ActivateRequest{{Call: &pb.Call{}}, {Call: &pb.Call{}, Resume: true}} {
		ctx, cancel := context.WithTimeout(w.ctx(), time.Second)
		if _, err := pb.NewControlClient(old).Activate(ctx, req); err == nil {
			t.Errorf("%v: two shims are active", req)
		}
		cancel()
	}
	after, err := w.host.Status(w.ctx())
	must(t, err)
	if after != before {
		t.Errorf("the state was %+v and is %+v", before, after)
	}
	_, err = w.host.TaskStarting(w.ctx(), task)
	must(t, err)
}

// A shim that has released the state does not answer: the call waits for an active one.
func TestStatusIsOfTheActiveShim(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	before, err := w.host.Status(w.ctx())
	must(t, err)
	control := pb.NewControlClient(w.host.Conn())
	must(t, failed(control.Quiesce(w.ctx(), &pb.QuiesceRequest{Call: &pb.Call{}})))
	must(t, failed(control.Release(w.ctx(), &pb.ReleaseRequest{Call: &pb.Call{}})))
	ctx, cancel := context.WithTimeout(w.ctx(), 300*time.Millisecond)
	defer cancel()
	if st, err := w.host.Status(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without a state: %+v, %v", st, err)
	}
	must(t, failed(control.Activate(w.ctx(), &pb.ActivateRequest{Call: &pb.Call{}, Resume: true})))
	after, err := w.host.Status(w.ctx())
	must(t, err)
	if after != before {
		t.Errorf("the status was %+v and is %+v", before, after)
	}
}

func failed[T any](_ T, err error) error { return err }

// everyMethod calls f with every method but those of Control and those that need no state.
func everyMethod(f func(name string, req protoreflect.Message, reply any)) {
	protoregistry.GlobalFiles.RangeFilesByPackage("holdfast.v1", func(file protoreflect.FileDescriptor) bool {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				m := service.Methods().Get(j)
				if service.Name() == "Control" || m.IsStreamingServer() || m.Name() == "Parse" {
					continue
				}
				in, _ := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
				out, _ := protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
				f("/"+string(service.FullName())+"/"+string(m.Name()), in.New(), out.New().Interface())
			}
		}
		return true
	})
}
