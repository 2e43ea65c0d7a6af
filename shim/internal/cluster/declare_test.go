package cluster

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/internal/etcdtest"
	"holdfast/registry"
)

// member is a node that has registered in its cluster.
type member struct {
	*executing
	*Node
}

func newMember(t *testing.T, client *clientv3.Client, name string) *member {
	t.Helper()
	x := newExecuting(t, newNode(t, client, name))
	m := &member{x, &Node{State: x.testNode.State, Executors: x.Executors, session: x.session, plugins: &x.plugins,
		log: hclog.NewNullLogger(), changed: make(chan struct{}, 1)}}
	m.State.expect = 1
	if err := m.describeNow(t.Context()); err != nil {
		t.Fatal(err)
	}
	return m
}

// die ends the lease of the member, as if its machine had stopped some time ago.
func (m *member) die(t *testing.T) {
	t.Helper()
	m.cut()
	if _, err := m.testNode.client.Revoke(t.Context(), clientv3.LeaseID(m.session.Lease())); err != nil {
		t.Fatal(err)
	}
}

// see waits until the copy of the member shows something.
func (m *member) see(t *testing.T, what string, seen func(registry.View) bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; {
		changed := m.State.copy.next()
		is := false
		look(t, m.State, func(v registry.View) { is = seen(v) })
		if is {
			return
		}
		select {
		case <-changed:
		case <-time.After(time.Until(end)):
			t.Fatalf("node %s does not see: %s", m.name, what)
		}
	}
}

func (m *member) seeState(t *testing.T, node registry.NodeName, state registry.NodeState) {
	t.Helper()
	m.see(t, string(node)+" is "+string(state), func(v registry.View) bool {
		n, _ := v.Node(node)
		return n.State == state
	})
}

// TestOnlyALostNodeIsDeclaredOutOfService declares nodes that are alive, unknown, and lost. With the node goes its part
// in the execution of plugins. Its drain stays until it is ended.
func TestOnlyALostNodeIsDeclaredOutOfService(t *testing.T) {
	client := etcdtest.Start(t)
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
	if r, err := b.Drain(t.Context(), "a", true, time.Time{}, "alice", "maintenance"); err != nil || r.State != registry.NodeDraining {
		t.Errorf("drain: %+v, %v", r, err)
	}
	a.die(t)
	b.see(t, "a is suspect", func(v registry.View) bool { _, alive := v.NodeLease("a"); return !alive })
	for range 2 {
		r, err := b.OutOfService(t.Context(), "a", "alice", "dead")
		if err != nil || r.State != registry.NodeOutOfService || r.Epoch != 1 || r.By != "alice" || r.Reason != "dead" {
			t.Errorf("%+v, %v", r, err)
		}
	}
	for _, on := range []bool{true, false} {
		if r, err := b.Drain(t.Context(), "a", on, time.Time{}, "bob", ""); err != nil || r.Drained() != on || !r.Lost() {
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
