package rpc

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/config"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/cluster"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// A shim that is replaced before it has joined its cluster leaves the call to the next shim.
func TestCallThatWaitsForTheClusterGoesToTheNextShim(t *testing.T) {
	e := newEnv(t)
	var err error
	e.active.Cluster, err = cluster.NewNode(cluster.Options{
		Cluster: config.Cluster{ID: "c", Endpoints: []string{"http://127.0.0.1:1"}, LeaseTTL: time.Second},
		Node:    "here", Local: e.log, Plugins: e.table, Now: time.Now, Logger: hclog.NewNullLogger()})
	must(t, err)
	t.Cleanup(func() { _ = e.active.Cluster.Close() })
	e.release(errors.New("released"))
	_ = e.active.Cluster.State.Run(e.active.Context)
	_, err = e.server.PassToExecutor(t.Context(), &pb.ExpandVolumeRequest{},
		&grpc.UnaryServerInfo{FullMethod: pb.Volumes_Expand_FullMethodName},
		func(context.Context, any) (any, error) { return nil, errors.New("carried out here") })
	if !notActive(err) {
		t.Errorf("the caller gets %v", err)
	}
}

// A shim that is being replaced gives no answer to a call of another node.
func TestReplacedShimDoesNotAnswerAnotherNode(t *testing.T) {
	e := newEnv(t)
	request, err := proto.Marshal(&pb.DeleteVolumeRequest{Call: &pb.Call{OperationId: "op"},
		Name: &pb.VolumeName{Namespace: "default", Id: "v"}})
	must(t, err)
	if _, err := e.server.Serve(t.Context(), pb.Volumes_Delete_FullMethodName, request); status.Code(err) !=
		codes.NotFound {
		t.Errorf("an active shim says %v", err)
	}
	e.server.Quiesce()
	_, err = e.server.Serve(t.Context(), pb.Volumes_Delete_FullMethodName, request)
	if !errors.Is(err, intent.ErrReleased) {
		t.Errorf("a shim that has quiesced says %v", err)
	}
}

// Each node has a plugin that keeps volumes on their node. The call for a volume goes to the volume's node, even if
// that node is lost, unless the call only removes the record.
func TestCallsForAVolumeOnALostNode(t *testing.T) {
	e := newEnv(t)
	controller := instance("c")
	controller.Role, controller.Options = registry.RoleController,
		map[string]string{registry.OptionScope: registry.ScopeNode}
	e.register(t, controller)
	there := volume("v")
	there.Plugin, there.Node = controller.Plugin, "there"
	snap := registry.VolumeSnapshot{SnapshotSpec: registry.SnapshotSpec{Namespace: there.Namespace, ID: "s"},
		Plugin: there.Plugin, Node: "there"}
	group := registry.VolumeSnapshot{SnapshotSpec: registry.SnapshotSpec{Namespace: there.Namespace, ID: "g",
		Volumes: []registry.VolumeID{there.ID}}, Plugin: there.Plugin, Node: "there",
		Members: []registry.GroupMember{{Volume: there.ID, Source: there.External, External: "s-1"}}}
	other := snap // a snapshot with the name of the group
	other.ID, other.Plugin, other.Node = "g", "other", ""
	put(t, e.log, there, snap, group, other)
	name := &pb.VolumeName{Namespace: string(there.Namespace), Id: string(there.ID)}
	call := &pb.Call{OperationId: "op"}
	passed := func(method string, req request) bool {
		t.Helper()
		c, elsewhere, err := e.active.remoteCall(t.Context(), method, req)
		if err != nil || c.To != "there" {
			t.Errorf("%s: %+v, %v", method, c, err)
		}
		return elsewhere
	}
	lease := registry.NodeLease{Node: "there", Lease: 1}
	for _, c := range []struct {
		state        registry.NodeState
		alive, needs bool
	}{
		{registry.NodeReady, true, true}, {registry.NodeReady, false, true}, {registry.NodeOutOfService, false, false},
		{registry.NodeFenced, false, false}, {registry.NodeFenced, true, true},
	} {
		commit(t, e.log, func(registry.View) registry.Change {
			change := registry.Change{Put: []registry.Record{registry.Node{Name: "there", State: c.state}}}
			if c.alive {
				change.Put = append(change.Put, lease)
			} else {
				change.Delete = []registry.Key{lease.Key()}
			}
			return change
		})
		if !passed(pb.Volumes_Delete_FullMethodName, &pb.DeleteVolumeRequest{Call: call, Name: name}) {
			t.Errorf("%+v: the deletion is carried out here", c)
		}
		if passed(pb.Volumes_Deregister_FullMethodName,
			&pb.DeregisterVolumeRequest{Call: call, Name: name}) != c.needs ||
			passed(pb.Snapshots_Deregister_FullMethodName, &pb.DeregisterSnapshotRequest{Call: call,
				Name: &pb.SnapshotName{Namespace: string(snap.Namespace), Id: string(snap.ID)}}) != c.needs {
			t.Errorf("%+v: the deregistration is passed on wrongly", c)
		}
	}
	passed(pb.Volumes_Create_FullMethodName, &pb.CreateVolumeRequest{Call: call, Spec: &pb.VolumeSpec{
		Namespace: string(there.Namespace), Id: "restored", PluginId: string(there.Plugin), SnapshotId: "g-v"}})
	passed(pb.Snapshots_DeleteGroup_FullMethodName, &pb.DeleteSnapshotRequest{Call: call,
		Name: &pb.SnapshotName{Namespace: string(there.Namespace), Id: "g"}})
}

