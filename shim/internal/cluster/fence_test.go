package cluster

import (
	"context"
	"errors"
	"testing"

	"holdfast/registry"
)

// TestNodeThatFencesNoMoreLetsOthersBack turns fencing off at a node that has tried in vain to fence another one. Once
// the other node is back, it is admitted.
func TestNodeThatFencesNoMoreLetsOthersBack(t *testing.T) {
	client := parallelWithEtcd(t)
	a, b := newMember(t, client, "a"), newMember(t, client, "b")
	a.die(t, b)
	b.fence = func(context.Context, registry.NodeName) error { return errors.New("no route to the power switch") }
	f := fencer{Node: b.Node}
	if err := f.fenceOnce(t.Context(), "a"); err == nil {
		t.Fatal("the node was fenced")
	}
	b.fence = nil
	if mine, err := f.mark(t.Context(), "a"); mine || err != nil {
		t.Errorf("a node without a fence fences: %t, %v", mine, err)
	}
	b.run(t, b.fenceLost)
	a.run(t, a.session.Run)
	b.see(t, "the mark is gone", func(v registry.View) bool {
		r, _ := v.Node("a")
		_, alive := v.NodeLease("a")
		return alive && r.Fencing == registry.Fencing{}
	})
}
