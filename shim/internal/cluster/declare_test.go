package cluster

import (
	"errors"
	"strings"
	"testing"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// TestOnlyALostNodeIsDeclaredOutOfService declares nodes out of service that are alive, unknown and suspect. The
// suspect node is no longer an executor after that. Its drain stays until it is ended.
func TestOnlyALostNodeIsDeclaredOutOfService(t *testing.T) {
	client := parallelWithEtcd(t)
	a, b := newMember(t, client, "a"), newMember(t, client, "b")
	a.await(t, true)()
	b.see(t, "a", func(v registry.View) bool { _, known := v.Node("a"); return known })
	for node, want := range map[registry.NodeName]error{
		"a": registry.ErrConflict, "b": registry.ErrConflict, "nobody": registry.ErrNotFound,
	} {
		if _, err := b.OutOfService(t.Context(), node, "alice", "dead"); !errors.Is(err, want) {
			t.Errorf("%s: %v", node, err)
		}
	}
	r, err := b.Drain(t.Context(), "a", true, time.Time{}, "alice", "maintenance")
	if err != nil || r.State != registry.NodeDraining {
		t.Errorf("drain: %+v, %v", r, err)
	}
	a.die(t, b)
	for range 2 {
		r, err := b.OutOfService(t.Context(), "a", "alice", "dead")
		if err != nil || r.State != registry.NodeOutOfService || r.Epoch != 1 || r.By != "alice" || r.Reason != "dead" {
			t.Errorf("%+v, %v", r, err)
		}
	}
	for _, on := range []bool{true, false} {
		want := map[bool]registry.Drain{true: {By: "bob", Reason: "soon", Deadline: time.Unix(2e9, 0).UTC()}}[on]
		r, err := b.Drain(t.Context(), "a", on, want.Deadline, "bob", "soon")
		if got, is := r.Drains(); err != nil || is != on || got != want || !r.Lost() {
			t.Errorf("a drain of a lost node is on=%t: %+v, %v", on, r, err)
		}
	}
	if _, err := b.Drain(t.Context(), "a", false, time.Time{}, "alice", ""); !errors.Is(err, registry.ErrConflict) ||
		!strings.Contains(err.Error(), "out-of-service by alice: dead") {
		t.Errorf("end of the drain of a lost node: %v", err)
	}
	b.await(t, true)()
	if e := b.executor(t); e.Holder != "b" || len(e.Former) > 0 {
		t.Errorf("executor: %+v", e)
	}
}

// TestOnlyANodeThatHoldsNothingIsForgotten tries to forget a node that is alive and a node with claims, and forgets a
// node without claims. When this node comes back, it unmounts its volumes before it is ready.
func TestOnlyANodeThatHoldsNothingIsForgotten(t *testing.T) {
	client := parallelWithEtcd(t)
	a, b := newMember(t, client, "a"), newMember(t, client, "b")
	b.setHealthy(false)
	a.await(t, true)()
	held := claimOf("a", "vol", "alloc")
	records := []registry.Record{held,
		registry.Attachment{Volume: held.Volume, Name: held.Name, Node: "a", NodeID: "id"},
		registry.Intent{
			Volume: held.Volume, Name: held.Name, RPC: registry.DeleteVolumeRPC, Senders: []registry.NodeName{"a"},
		},
		registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: "local", Plugin: "q", Node: "a"}}}
	if _, err := a.Drain(t.Context(), "a", true, time.Time{}, "bob", ""); err != nil {
		t.Fatal(err)
	}
	registrytest.Put(t, a, records...)
	b.see(t, "the volume", func(v registry.View) bool { return len(v.Volumes()) == 1 })
	refused := func(node registry.NodeName, kind error, why ...string) {
		t.Helper()
		err := b.Forget(t.Context(), node, "alice", "sold")
		for _, text := range why {
			if !errors.Is(err, kind) || !strings.Contains(err.Error(), text) {
				t.Errorf("%s: %v; want %v with %q", node, err, kind, text)
			}
		}
	}
	refused("none", registry.ErrNotFound, "named none")
	refused("b", registry.ErrConflict, "is this node")
	refused("a", registry.ErrConflict, "is alive")
	a.die(t, b)
	refused("a", registry.ErrConflict, "the claim of alloc alloc", "an attachment of", "an open DeleteVolume",
		"volume local", "executor, of plugin p", "node out-of-service a --confirm a")
	if _, err := b.OutOfService(t.Context(), "a", "alice", "sold"); err != nil {
		t.Fatal(err)
	}
	refused("a", registry.ErrConflict, "it is out-of-service")
	var keys []registry.Key
	for _, r := range records {
		keys = append(keys, r.Key())
	}
	registrytest.Put(t, b, registry.RemoteCall{ID: "deletion", Plugin: "q", To: "a", From: "b"})
	commit(t, b, registry.Change{Delete: keys})
	if err := b.Forget(t.Context(), "a", "alice", "sold"); err != nil {
		t.Fatal(err)
	}
	look(t, b, func(v registry.View) {
		if nodes := v.Nodes(); len(nodes) != 1 || nodes[0].Name != "b" || len(v.RemoteCalls()) > 0 {
			t.Errorf("nodes: %+v, calls: %+v", nodes, v.RemoteCalls())
		}
	})
	if err := b.Forget(t.Context(), "a", "alice", "sold"); err != nil { // as the next shim would repeat the call
		t.Error(err)
	}
	if _, err := b.OutOfService(t.Context(), "a", "alice", "sold"); !errors.Is(err, registry.ErrNotFound) {
		t.Errorf("a forgotten node is declared out of service: %v", err)
	}

	a = a.restart(t)
	if err := a.describeNow(t.Context()); err != nil {
		t.Fatal(err)
	}
	look(t, a, func(v registry.View) {
		if nodes := v.Nodes(); len(nodes) != 2 || nodes[0].State != registry.NodeOutOfService || !a.mustTakeDown(v) {
			t.Errorf("nodes, once it is back: %+v", nodes)
		}
	})
	release := &testRelease{member: a, t: t}
	a.run(t, NewReaper(a.Node, release, release).Run)
	b.seeState(t, "a", registry.NodeReady)
}
