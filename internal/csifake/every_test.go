package csifake

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"holdfast/internal/csifake/journal"
)

// everyCap returns the numbers of all capabilities of all services.
func everyCap() (all []string) {
	for service, values := range capEnums {
		for name, n := range values {
			if n != 0 {
				all = append(all, service+"/"+name)
			}
		}
	}
	return all
}

// All RPCs of the specification are served and are in the journal under their service. An optional RPC without its
// capability is UNIMPLEMENTED.
func TestEveryRPCIsServedAndJournaled(t *testing.T) {
	full := Start(t, Config{Caps: everyCap()})
	bare := Start(t, Config{Caps: []string{"GROUP_CONTROLLER_SERVICE"}})
	for _, service := range services {
		for _, m := range service.Methods {
			invoke(t, full, service.ServiceName, m.MethodName, false)
			needs := journal.Needs(m.MethodName)
			invoke(t, bare, service.ServiceName, m.MethodName,
				needs != "" && needs != "service/CONTROLLER_SERVICE" && needs != "service/GROUP_CONTROLLER_SERVICE")
		}
	}
}

// invoke calls an RPC with an empty request, and checks the code and the journal.
func invoke(t *testing.T, p *Plugin, service, method string, unimplemented bool) {
	t.Helper()
	conn := dial(t, "unix:"+p.Socket()).conn
	message := func(kind string) any {
		mt, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName("csi.v1." + method + kind))
		must(t, err)
		return mt.New().Interface()
	}
	err := conn.Invoke(t.Context(), "/"+service+"/"+method, message("Request"), message("Response"))
	if got := status.Code(err) == codes.Unimplemented; got != unimplemented {
		t.Errorf("%s answers %v; unimplemented is %v, want %v", method, err, got, unimplemented)
	}
	calls, err := p.Calls(method)
	must(t, err)
	if len(calls) != 1 || calls[0].End == nil || calls[0].Role != roles[service] {
		t.Errorf("the journal has %+v for %s", calls, method)
	}
}

// The controller's answers about snapshots are consistent, and lists are paged.
func TestSnapshotsAndGroupsAreListed(t *testing.T) {
	fake := Start(t, Config{Caps: everyCap()})
	c, ctx := dial(t, "unix:"+fake.Socket()), t.Context()
	var ids []string
	for _, name := range []string{"one", "two", "three"} {
		ids = append(ids, c.create(name).GetVolumeId())
	}
	seen, token := map[string]bool{}, ""
	for {
		list, err := c.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 2, StartingToken: token})
		must(t, err)
		for _, e := range list.GetEntries() {
			seen[e.GetVolume().GetVolumeId()] = true
		}
		if token = list.GetNextToken(); token == "" {
			break
		}
	}
	if len(seen) != 3 {
		t.Errorf("ListVolumes tells %v", seen)
	}
	_, err := c.ListVolumes(ctx, &csi.ListVolumesRequest{StartingToken: "nonsense"})
	wantCode(t, err, "ABORTED")

	made, err := c.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: ids[0]})
	must(t, err)
	_, err = c.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: ids[1]})
	wantCode(t, err, "ALREADY_EXISTS")
	id := made.GetSnapshot().GetSnapshotId()
	stream, err := csi.NewSnapshotMetadataClient(c.conn).GetMetadataAllocated(ctx,
		&csi.GetMetadataAllocatedRequest{SnapshotId: id})
	must(t, err)
	block, err := stream.Recv()
	must(t, err)
	if block.GetVolumeCapacityBytes() != made.GetSnapshot().GetSizeBytes() {
		t.Errorf("the stream tells %v of %v", block, made)
	}
	group, err := csi.NewGroupControllerClient(c.conn).CreateVolumeGroupSnapshot(ctx,
		&csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: ids})
	must(t, err)
	if n := len(group.GetGroupSnapshot().GetSnapshots()); n != 3 {
		t.Errorf("the group has %d snapshots", n)
	}
	_, err = c.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: id})
	must(t, err)
	list, err := c.ListSnapshots(ctx, &csi.ListSnapshotsRequest{})
	must(t, err)
	if len(list.GetEntries()) != 3 {
		t.Errorf("ListSnapshots tells %v", list)
	}
}
