package rpc

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// Every method of every service, asked of a candidate: those that need no state answer, all others say that nobody has,
// or refuse the empty request as such.
func TestCandidateAnswersHelloStatusAndParseOnly(t *testing.T) {
	s := candidate(t)
	free := []string{"Control/Hello", "Control/Status", "Control/Rehearse", "Control/Activate", "Control/Quiesce",
		"Control/Release", "Control/Snapshot",
		"Jobs/Parse", "Volumes/Parse", "Callbacks/Serve"}
	refused := 0
	for service, info := range s.services {
		for _, m := range info.Methods {
			name := service[strings.LastIndex(service, ".")+1:] + "/" + m.Name
			if slices.Contains(free, name) {
				continue
			}
			stream, err := s.conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, "/"+service+"/"+m.Name)
			must(t, err)
			must(t, stream.SendMsg(&emptypb.Empty{}))
			must(t, stream.CloseSend())
			err = stream.RecvMsg(&emptypb.Empty{})
			if !nobody(err) && status.Code(err) != codes.InvalidArgument || errors.Is(err, io.EOF) {
				t.Errorf("%s of a candidate: %v", name, err)
			}
			refused++
		}
	}
	if refused < 15 {
		t.Errorf("only %d methods were tried", refused)
	}
	reply, err := pb.NewJobsClient(s.conn).Parse(t.Context(),
		&pb.ParseRequest{Source: &pb.Source{Name: "x.hcl", Text: []byte(`task "t" {}`)}})
	if err != nil || len(reply.GetDiagnostics()) == 0 && reply.GetJob() == nil {
		t.Errorf("Parse of a candidate: %v, %v", reply, err)
	}
	if _, err := pb.NewControlClient(s.conn).Status(t.Context(), &pb.StatusRequest{}); err != nil {
		t.Errorf("Status of a candidate: %v", err)
	}
}

