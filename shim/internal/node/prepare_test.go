package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

func TestUpOrder(t *testing.T) {
	p := newParts(t)
	p.volume("a")
	a, end := p.allocs()
	defer end()
	plans, err := a.Prepare(t.Context(), registry.Call{ID: "op", Method: "m", Digest: "d"}, group(t, "alloc-1", "a"))
	if err != nil {
		t.Fatal(err)
	}
	expect(t, p.said(), "claim a alloc-1", "attach x-a n1", "stage x-a", "publish x-a alloc-1")
	if want := (hooks.Bind{Source: "/host/x-a", Target: "/a",
		Propagation: hooks.Private}); !slices.Contains(plans["t"].Binds, want) {
		t.Errorf("plan %+v lacks %+v", plans["t"], want)
	}
	err = p.log.View(t.Context(), func(v registry.View) error {
		if al, _ := v.Alloc("alloc-1"); al.State != registry.AllocReady || len(al.Waiting) != 0 {
			t.Errorf("alloc is %s, waits for %v", al.State, al.Waiting)
		}
		if op, ok := v.Operation("op"); !ok || op.Method != "m" || len(op.Answer) == 0 {
			t.Errorf("the answer is not stored with the change: %+v", op)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A3: unpublish, unstage, detach, then the claim; each only when the one before has succeeded; a failure of one volume
// holds up no other.
func TestDownOrder(t *testing.T) {
	for _, failing := range []string{"unpublish", "unstage", "detach", "unclaim"} {
		t.Run(failing, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newParts(t)
				p.volume("a")
				a, end := p.allocs()
				defer end()
				if _, err := a.Prepare(t.Context(), registry.Call{}, group(t, "alloc-1", "a")); err != nil {
					t.Fatal(err)
				}
				up := len(p.said())
				p.fail[failing] = 2
				if err := a.Release(t.Context(), registry.Call{}, "alloc-1"); err != nil {
					t.Fatal(err)
				}
				order := []string{"unpublish x-a alloc-1", "unstage x-a", "detach x-a", "unclaim x-a alloc-1"}
				var want []string
				for range 2 {
					for _, s := range order {
						if strings.HasPrefix(s, failing) {
							want = append(want, s+" failed")
							break
						}
						want = append(want, s)
					}
				}
				expect(t, p.said()[up:], append(want, order...)...)
			})
		})
	}
}

func TestOneVolumeHoldsUpNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		p.volume("a")
		p.volume("b")
		a, end := p.allocs()
		defer end()
		if _, err := a.Prepare(t.Context(), registry.Call{}, group(t, "alloc-1", "a", "b")); err != nil {
			t.Fatal(err)
		}
		p.fail["unpublish x-b"] = 1
		if err := a.Release(t.Context(), registry.Call{}, "alloc-1"); err != nil {
			t.Fatal(err)
		}
		said := p.said()
		if slices.Index(said, "unclaim x-a alloc-1") > slices.Index(said, "unclaim x-b alloc-1") {
			t.Errorf("a waited for b: %q", said)
		}
	})
}

// What holds up one volume holds up no other of the same alloc: its turn that does not come, and a call for it that
// hangs.
func TestWaitForOneVolumeHoldsUpNoOther(t *testing.T) {
	for _, hangs := range []string{"stage", "unpublish"} {
		t.Run(hangs, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newParts(t)
				p.volume("a")
				p.volume("b")
				p.volume("c")
				a, end := p.allocs()
				defer end()
				if _, err := a.Prepare(t.Context(), registry.Call{}, group(t, "alloc-1", "a", "b", "c")); err != nil {
					t.Fatal(err)
				}
				p.holdUp(hangs + " x-b")
				go func() { _, _ = a.Prepare(t.Context(), registry.Call{}, group(t, "alloc-2", "b")) }()
				synctest.Wait()
				p.fail["unstage"] = 2
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if err := a.Release(ctx, registry.Call{}, "alloc-1"); !errors.Is(err, registry.ErrUnavailable) {
					t.Errorf("%v", err)
				}
				for _, want := range []string{"unclaim x-a alloc-1", "unclaim x-c alloc-1"} {
					if !slices.Contains(p.said(), want) {
						t.Errorf("no %q while b is held up: %q", want, p.said())
					}
				}
				if slices.Contains(p.said(), "unclaim x-b alloc-1") {
					t.Errorf("b was not held up: %q", p.said())
				}
			})
		})
	}
}

