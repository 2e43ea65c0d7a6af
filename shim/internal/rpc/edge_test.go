package rpc

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// invoke calls a method, such as "Tasks/Started", and receives one message, which it does not decode.
func (e *env) invoke(t *testing.T, method string, req proto.Message) error {
	t.Helper()
	stream, err := e.conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, "/holdfast.v1."+method)
	must(t, err)
	must(t, stream.SendMsg(req))
	must(t, stream.CloseSend())
	return stream.RecvMsg(&emptypb.Empty{})
}

// A candidate serves only methods that need no state. It refuses any other method as a shim that is not active, or
// refuses the empty request.
func TestCandidateServesOnlyMethodsWithoutState(t *testing.T) {
	e := newCandidate(t)
	refused := 0
	for service, info := range e.services {
		for _, m := range info.Methods {
			name := strings.TrimPrefix(service, "holdfast.v1.") + "/" + m.Name
			if m.Name == "Parse" || name == "Callbacks/Serve" || strings.HasPrefix(name, "Control/") &&
				m.Name != "Doctor" {
				continue
			}
			err := e.invoke(t, name, &emptypb.Empty{})
			if !notActive(err) && status.Code(err) != codes.InvalidArgument || errors.Is(err, io.EOF) {
				t.Errorf("%s of a candidate: %v", name, err)
			}
			refused++
		}
	}
	if refused < 15 {
		t.Errorf("only %d methods were tried", refused)
	}
	must(t, e.invoke(t, "Jobs/Parse", &pb.ParseRequest{Source: &pb.Source{Name: "x.hcl", Text: []byte(`task "t" {}`)}}))
	must(t, e.invoke(t, "Control/Status", &pb.StatusRequest{}))
}

// If a name is no valid ID, each call that takes one refuses it, and writes nothing.
func TestIDsAreCheckedAtTheEdge(t *testing.T) {
	e := newEnv(t)
	call := &pb.Call{OperationId: "op"}
	create := func(change func(*pb.VolumeSpec)) proto.Message {
		spec := &pb.VolumeSpec{Id: "v", PluginId: "p",
			Capabilities: []*pb.VolumeCapability{{AccessMode: "single-node-writer", AttachmentMode: "file-system"}}}
		change(spec)
		return &pb.CreateVolumeRequest{Call: call, Spec: spec}
	}
	started := func(alloc, task string) proto.Message {
		return &pb.TaskStartedRequest{Call: call, Task: &pb.TaskKey{Alloc: alloc, Task: task}, Attempt: 1}
	}
	check := func(what, method string, req proto.Message) {
		t.Helper()
		if err := e.invoke(t, method, req); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s of %s: %v", method, what, err)
		}
	}
	for _, bad := range []string{"../x", "/etc", "a\nb", strings.Repeat("x", 300)} {
		name, group := &pb.VolumeName{Id: bad}, &pb.AllocGroup{Alloc: bad, Namespace: "default"}
		what := bad[:min(len(bad), 9)]
		check(what, "Tasks/Starting", &pb.TaskStartingRequest{Call: call,
			Task: &pb.AllocTask{Task: &pb.TaskKey{Alloc: bad, Task: "t"}, Attempt: 1}})
		check(what, "Tasks/Started", started(bad, "t"))
		check(what, "Tasks/Started", started("a", bad))
		check(what, "Allocs/Prepare", &pb.PrepareRequest{Call: call, Alloc: group})
		check(what, "Allocs/Release", &pb.ReleaseAllocRequest{Call: call, Alloc: bad})
		check(what, "Allocs/Sync", &pb.SyncRequest{Call: call, Allocs: []*pb.AllocGroup{group}})
		check(what, "Volumes/Create", create(func(s *pb.VolumeSpec) { s.Id = bad }))
		check(what, "Volumes/Create", create(func(s *pb.VolumeSpec) { s.PluginId = bad }))
		check(what, "Volumes/Create", create(func(s *pb.VolumeSpec) { s.CloneId = bad }))
		check(what, "Volumes/Create", create(func(s *pb.VolumeSpec) { s.Name = bad }))
		check(what, "Volumes/Delete", &pb.DeleteVolumeRequest{Call: call, Name: name})
		check(what, "Volumes/Deregister", &pb.DeregisterVolumeRequest{Call: call, Name: name})
		check(what, "Volumes/Expand", &pb.ExpandVolumeRequest{Call: call, Name: name})
		check(what, "Volumes/Stats", &pb.VolumeStatsRequest{Name: name})
		check(what, "Volumes/List", &pb.ListVolumesRequest{Namespace: bad})
		check(what, "Claims/List", &pb.ListClaimsRequest{Volume: name})
		check(what, "Events/Watch", &pb.WatchRequest{Role: bad})
	}
	long := strings.Repeat("x", 4097)
	for what, change := range map[string]func(*pb.VolumeSpec){
		"no capability":         func(s *pb.VolumeSpec) { s.Capabilities = nil },
		"an access mode":        func(s *pb.VolumeSpec) { s.Capabilities[0].AccessMode = "read" },
		"an attachment mode":    func(s *pb.VolumeSpec) { s.Capabilities[0].AttachmentMode = "" },
		"a capacity":            func(s *pb.VolumeSpec) { s.CapacityMin = -1 },
		"an empty range":        func(s *pb.VolumeSpec) { s.CapacityMin, s.CapacityMax = 2, 1 },
		"a long external id":    func(s *pb.VolumeSpec) { s.ExternalId = long },
		"a long id of a clone":  func(s *pb.VolumeSpec) { s.CloneExternalId = long },
		"a long id of snapshot": func(s *pb.VolumeSpec) { s.SnapshotId = long },
		"two sources":           func(s *pb.VolumeSpec) { s.CloneId, s.SnapshotId = "v", "s" },
	} {
		check(what, "Volumes/Create", create(change))
	}
	must(t, e.log.View(t.Context(), func(v registry.View) error {
		if v.Index() > 0 {
			t.Errorf("something was written: index %d", v.Index())
		}
		return nil
	}))
}