// idTakers are calls that take an id, each with one that is bad.
func idTakers(ctx context.Context, s *stage) map[string]func(bad string) error {
	call := &pb.Call{OperationId: "op"}
	spec := func(change func(*pb.VolumeSpec)) *pb.VolumeSpec {
		m := &pb.VolumeSpec{Id: "v", PluginId: "p",
			Capabilities: []*pb.VolumeCapability{{AccessMode: "single-node-writer", AttachmentMode: "file-system"}}}
		change(m)
		return m
	}
	tasks, allocs, volumes := pb.NewTasksClient(s.conn), pb.NewAllocsClient(s.conn), pb.NewVolumesClient(s.conn)
	return map[string]func(bad string) error{
		"start alloc": func(bad string) error {
			_, err := tasks.Starting(ctx, &pb.TaskStartingRequest{Call: call,
				Task: &pb.AllocTask{Task: &pb.TaskKey{Alloc: bad, Task: "t"}, Attempt: 1}})
			return err
		},
		"started alloc": func(bad string) error {
			_, err := tasks.Started(ctx, &pb.TaskStartedRequest{Call: call, Task: &pb.TaskKey{Alloc: bad, Task: "t"},
				Attempt: 1})
			return err
		},
		"started task": func(bad string) error {
			_, err := tasks.Started(ctx, &pb.TaskStartedRequest{Call: call, Task: &pb.TaskKey{Alloc: "a", Task: bad},
				Attempt: 1})
			return err
		},
		"exited task": func(bad string) error {
			_, err := tasks.Exited(ctx, &pb.TaskExitedRequest{Call: call, Task: &pb.TaskKey{Alloc: "a", Task: bad},
				Attempt: 1})
			return err
		},
		"prepare": func(bad string) error {
			_, err := allocs.Prepare(ctx, &pb.PrepareRequest{Call: call,
				Alloc: &pb.AllocGroup{Alloc: bad, Namespace: "default"}})
			return err
		},
		"release": func(bad string) error {
			_, err := allocs.Release(ctx, &pb.ReleaseAllocRequest{Call: call, Alloc: bad})
			return err
		},
		"sync": func(bad string) error {
			_, err := allocs.Sync(ctx, &pb.SyncRequest{Call: call,
				Allocs: []*pb.AllocGroup{{Alloc: bad, Namespace: "default"}}})
			return err
		},
		"create id": func(bad string) error {
			_, err := volumes.Create(ctx, &pb.CreateVolumeRequest{Call: call,
				Spec: spec(func(m *pb.VolumeSpec) { m.Id = bad })})
			return err
		},
		"create plugin": func(bad string) error {
			_, err := volumes.Create(ctx, &pb.CreateVolumeRequest{Call: call,
				Spec: spec(func(m *pb.VolumeSpec) { m.PluginId = bad })})
			return err
		},
		"create clone": func(bad string) error {
			_, err := volumes.Create(ctx, &pb.CreateVolumeRequest{Call: call,
				Spec: spec(func(m *pb.VolumeSpec) { m.CloneId = bad })})
			return err
		},
		"create name": func(bad string) error {
			_, err := volumes.Create(ctx, &pb.CreateVolumeRequest{Call: call,
				Spec: spec(func(m *pb.VolumeSpec) { m.Name = bad })})
			return err
		},
		"delete": func(bad string) error {
			_, err := volumes.Delete(ctx, &pb.DeleteVolumeRequest{Call: call, Name: &pb.VolumeName{Id: bad}})
			return err
		},
		"deregister": func(bad string) error {
			_, err := volumes.Deregister(ctx, &pb.DeregisterVolumeRequest{Call: call, Name: &pb.VolumeName{Id: bad}})
			return err
		},
		"stats": func(bad string) error {
			_, err := volumes.Stats(ctx, &pb.VolumeStatsRequest{Name: &pb.VolumeName{Id: bad}})
			return err
		},
		"stats namespace": func(bad string) error {
			_, err := volumes.Stats(ctx, &pb.VolumeStatsRequest{Name: &pb.VolumeName{Namespace: bad, Id: "v"}})
			return err
		},
		"list volumes": func(bad string) error {
			_, err := volumes.List(ctx, &pb.ListVolumesRequest{Namespace: bad})
			return err
		},
		"watch role": func(bad string) error {
			stream, err := pb.NewEventsClient(s.conn).Watch(ctx, &pb.WatchRequest{Role: bad})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
	}
}

// Nothing that is no id passes, and nothing is written for it.
func TestIDsAreCheckedAtTheEdge(t *testing.T) {
	s := newStage(t)
	before := s.index()
	ctx, volumes, call := t.Context(), pb.NewVolumesClient(s.conn), &pb.Call{OperationId: "op"}
	for name, do := range idTakers(ctx, s) {
		for _, bad := range []string{"../x", "/etc", "a\nb", strings.Repeat("x", 300)} {
			if err := do(bad); status.Code(err) != codes.InvalidArgument {
				t.Errorf("%s of %q: %v", name, bad[:min(len(bad), 9)], err)
			}
		}
	}
	if _, err := volumes.Create(ctx, &pb.CreateVolumeRequest{Call: call,
		Spec: &pb.VolumeSpec{Id: "v", PluginId: "p"}}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a volume without a capability: %v", err)
	}
	for what, spec := range map[string]*pb.VolumeSpec{
		"an external id of 4097 bytes": {ExternalId: strings.Repeat("x", 4097)},
		"a clone of 4097 bytes":        {CloneExternalId: strings.Repeat("x", 4097)},
		"a snapshot of 4097 bytes":     {SnapshotId: strings.Repeat("x", 4097)},
		"two sources":                  {CloneId: "v", SnapshotId: "s"},
	} {
		spec.Id, spec.PluginId = "v", "p"
		spec.Capabilities = []*pb.VolumeCapability{{AccessMode: "single-node-writer", AttachmentMode: "file-system"}}
		if _, err := volumes.Register(ctx, &pb.RegisterVolumeRequest{Call: call,
			Spec: spec}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", what, err)
		}
	}
	if s.index() != before {
		t.Error("something was written")
	}
}

// The first fingerprints are all of them, marked complete; then come those that change, and those that are gone.
func TestFingerprintsBeginCompleteThenChange(t *testing.T) {
	s := newStage(t)
	s.register(t, instance("a"))
	stream, err := pb.NewPluginsClient(s.conn).Fingerprints(t.Context(), &pb.FingerprintsRequest{})
	must(t, err)
	next := func() *pb.FingerprintsReply {
		t.Helper()
		reply, err := stream.Recv()
		must(t, err)
		return reply
	}
	if r := next(); !r.GetComplete() || len(r.GetPlugins()) != 1 ||
		r.GetPlugins()[0].GetActive().GetKey().GetAlloc() != "a" {
		t.Errorf("first: %v", r)
	}
	s.register(t, instance("b"))
	if r := next(); r.GetComplete() || len(r.GetPlugins()) != 1 ||
		r.GetPlugins()[0].GetActive().GetKey().GetAlloc() != "b" || r.GetPlugins()[0].GetHealthy() != 2 {
		t.Errorf("a newer one: %v", r)
	}
	_, err = s.log.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
		return registry.RemoveChange(v, time.Now(), instance("a").InstanceKey, instance("b").InstanceKey), nil
	})
	must(t, err)
	if r := next(); len(r.GetPlugins()) != 1 || !r.GetPlugins()[0].GetGone() {
		t.Errorf("none: %v", r)
	}
	s.release(registry.Errorf(registry.ErrUnavailable, "released"))
	if _, err := stream.Recv(); status.Code(err) != codes.Unavailable {
		t.Errorf("after the end: %v", err)
	}
}

// What restarts are asked for is told at once, though there are none, and again when it changes.
func TestRestartsAreTheWholeList(t *testing.T) {
	s := newStage(t)
	stream, err := pb.NewTasksClient(s.conn).Restarts(t.Context(), &pb.RestartsRequest{})
	must(t, err)
	for _, want := range []int{0, 1, 0} {
		r, err := stream.Recv()
		must(t, err)
		if len(r.GetRequests()) != want {
			t.Errorf("%d requests, want %d", len(r.GetRequests()), want)
		}
		task := registry.Task{TaskKey: registry.TaskKey{Alloc: "a", Task: "t"}, Attempt: 1, Phase: registry.TaskRunning}
		if want == 0 {
			task.Restart = &registry.RestartRequest{Attempt: 1}
		}
		s.put(t, task)
	}
}
