package node

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
)

// An expansion whose end nobody can find out, as its secrets are gone, keeps no volume from being given back. It is
// known then as one that was answered vaguely.
func TestExpansionWithoutAnEndIsLeft(t *testing.T) {
	vol := registry.VolumeKey{Plugin: "p", External: "x-a"}
	for _, c := range []struct {
		open    registry.Intent
		code    string
		refused string
	}{
		{registry.Intent{Volume: vol, RPC: registry.NodeExpandRPC, Code: "DEADLINE_EXCEEDED", Detail: "late"},
			"DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"},
		// and a further try was under way
		{registry.Intent{Volume: vol, RPC: registry.NodeExpandRPC, Code: "NOT_FOUND"}, "UNKNOWN", "UNKNOWN"},
		{registry.Intent{Volume: vol, RPC: registry.ControllerExpandRPC}, "UNKNOWN", ""},
	} {
		for _, claimed := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				p := newParts(t)
				p.volume("a")
				a, end := p.allocs()
				defer end()
				if claimed {
					if _, err := a.Prepare(t.Context(), registry.Call{}, group(t, "alloc-1", "a")); err != nil {
						t.Fatal(err)
					}
				}
				before := len(p.said())
				p.fail["settle"] = 1 << 20
				if err := p.commit([]registry.Record{c.open,
					registry.Attachment{Volume: vol, Node: us.Node, State: registry.MarkDone},
					registry.Staging{Volume: vol, State: registry.MarkDone}}); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				if claimed {
					if err := a.Release(ctx, registry.Call{}, "alloc-1"); err != nil {
						t.Errorf("%s: %v", c.open.RPC, err)
					}
				} else if err := a.TakeDownUnclaimed(ctx); err != nil {
					t.Error(err)
				}
				time.Sleep(time.Minute)
				want := []string{"settle " + string(c.open.RPC) + " failed", "unstage x-a", "detach x-a"}
				if claimed {
					want = slices.Concat(want[:1], []string{"unpublish x-a alloc-1"}, want[1:],
						[]string{"unclaim x-a alloc-1"})
				}
				if got := p.said()[before:]; len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
					t.Errorf("%s: %q", c.open.RPC, got)
				}
				if open, found := p.open(vol); found {
					t.Errorf("%s is still open: %+v", c.open.RPC, open)
				}
			})
		}
	}
}

// open is the open call of a volume.
func (p *parts) open(k registry.VolumeKey) (open registry.Intent, found bool) {
	p.t.Helper()
	err := p.log.View(context.Background(), func(v registry.View) error {
		open, found = registry.OpenIntent(v, k)
		return nil
	})
	if err != nil {
		p.t.Fatal(err)
	}
	return open, found
}

// What an alloc waits for is its own step, though the call that is in its way is none of an alloc's.
func TestExpansionInTheWayIsNoStep(t *testing.T) {
	p := newParts(t)
	if err := p.commit([]registry.Record{registry.Alloc{ID: "alloc-1"}}); err != nil {
		t.Fatal(err)
	}
	a, end := p.allocs()
	defer end()
	h := &request{Allocs: a, key: registry.ClaimKey{Alloc: "alloc-1", Request: "a"}, step: registry.StepTurn}
	h.failed(t.Context(), &registry.CallError{RPC: registry.ControllerExpandRPC, Code: "ABORTED", Detail: "later"},
		time.Time{})
	err := p.log.View(t.Context(), func(v registry.View) error {
		al, _ := v.Alloc("alloc-1")
		if w := al.Waiting; len(w) != 1 || w[0].Step != registry.StepTurn || w[0].RPC != registry.ControllerExpandRPC ||
			w[0].Code != "ABORTED" {
			t.Errorf("it waits for %+v", w)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