// The last user unstages, nobody else.
func TestStagedUntilTheLastUser(t *testing.T) {
	p := newParts(t)
	p.volume("a")
	a, end := p.allocs()
	defer end()
	for _, id := range []string{"alloc-1", "alloc-2"} {
		if _, err := a.Prepare(t.Context(), registry.Call{}, group(t, id, "a")); err != nil {
			t.Fatal(err)
		}
	}
	for i, id := range []registry.AllocID{"alloc-1", "alloc-2"} {
		if err := a.Release(t.Context(), registry.Call{}, id); err != nil {
			t.Fatal(err)
		}
		if got := slices.Contains(p.said(), "unstage x-a"); got != (i == 1) {
			t.Errorf("after the release of %s: unstaged = %v", id, got)
		}
	}
}

// A1: whoever asks, one thing at a time happens to a volume, and different volumes do not wait for each other.
// parts.step notices two.
func TestOneLockPerVolume(t *testing.T) {
	p := newParts(t)
	p.volume("a")
	p.volume("b")
	a, end := p.allocs()
	defer end()
	var wg sync.WaitGroup
	for i := range 20 {
		id := fmt.Sprintf("alloc-%d", i)
		g := group(t, id, []string{"a", "b"}[i%2])
		wg.Go(func() {
			if _, err := a.Prepare(t.Context(), registry.Call{}, g); err != nil {
				t.Error(err)
			}
			if err := a.Release(t.Context(), registry.Call{}, registry.AllocID(id)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// Stopping an alloc ends its wait, wherever it waits, and takes back what it had.
func TestReleaseCancelsPrepare(t *testing.T) {
	for _, waiting := range []string{"plugin", "attach", "stage", "publish"} {
		t.Run(waiting, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newParts(t)
				p.volume("a")
				if waiting == "plugin" {
					p.plugin = make(chan struct{})
				} else {
					p.gate[waiting] = make(chan struct{})
				}
				a, end := p.allocs()
				defer end()
				g := group(t, "alloc-1", "a")
				done := make(chan error, 1)
				go func() { _, err := a.Prepare(t.Context(), registry.Call{}, g); done <- err }()
				synctest.Wait()
				if waiting == "plugin" {
					list, _, _ := a.Status(t.Context(), "alloc-1")
					if len(list) != 1 || !strings.Contains(registry.Waits(list[0].Waiting), "plugin p") {
						t.Errorf("what it waits for is not said: %+v", list)
					}
				}
				p.mu.Lock()
				delete(p.gate, waiting)
				p.mu.Unlock()
				if err := a.Release(t.Context(), registry.Call{}, "alloc-1"); err != nil {
					t.Fatal(err)
				}
				if err := <-done; !errors.Is(err, errReleased) {
					t.Errorf("Prepare ended with %v", err)
				}
				if said := p.said(); said[len(said)-1] != "unclaim x-a alloc-1" {
					t.Errorf("not taken back: %q", said)
				}
			})
		})
	}
}

// prepared has alloc-1 hold the volume a.
func prepared(t *testing.T) (p *parts, a *Allocs, end func()) {
	t.Helper()
	p = newParts(t)
	p.volume("a")
	a, end = p.allocs()
	if _, err := a.Prepare(t.Context(), registry.Call{}, group(t, "alloc-1", "a")); err != nil {
		t.Fatal(err)
	}
	return p, a, end
}

// A2: what was begun to be released is released by the next shim, unasked.
func TestReleaseResumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, a, end := prepared(t)
		p.fail["unpublish"] = 1 << 30
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := a.Release(ctx, registry.Call{}, "alloc-1"); err == nil ||
			!strings.Contains(err.Error(), "unpublish is refused") {
			t.Errorf("a release that cannot be done: %v", err)
		}
		end()
		p.fail["unpublish"] = 0
		p.log = p.log.Reopen()
		a, end = p.allocs()
		defer end()
		synctest.Wait()
		if list, _, _ := a.Status(t.Context(), ""); len(list) != 0 {
			t.Errorf("still there: %+v", list)
		}
	})
}

func TestSyncReleasesWhatIsNotNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		p.volume("a")
		p.volume("b")
		a, end := p.allocs()
		defer end()
		for id, v := range map[string]string{"alloc-1": "a", "alloc-2": "b"} {
			if _, err := a.Prepare(t.Context(), registry.Call{}, group(t, id, v)); err != nil {
				t.Fatal(err)
			}
		}
		gone, err := a.Sync(t.Context(), []registry.AllocID{"alloc-2", "not-prepared-yet"})
		if err != nil || !slices.Equal(gone, []registry.AllocID{"alloc-1"}) {
			t.Errorf("Sync = %v, %v", gone, err)
		}
		synctest.Wait()
		list, _, _ := a.Status(t.Context(), "")
		if len(list) != 1 || list[0].ID != "alloc-2" {
			t.Errorf("allocs: %+v", list)
		}
	})
}