// A call for a volume that another node has just recorded goes to the volume's node.
func TestCallForANewVolumeGoesToItsNode(t *testing.T) {
	e := newEnv(t)
	there := volume("v")
	there.Node = "there"
	put(t, e.log, registry.Node{Name: "there", State: registry.NodeReady})
	req := &pb.DeregisterVolumeRequest{Call: &pb.Call{OperationId: "op"},
		Name: &pb.VolumeName{Namespace: string(there.Namespace), Id: string(there.ID)}}
	_, elsewhere, err := e.active.remoteCall(t.Context(), pb.Volumes_Deregister_FullMethodName, req)
	if elsewhere || err != nil {
		t.Errorf("unknown: passed on %v, %v", elsewhere, err)
	}
	e.active.State = &registrytest.Late{State: e.log, Change: registry.Change{Put: []registry.Record{there}}}
	req.Call = nil // a host may forget it
	c, elsewhere, err := e.active.remoteCall(t.Context(), pb.Volumes_Deregister_FullMethodName, req)
	if !elsewhere || err != nil || c.To != "there" {
		t.Errorf("recorded by another node: passed on %v to %q, %v", elsewhere, c.To, err)
	}
}

// A host may leave the namespace of a volume or snapshot empty: then it is the default one.
func TestCallsWithoutANamespaceGoToTheirNode(t *testing.T) {
	e := newEnv(t)
	there := volume("v")
	there.Node = "there"
	snap := registry.VolumeSnapshot{SnapshotSpec: registry.SnapshotSpec{Namespace: there.Namespace, ID: "s"},
		Plugin: there.Plugin, Node: "there"}
	put(t, e.log, registry.Node{Name: "there", State: registry.NodeReady}, there, snap)
	name, snapName := &pb.VolumeName{Id: "v"}, &pb.SnapshotName{Id: "s"}
	for method, req := range map[string]request{
		pb.Volumes_Expand_FullMethodName:       &pb.ExpandVolumeRequest{Name: name},
		pb.VolumeChanges_Update_FullMethodName: &pb.UpdateVolumeRequest{Spec: &pb.VolumeSpec{Id: "v", PluginId: "p"}},
		pb.Volumes_Create_FullMethodName: &pb.CreateVolumeRequest{
			Spec: &pb.VolumeSpec{Id: "clone", PluginId: "p", CloneId: "v"}},
		pb.Snapshots_Create_FullMethodName: &pb.CreateSnapshotRequest{
			Spec: &pb.SnapshotSpec{Name: &pb.SnapshotName{Id: "new"}, VolumeId: "v"}},
		pb.Snapshots_Delete_FullMethodName: &pb.DeleteSnapshotRequest{Name: snapName},
		pb.Snapshots_Blocks_FullMethodName: &pb.SnapshotBlocksRequest{Snapshot: snapName},
	} {
		c, elsewhere, err := e.active.remoteCall(t.Context(), method, req)
		if err != nil || !elsewhere || c.To != "there" {
			t.Errorf("%s: passed on %v to %q, %v", method, elsewhere, c.To, err)
		}
	}
}

