package rpc

import (
	"errors"
	"testing"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// A node that is in no cluster describes itself. It can be drained, and the drain is recorded once.
func TestNodeAloneIsDescribedAndDrained(t *testing.T) {
	e := newEnv(t)
	e.active.Cluster = nil
	node := pb.NewNodesClient(e.conn)
	i := instance("a")
	i.Fingerprint = registry.Fingerprint{NodeID: "id", MaxVolumes: 3, Topology: map[string]string{"zone": "z"},
		Capabilities: []registry.Capability{registry.StageUnstage}}
	controller := instance("b")
	controller.Role, controller.Health.State = registry.RoleController, registry.Unhealthy
	e.register(t, i, controller)
	claim := registry.Claim{Volume: registry.VolumeKey{Plugin: "p", External: "e"}, Alloc: "a", Request: "r",
		Node: "here"}
	attachment := registry.Attachment{Volume: claim.Volume, Node: "here", NodeID: "id", State: registry.MarkDone}
	stopped := claim // its plugin has no instance any more
	stopped.Volume.Plugin = "stopped"
	put(t, e.log, claim, attachment, stopped)

	get := func() registry.NodeStatus {
		reply, err := node.List(t.Context(), &pb.ListNodesRequest{Node: "here"})
		if must(t, err); len(reply.GetNodes()) != 1 {
			t.Fatalf("nodes: %v", reply)
		}
		return wire.Node(reply.GetNodes()[0])
	}
	st := get()
	if !st.Alive || st.State != registry.NodeReady || len(st.Plugins) != 2 {
		t.Fatalf("%+v", st)
	}
	p := st.Plugins[0]
	if p.Health(registry.RoleNode) != registry.Healthy || p.Health(registry.RoleController) != registry.Unhealthy ||
		p.NodeID != "id" || p.MaxVolumes != 3 || p.Topology["zone"] != "z" || p.Claims != 1 || p.Attachments != 1 ||
		p.Executor {
		t.Errorf("%+v", p)
	}
	if p := st.Plugins[1]; p.Plugin != "stopped" || p.Registered() || p.Claims != 1 || p.Attachments != 0 {
		t.Errorf("a plugin that has stopped: %+v", p)
	}
	drain := func(name string, end bool) (*pb.NodeReply, error) {
		return node.Drain(t.Context(), &pb.DrainNodeRequest{Call: &pb.Call{OperationId: name + string(st.State)},
			Node: name, End: end, By: "alice", Reason: "new disks"})
	}
	if _, err := drain("there", false); !errors.Is(wire.Error(err), registry.ErrNotFound) {
		t.Errorf("another node: %v", err)
	}
	for range 2 {
		_, err := drain("here", false)
		must(t, err)
	}
	st = get()
	if st.State != registry.NodeDraining || st.By != "alice" || st.Reason != "new disks" || st.Since.IsZero() {
		t.Errorf("drained: %+v", st)
	}
	_, err := drain("here", true)
	must(t, err)
	if st = get(); st.State != registry.NodeReady {
		t.Errorf("ready again: %+v", st)
	}
	_, err = node.OutOfService(t.Context(), &pb.OutOfServiceRequest{Call: &pb.Call{OperationId: "op-out"}, Node: "here",
		By: "alice"})
	if !errors.Is(wire.Error(err), registry.ErrUnsupported) {
		t.Errorf("out of service: %v", err)
	}
}
