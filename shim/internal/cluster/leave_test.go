package cluster

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/config"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// TestLeave has nodes leave their cluster. A node with a claim, a mount or a wrong name is refused. After a node has
// left, neither the cluster nor the node's store has its records, even if Leave was interrupted in between. The node
// may join again.
func TestLeave(t *testing.T) {
	client := parallelWithEtcd(t)
	b := newMember(t, client, "b")
	b.await(t, true)() // so that a executes no plugin
	a := newMember(t, client, "a")
	held := claim("vol", "alloc")
	held.Node, held.Name = "a", volumeOf("vol", "vol").VolumeName()
	group := registry.VolumeSnapshot{Plugin: "local", Node: "a", SnapshotSpec: registry.SnapshotSpec{
		Namespace: "default", ID: "g", Volumes: []registry.VolumeID{"gone"}}, State: registry.SnapshotFailed}
	registrytest.Put(t, a, held, volumeOf("vol", "vol"), group)
	a.cut()
	a.stop()
	block := config.Cluster{ID: t.Name(), Endpoints: client.Endpoints(), Expect: 1, LeaseTTL: leaseTTL}
	leave := func(of *testNode, wants ...string) {
		t.Helper()
		of.offline(t, func(local registry.State) {
			err := Leave(t.Context(), local, block, registry.NodeName(of.name), hclog.NewNullLogger())
			if len(wants) == 0 && err != nil {
				t.Errorf("leave: %v", err)
			}
			for _, want := range wants {
				if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), want) {
					t.Errorf("leave: %v; want %q", err, want)
				}
			}
		})
	}
	leave(a.testNode, "the claim of alloc alloc on volume vol", "holdfast node drain a",
		"group snapshot default/g, which is stored there")
	commit(t, b, registry.Change{Delete: []registry.Key{held.Key(), group.Key()}})
	ref := refOf(held)
	a.offline(t, func(s registry.State) { registrytest.Put(t, s, ref) })
	leave(a.testNode, "volume vol published for alloc alloc")
	a.offline(t, func(s registry.State) {
		commit(t, s, registry.Change{Delete: []registry.Key{ref.Key()}})
	})
	for _, name := range []string{"c", "b"} { // no node, and another one
		a.name = name
		began := time.Now()
		leave(a.testNode, `it is member "a"`)
		if took := time.Since(began); took > leaveTimeout/2 {
			t.Errorf("the wrong name was refused after %v", took)
		}
	}
	a.name = "a"
	leave(a.testNode)
	b.seeState(t, "a", registry.NodeForgotten)
	a.offline(t, func(s registry.State) {
		look(t, s, func(v registry.View) {
			if err := CheckMember(v, ""); err != nil || len(v.Volumes()) > 0 || len(v.Nodes()) > 0 {
				t.Errorf("after it has left: %v, volumes %v, nodes %v", err, v.Volumes(), v.Nodes())
			}
		})
	})
	leave(a.testNode, "member of no cluster")

	again := newMember(t, client, "a")
	b.seeState(t, "a", registry.NodeOutOfService) // the node is ready once it has unmounted all volumes
	b.seeAlive(t, "a", true)
	again.die(t, b)
	again.stop()
	if err := b.Forget(t.Context(), "a", "alice", ""); err != nil { // as if Leave was interrupted
		t.Fatal(err)
	}
	leave(again.testNode)
}

// TestForgetSeesALateClaim commits a claim of a node just before the node is forgotten. Forget is refused.
func TestForgetSeesALateClaim(t *testing.T) {
	client := parallelWithEtcd(t)
	c, b := newMember(t, client, "c"), newMember(t, client, "b")
	c.await(t, true)() // so that a executes no plugin
	a := newMember(t, client, "a")
	b.seeAlive(t, "a", true)
	a.die(t, b)
	late := claimOf("a", "vol", "alloc")
	first := sync.OnceFunc(func() { registrytest.Put(t, c, late) })
	b.sending = func(registry.Change) { first() }
	err := b.Forget(t.Context(), "a", "alice", "")
	if err == nil || !strings.Contains(err.Error(), "the claim of alloc") {
		t.Errorf("forget a node with a claim: %v", err)
	}
}

// TestLeaveLostCluster has a node leave a cluster that does not exist any more. Without confirmation, the error says
// what may be lost.
func TestLeaveLostCluster(t *testing.T) {
	a := newMember(t, parallelWithEtcd(t), "a")
	at := registry.Attachment{Volume: claim("vol", "").Volume, Name: volumeOf("vol", "vol").VolumeName(), Node: "a",
		NodeID: "a-id", State: registry.MarkDone}
	registrytest.Put(t, a, volumeOf("vol", "vol"), at)
	a.cut()
	a.stop()
	a.offline(t, func(local registry.State) {
		_, err := LeaveLost(t.Context(), local, "a", "other")
		if !errors.Is(err, registry.ErrDenied) || !strings.Contains(err.Error(), "records of 1 volumes") ||
			!strings.Contains(err.Error(), "still attached to this node: vol") {
			t.Errorf("not confirmed: %v", err)
		}
		id, err := LeaveLost(t.Context(), local, "a", t.Name())
		if err != nil || id != t.Name() {
			t.Errorf("left %q: %v", id, err)
		}
		look(t, local, func(v registry.View) {
			if err := CheckMember(v, ""); err != nil || len(v.Volumes()) > 0 {
				t.Errorf("%v, volumes %v", err, v.Volumes())
			}
		})
	})
}