// If this node becomes the executor while another node lists blocks, it continues after the last part.
func TestListOfBlocksContinuesAtTheNextExecutor(t *testing.T) {
	req := &pb.SnapshotBlocksRequest{StartingOffset: 1}
	var asked, sent []int64
	rest, err := passBlocks(t.Context(), req, func(_ context.Context, req *pb.SnapshotBlocksRequest) ([]byte, error) {
		if asked = append(asked, req.GetStartingOffset()); len(asked) == 3 {
			return nil, cluster.ErrHere
		}
		return proto.Marshal(&pb.SnapshotBlocksReply{NextOffset: req.GetStartingOffset() + 10})
	}, func(part *pb.SnapshotBlocksReply) error {
		sent = append(sent, part.GetNextOffset())
		return nil
	})
	if !errors.Is(err, cluster.ErrHere) || rest.GetStartingOffset() != 21 || req.GetStartingOffset() != 1 ||
		!slices.Equal(asked, []int64{1, 11, 21}) || !slices.Equal(sent, []int64{11, 21}) {
		t.Errorf("asked from %v, sent up to %v, continues at %d: %v", asked, sent, rest.GetStartingOffset(), err)
	}
}

// Each part of a list of blocks has the limit of a call, for example if no node executes the plugin. The whole list may
// take longer.
func TestEachPartOfAListOfBlocksIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began, parts := time.Now(), int64(0)
		_, err := passBlocks(t.Context(), &pb.SnapshotBlocksRequest{},
			func(ctx context.Context, _ *pb.SnapshotBlocksRequest) ([]byte, error) {
				if parts++; parts <= 3 {
					time.Sleep(callLimit - time.Second)
					return proto.Marshal(&pb.SnapshotBlocksReply{NextOffset: parts})
				}
				<-ctx.Done()
				return nil, context.Cause(ctx)
			}, func(*pb.SnapshotBlocksReply) error { return nil })
		if took := time.Since(began); err != noSuccess(callLimit) || took != 4*callLimit-3*time.Second {
			t.Errorf("after %v: %v", took, err)
		}
	})
}

// manyBlocks is a driver whose snapshots have blocks one after the other.
type manyBlocks struct {
	controller.SnapshotDriver
	pause time.Duration // before each page
}

func (m manyBlocks) SnapshotBlocks(
	_ context.Context, _ registry.InstanceKey, r csi.BlocksRequest, receive func(registry.Blocks) error,
) error {
	const total = maxRanges + 5
	for at := r.Offset; at < total; {
		time.Sleep(m.pause)
		page := registry.Blocks{Type: registry.FixedLength, Capacity: total}
		for ; at < total && len(page.Ranges) < int(r.Max); at++ {
			page.Ranges = append(page.Ranges, registry.BlockRange{Offset: at, Size: 1})
		}
		if err := receive(page); err != nil {
			return err
		}
	}
	return nil
}

// A list of blocks that is too long for one answer to another node, or comes slowly, continues in the next answer.
func TestLongListOfBlocksIsAnsweredInParts(t *testing.T) {
	for pause, answers := range map[time.Duration][]int{
		0:                {maxRanges, 5, 0},
		11 * time.Second: {6000, 6000, 6000, 2005, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			e := newEnv(t)
			c := instance("c")
			c.Role = registry.RoleController
			c.Fingerprint.Capabilities = []registry.Capability{registry.SnapshotMetadata}
			e.register(t, c)
			snap := registry.VolumeSnapshot{SnapshotSpec: registry.SnapshotSpec{Namespace: "default", ID: "s"},
				Plugin: "p", External: "e-s", State: registry.SnapshotReady}
			put(t, e.log, snap)
			e.active.Snapshots = controller.NewSnapshots(e.active.Volumes, manyBlocks{pause: pause})
			req := &pb.SnapshotBlocksRequest{Snapshot: &pb.SnapshotName{Id: "s"}}
			ranges := 0
			for _, want := range answers {
				text, err := proto.Marshal(req)
				must(t, err)
				answer, err := e.server.Serve(t.Context(), pb.Snapshots_Blocks_FullMethodName, text)
				must(t, err)
				var part pb.SnapshotBlocksReply
				must(t, proto.Unmarshal(answer, &part))
				if ranges += want; len(part.GetRanges()) != want || part.GetNextOffset() != int64(ranges) {
					t.Fatalf("%d ranges up to %d; want %d up to %d", len(part.GetRanges()), part.GetNextOffset(), want,
						ranges)
				}
				req.StartingOffset = part.GetNextOffset()
			}
		})
	}
}
