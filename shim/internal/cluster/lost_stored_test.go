package cluster

import (
	"context"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"

	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/controller"
)

// idleNode uses no volume.
type idleNode struct{ controller.Node }

func (idleNode) Name() registry.NodeName                                    { return "b" }
func (idleNode) Uses(context.Context, registry.VolumeKey) ([]string, error) { return nil, nil }

// TestNodeWhoseVolumesAreGoneIsForgotten loses a node with a volume that is stored there, attached and claimed. The
// claim is released without a call. The attachment stays, because only the node can detach it. If the node never comes
// back, the volume is deregistered and the node is forgotten.
func TestNodeWhoseVolumesAreGoneIsForgotten(t *testing.T) {
	client := parallelWithEtcd(t)
	a, b := newMember(t, client, "a"), newMember(t, client, "b")
	held := claimOf("a", "vol", "alloc")
	spec := registry.VolumeSpec{Namespace: held.Name.Namespace, ID: held.Name.ID, Plugin: held.Volume.Plugin,
		External: held.Volume.External, Node: "a"}
	at := registry.Attachment{Volume: held.Volume, Name: held.Name, Node: "a", NodeID: "a-id", State: registry.MarkDone}
	registrytest.Put(t, a, held, at, registry.Volume{VolumeSpec: spec, State: registry.VolumeReady, Created: true})
	calls := callsOf(b)
	volumes := controller.New(calls, nil, idleNode{}, hclog.NewNullLogger()) // without a driver no call can be made
	b.run(t, NewReaper(b.Node, volumes, nil).Run)
	deregister := func() error { return volumes.Deregister(t.Context(), held.Name) }

	a.die(t, b)
	if err := deregister(); err == nil || !strings.Contains(err.Error(), "attached to node a-id") {
		t.Errorf("deregister a volume of a suspect node: %v", err)
	}
	if _, err := b.OutOfService(t.Context(), "a", "alice", "it burns"); err != nil {
		t.Fatal(err)
	}
	b.see(t, "the claim is released", func(v registry.View) bool { return len(v.AllClaims()) == 0 })
	look(t, b, func(v registry.View) {
		if len(v.AllAttachments()) != 1 {
			t.Error("the attachment is gone, so the node would not detach the volume once it is back")
		}
	})
	if err := b.Forget(t.Context(), "a", "alice", ""); err == nil || !strings.Contains(err.Error(), "stored there") {
		t.Errorf("forget a node that has a volume: %v", err)
	}
	if err := deregister(); err != nil {
		t.Fatal(err)
	}
	look(t, b, func(v registry.View) {
		events, _ := v.Events(0, registry.MaxEvents)
		if last := events[len(events)-1]; last.Kind != registry.EventAbandoned ||
			!strings.Contains(last.Detail, "node a is out-of-service by alice: it burns") {
			t.Errorf("the last event is %+v", last)
		}
	})
	if err := b.Forget(t.Context(), "a", "alice", ""); err != nil {
		t.Error(err)
	}
}