func TestUnknownVolumeIsNamed(t *testing.T) {
	p := newParts(t)
	a, end := p.allocs()
	defer end()
	_, err := a.Prepare(t.Context(), registry.Call{}, group(t, "alloc-1", "nope"))
	if !errors.Is(err, registry.ErrNotFound) || !strings.Contains(err.Error(), "create or register it first") {
		t.Errorf("err = %v", err)
	}
	if err := a.Release(t.Context(), registry.Call{}, "alloc-1"); err != nil {
		t.Error(err)
	}
	if err := a.Release(t.Context(), registry.Call{}, "never-heard-of"); err != nil {
		t.Error(err)
	}
}

// A Release that overtakes Prepares of the alloc, one under way and one that waits for it, is the last word: neither
// brings the alloc back when everything has been taken down, where nobody would ever release it.
func TestReleaseStopsWaitingPrepares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		p.volume("a")
		p.gate["attach"] = make(chan struct{})
		a, end := p.allocs()
		defer end()
		g := group(t, "alloc-1", "a")
		done := make(chan error, 3)
		for range cap(done) {
			go func() { _, err := a.Prepare(t.Context(), registry.Call{}, g); done <- err }()
			synctest.Wait()
		}
		p.mu.Lock()
		delete(p.gate, "attach")
		p.mu.Unlock()
		if err := a.Release(t.Context(), registry.Call{}, "alloc-1"); err != nil {
			t.Fatal(err)
		}
		for range cap(done) {
			if err := <-done; !errors.Is(err, errReleased) {
				t.Errorf("Prepare ended with %v", err)
			}
		}
		claims, _, err := a.Claims(t.Context())
		if list, _, _ := a.Status(t.Context(), ""); err != nil || len(claims)+len(list) > 0 {
			t.Errorf("after the release there are allocs %+v and claims %+v, %v", list, claims, err)
		}
	})
}

// A Prepare whose caller has gone before the alloc was recorded leaves no record, which nobody would release.
func TestPrepareOfNobodyRecordsNothing(t *testing.T) {
	p := newParts(t)
	p.volume("a")
	a, end := p.allocs()
	defer end()
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errReleased)
	if _, err := a.Prepare(ctx, registry.Call{}, group(t, "alloc-1", "a")); !errors.Is(err, errReleased) {
		t.Errorf("%v", err)
	}
	if list, _, _ := a.Status(t.Context(), ""); len(list) > 0 {
		t.Errorf("it is recorded: %+v", list)
	}
}

// The answer of a release is stored by the transaction that forgets the alloc, and so is that of every later call; also
// of one for an alloc that nobody knows.
func TestReleaseIsAnsweredForGood(t *testing.T) {
	p := newParts(t)
	p.volume("a")
	a, end := p.allocs()
	defer end()
	if _, err := a.Prepare(t.Context(), registry.Call{}, group(t, "alloc-1", "a")); err != nil {
		t.Fatal(err)
	}
	var last registry.Change
	p.log.OnApplied(func(x registry.Applied) {
		if slices.Contains(x.Change.Delete, registry.AllocRecord("alloc-1")) {
			last = x.Change
		}
	})
	for _, id := range []registry.OperationID{"first", "second"} {
		if err := a.Release(t.Context(), registry.Call{ID: id, Method: "m", Digest: "d"}, "alloc-1"); err != nil {
			t.Fatal(err)
		}
		_ = p.log.View(t.Context(), func(v registry.View) error {
			if op, ok := v.Operation(id); !ok || op.Method != "m" {
				t.Errorf("the answer to %s is not stored: %+v", id, op)
			}
			return nil
		})
	}
	if len(last.Put) != 1 || last.Put[0].Key() != registry.OperationRecord("first") {
		t.Errorf("the transaction that forgets the alloc puts %v", last.Put)
	}
}

