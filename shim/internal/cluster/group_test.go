package cluster

import (
	"context"
	"errors"
	"runtime"
	"testing"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// TestIndependentDecisionsShareATransaction has commits join while etcd has yet to answer an earlier transaction.
func TestIndependentDecisionsShareATransaction(t *testing.T) {
	n := newNode(t, parallelWithEtcd(t), "node")
	held := claim("held", "a")
	registrytest.Put(t, n, held)
	n.groups.turn <- struct{}{}
	first := n.joinGroup(t.Context(), n.decided(t, claimingAlone(claim("v-1", "a"))))
	for _, c := range []struct {
		name   string
		decide registry.Decision
		shares bool
	}{
		{"claims another volume", claimingAlone(claim("v-2", "a")), true},
		{"reads and writes a record", counting, true},
		{"reads a range that another one writes to", claimingAlone(claim("v-2", "b")), false},
		{"writes to a range that another one has read", func(registry.View) (registry.Change, error) {
			return registry.Change{Put: []registry.Record{claim("v-1", "b")}}, nil
		}, false},
		{"writes the same record", func(registry.View) (registry.Change, error) {
			return registry.Change{Put: []registry.Record{registry.Volume{
				VolumeSpec: registry.VolumeSpec{Namespace: counterName.Namespace, ID: counterName.ID}}}}, nil
		}, false},
		{"deletes what another one does not read", func(registry.View) (registry.Change, error) {
			return registry.Change{Delete: []registry.Key{held.Key()}}, nil
		}, true},
		{"reads what another one deletes", func(v registry.View) (registry.Change, error) {
			v.Get(held.Key())
			return registry.Change{Put: []registry.Record{claim("v-3", "a")}}, nil
		}, false},
	} {
		n.groups.next = first
		g := n.joinGroup(t.Context(), n.decided(t, c.decide))
		if (g == first) != c.shares {
			t.Errorf("%s: shares the transaction: %v", c.name, !c.shares)
		}
		if g != first { // do not carry out the decision of another group
			g.cancel(errTaken)
			<-g.ended
		}
	}
	<-n.groups.turn
	if <-first.ended; !first.done || first.err != nil {
		t.Fatalf("the transaction: %v, %v", first.done, first.err)
	}
	look(t, n, func(v registry.View) {
		if counter, _ := v.Volume(counterName); len(v.AllClaims()) != 2 || counter.Capacity != 1 {
			t.Errorf("claims %v, counted to %d", v.AllClaims(), counter.Capacity)
		}
	})
}

// TestConflictOfOneDecisionFailsNoOther has two commits share a transaction. Another node changes a record that one of
// them has read. The other commit succeeds.
func TestConflictOfOneDecisionFailsNoOther(t *testing.T) {
	client := parallelWithEtcd(t)
	n, other := newNode(t, client, "node"), newNode(t, client, "other")
	n.groups.turn <- struct{}{}
	g := n.joinGroup(t.Context(), n.decided(t, counting))
	outcomes := make(chan error, 2)
	for _, volume := range []string{"taken", "free"} {
		go func() {
			_, err := n.Commit(t.Context(), claimingAlone(claim(volume, "a")))
			outcomes <- err
		}()
	}
	for joined := 0; joined < 3; runtime.Gosched() {
		n.groups.mu.Lock()
		joined = g.waiting
		n.groups.mu.Unlock()
	}
	registrytest.Put(t, other, claim("taken", "b"))
	<-n.groups.turn
	if <-g.ended; g.done || g.err != nil {
		t.Errorf("the transaction: %v, %v", g.done, g.err)
	}
	if a, b := <-outcomes, <-outcomes; (a == nil) == (b == nil) || !errors.Is(errors.Join(a, b), errTaken) {
		t.Errorf("the commits end with %v and %v", a, b)
	}
	look(t, n, func(v registry.View) {
		if len(v.AllClaims()) != 2 {
			t.Errorf("claims: %v", v.AllClaims())
		}
	})
}

// TestRefusalOfOneDecisionFailsNoOther has three commits share a transaction, of which one is too large for etcd.
func TestRefusalOfOneDecisionFailsNoOther(t *testing.T) {
	n := newNode(t, parallelWithEtcd(t), "node")
	n.groups.turn <- struct{}{}
	g := n.joinGroup(t.Context(), n.decided(t, counting))
	outcomes := make(chan error, 3)
	join := func(d decision) {
		n.groups.mu.Lock()
		joins := g.joined + 1
		n.groups.mu.Unlock()
		go func() {
			_, _, err := n.commitGrouped(t.Context(), d)
			outcomes <- err
		}()
		for joined := 0; joined < joins; runtime.Gosched() {
			n.groups.mu.Lock()
			joined = g.joined
			n.groups.mu.Unlock()
		}
	}
	join(n.decided(t, claimingAlone(claim("small", "a"))))
	tooLarge := n.decided(t, deciding(large("large")))
	size := g.size
	g.size -= len(tooLarge.values[large("large").Key()]) // otherwise the decision does not join the group
	join(tooLarge)
	g.size = size
	join(n.decided(t, claimingAlone(claim("other", "a"))))
	<-n.groups.turn
	if <-g.ended; !errors.Is(g.err, errRefused) {
		t.Errorf("the transaction: %v", g.err)
	}
	var failed []error
	for range 3 {
		if err := <-outcomes; err != nil {
			failed = append(failed, err)
		}
	}
	if len(failed) != 1 || !errors.Is(failed[0], registry.ErrInternal) {
		t.Errorf("failed: %v", failed)
	}
	look(t, n, func(v registry.View) {
		if len(v.AllClaims()) != 2 || len(v.Volumes()) != 0 {
			t.Errorf("claims %v, volumes %v", v.AllClaims(), len(v.Volumes()))
		}
	})
}

// TestCallerLeavesACommonTransaction ends the contexts of commits that wait for a common transaction. The last commit
// to leave ends the transaction. If others stay, the outcome is uncertain, and after Settle the transaction has no
// effect.
func TestCallerLeavesACommonTransaction(t *testing.T) {
	n := newNode(t, parallelWithEtcd(t), "node")
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	n.groups.turn <- struct{}{}
	if _, _, err := n.commitGrouped(gone, n.decided(t, counting)); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("the only commit ends with %v", err)
	}
	g := n.joinGroup(t.Context(), n.decided(t, claimingAlone(claim("v", "a"))))
	if _, _, err := n.commitGrouped(gone, n.decided(t, counting)); !errors.Is(err, registry.ErrUncertain) {
		t.Errorf("one of two commits ends with %v", err)
	}
	if err := n.Settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-n.groups.turn
	if <-g.ended; g.done || g.err != nil {
		t.Errorf("the transaction after Settle: %v, %v", g.done, g.err)
	}
	registrytest.Put(t, n, claim("v", "b"))
	look(t, n, func(v registry.View) {
		if counter, found := v.Volume(counterName); found || len(v.AllClaims()) != 1 {
			t.Errorf("claims %v, counted to %d", v.AllClaims(), counter.Capacity)
		}
	})
}

// decided returns the decision in the form in which Commit passes it on.
func (n *testNode) decided(t *testing.T, decide registry.Decision) decision {
	t.Helper()
	d, err := n.decide(t.Context(), decide)
	if err != nil || d.refused != nil {
		t.Fatal(err, d.refused)
	}
	return d
}