func TestClaimsOfAVolumeInTheDefaultNamespaceAreListed(t *testing.T) {
	e := newEnv(t)
	v := volume("v")
	put(t, e.log, registry.Claim{Volume: v.VolumeKey(), Name: v.VolumeName(), Alloc: "a", Request: "r", Node: "n"})
	for name, want := range map[*pb.VolumeName]int{
		nil: 1, {Id: "v"}: 1, {Namespace: "default", Id: "v"}: 1, {Namespace: "other", Id: "v"}: 0, {Id: "w"}: 0,
	} {
		reply, err := pb.NewClaimsClient(e.conn).List(t.Context(), &pb.ListClaimsRequest{Volume: name})
		must(t, err)
		if len(reply.GetClaims()) != want {
			t.Errorf("of %v: %v", name, reply.GetClaims())
		}
	}
}

func TestCopyOfTheStateNeedsAFile(t *testing.T) {
	err := newEnv(t).invoke(t, "Control/Snapshot", &pb.SnapshotRequest{File: "/dev/null"})
	if status.Convert(err).Message() != "cannot write a copy of the state: /dev/null is not a regular file" {
		t.Errorf("%v", err)
	}
}

// A page ends at pageSize records or pageBytes. A change between two pages neither hides nor repeats a record.
func TestPagesHoldAllOnceAndInOrder(t *testing.T) {
	e := newEnv(t)
	var want, got []string
	var records []registry.Record
	for i := range 1200 {
		v := volume(fmt.Sprintf("v%04d", i))
		want, records = append(want, string(v.ID)), append(records, v)
	}
	put(t, e.log, records...)
	for token := ""; len(got) == 0 || token != ""; {
		reply, err := pb.NewVolumesClient(e.conn).List(t.Context(),
			&pb.ListVolumesRequest{Page: &pb.Page{Token: token}})
		must(t, err)
		if len(reply.GetVolumes()) > pageSize || reply.GetAnswer().GetIndex() == 0 {
			t.Errorf("a page of %d, answer %v", len(reply.GetVolumes()), reply.GetAnswer())
		}
		if len(got) == 0 {
			commit(t, e.log, func(registry.View) registry.Change {
				return registry.Change{Put: []registry.Record{volume("a000")}, Delete: []registry.Key{records[3].Key()}}
			})
		}
		for _, v := range reply.GetVolumes() {
			got = append(got, v.GetSpec().GetId())
		}
		token = reply.GetNextToken()
	}
	if !slices.Equal(got, want) {
		t.Errorf("%d of %d volumes, or not in order", len(got), len(want))
	}
	for _, token := range []string{"17!", "17 ", "é", "=="} {
		err := e.invoke(t, "Volumes/List", &pb.ListVolumesRequest{Page: &pb.Page{Token: token}})
		if status.Code(err) != codes.InvalidArgument {
			t.Errorf("token %q: %v", token, err)
		}
	}
	var long []*pb.VolumeSpec
	for _, id := range want[:100] {
		long = append(long, &pb.VolumeSpec{Id: id, Name: strings.Repeat("x", 100<<10)})
	}
	long[99].Name = strings.Repeat("x", 2*pageBytes) // a record larger than a page gets its own page
	seen := 0
	for token := ""; seen == 0 || token != ""; {
		part, next, err := pageOf(long, &pb.Page{Token: token}, (*pb.VolumeSpec).GetId,
			func(s *pb.VolumeSpec) *pb.VolumeSpec { return s })
		must(t, err)
		if len(part) > 1 && len(part)*100<<10 > pageBytes {
			t.Errorf("a page of %d long records", len(part))
		}
		seen, token = seen+len(part), next
	}
	if seen != len(long) {
		t.Errorf("saw %d", seen)
	}
}

func TestInstancesAreListedNewestFirst(t *testing.T) {
	e := newEnv(t)
	for _, alloc := range []registry.AllocID{"b", "c", "a"} {
		e.register(t, instance(alloc))
	}
	var got []string
	for token := ""; len(got) == 0 || token != ""; {
		reply, err := pb.NewPluginsClient(e.conn).List(t.Context(),
			&pb.ListPluginsRequest{Page: &pb.Page{Size: 1, Token: token}})
		must(t, err)
		one := reply.GetInstances()[0]
		if got = append(got, one.GetKey().GetAlloc()); one.GetActive() != (len(got) == 1) {
			t.Errorf("active: %v", one)
		}
		token = reply.GetNextToken()
	}
	if !slices.Equal(got, []string{"a", "c", "b"}) {
		t.Errorf("got %v", got)
	}
}