// A release says what it waits for as soon as it waits.
func TestReleaseSaysWhatItWaitsFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		p.volume("a")
		a, end := p.allocs()
		defer end()
		if _, err := a.Prepare(t.Context(), registry.Call{}, group(t, "alloc-1", "a")); err != nil {
			t.Fatal(err)
		}
		p.plugin = make(chan struct{})
		done := make(chan error, 1)
		go func() { done <- a.Release(t.Context(), registry.Call{}, "alloc-1") }()
		synctest.Wait()
		if list, _, _ := a.Status(t.Context(), "alloc-1"); len(list) != 1 ||
			!strings.Contains(registry.Waits(list[0].Waiting), "plugin p") {
			t.Errorf("it says %+v", list)
		}
		close(p.plugin)
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// Before anything else is sent for a volume, the call that is open for it has come to its end: on the way up and on the
// way down. What the way down undoes anyway is undone instead.
func TestOpenCallIsSettledFirst(t *testing.T) {
	vol := registry.VolumeKey{Plugin: "p", External: "x-a"}
	opened := func(p *parts, rpc registry.RPC, alloc string) {
		if err := p.commit([]registry.Record{registry.Intent{Volume: vol, RPC: rpc, Alloc: registry.AllocID(alloc),
			Request: "a"}}); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		open    registry.RPC
		alloc   string
		settled bool // on the way up; on the way down
		down    bool
	}{
		{registry.NodePublishRPC, "alloc-9", true, true},
		{registry.NodeUnpublishRPC, "alloc-9", true, true},
		{registry.NodePublishRPC, "alloc-1", false, false},
		{registry.NodeUnpublishRPC, "alloc-1", true, false},
		{registry.NodeStageRPC, "", true, true}, // the request is published on it
		{registry.ControllerPublishRPC, "", true, true},
	} {
		p := newParts(t)
		p.volume("a")
		a, end := p.allocs()
		opened(p, c.open, c.alloc)
		if _, err := a.Prepare(t.Context(), registry.Call{}, group(t, "alloc-1", "a")); err != nil {
			t.Fatal(err)
		}
		said := p.said()
		if i := slices.Index(said, "settle "+string(c.open)); (i >= 0) != c.settled ||
			i > slices.Index(said, "attach x-a n1") {
			t.Errorf("%s of %q, up: %q", c.open, c.alloc, said)
		}
		opened(p, c.open, c.alloc)
		if err := a.Release(t.Context(), registry.Call{}, "alloc-1"); err != nil {
			t.Fatal(err)
		}
		down := p.said()[len(said):]
		if i := slices.Index(down, "settle "+string(c.open)); (i >= 0) != c.down ||
			i > slices.Index(down, "unpublish x-a alloc-1") {
			t.Errorf("%s of %q, down: %q", c.open, c.alloc, down)
		}
		end()
	}
}

// What is staged or attached without a claim is taken down by itself, and left alone where somebody claims it.
func TestUnclaimedIsTakenDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newParts(t)
		p.volume("a")
		p.volume("b")
		var records []registry.Record
		for _, id := range []registry.ExternalID{"x-a", "x-b"} {
			key := registry.VolumeKey{Plugin: "p", External: id}
			records = append(records, registry.Attachment{Volume: key, Node: us.Node, State: registry.MarkDone},
				registry.Staging{Volume: key, State: registry.MarkSent})
		}
		claim := registry.Claim{Volume: registry.VolumeKey{Plugin: "p", External: "x-b"}, Alloc: "alloc-1",
			Request: "b", Node: us.Node}
		elsewhere := claim // of another node: it keeps nothing here, and what is attached there stays
		elsewhere.Volume.External, elsewhere.Alloc, elsewhere.Node = "x-a", "alloc-2", "node-2"
		there := registry.Attachment{Volume: elsewhere.Volume, Node: "node-2", State: registry.MarkDone}
		alone := registry.Attachment{Volume: registry.VolumeKey{Plugin: "p", External: "x-c"}, Node: "node-2",
			State: registry.MarkDone}
		if err := p.commit(append(records, claim, elsewhere, there, alone)); err != nil {
			t.Fatal(err)
		}
		p.fail["unstage"] = 1
		_, end := p.allocs()
		defer end()
		time.Sleep(time.Minute)
		expect(t, p.said(), "unstage x-a failed", "unstage x-a", "detach x-a")
	})
}

// A release whose shim ends asks no writer: that is on its way out, and the call is made again at the next shim. It was
// the shim's part that ended, before the call heard of it.
func TestReleaseOfAnEndingShimWritesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, a, end := prepared(t)
		p.plugin = make(chan struct{}) // what its release waits for
		done := make(chan error, 1)
		go func() { done <- a.Release(t.Context(), registry.Call{}, "alloc-1") }()
		synctest.Wait()
		release := p.log.Hold() // a commit does not end
		defer release()
		go end()
		synctest.Wait()
		select {
		case err := <-done:
			if err == nil || !strings.Contains(err.Error(), "the shim ends") {
				t.Errorf("it says %v, not that the shim ends", err)
			}
		default:
			t.Error("it waits for a commit")
		}
	})
}

// A release that a swap cuts off says so, for the host to ask the next shim: it looks nothing up, as the state is being
// let go.
func TestReleaseIsCutOffByASwap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, a, end := prepared(t)
		defer end()
		for _, why := range []error{registry.Errorf(registry.ErrUnavailable, "%w", intent.ErrReleased),
			errors.New("the caller has gone")} {
			p.plugin = make(chan struct{})
			ctx, cancel := context.WithCancelCause(t.Context())
			done := make(chan error, 1)
			go func() { done <- a.Release(ctx, registry.Call{}, "alloc-1") }()
			synctest.Wait()
			cancel(why)
			err := <-done
			if told := strings.Contains(err.Error(), "plugin p"); !errors.Is(err, why) ||
				!errors.Is(err, registry.ErrUnavailable) || told == errors.Is(err, intent.ErrReleased) {
				t.Errorf("%v: %v", why, err)
			}
		}
	})
}
