package node

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/intent"
)

// A killed shim has left a NodeStageVolume call at its plugin, and the next shim releases the volume. It unstages when
// that call has ended, or at once if the plugin was restarted. It unstages beside the call only if the call does not
// end within a round.
func TestNothingIsUndoneThatStillRuns(t *testing.T) {
	for what, c := range map[string]struct {
		takes     time.Duration // by the call
		restarted bool
		least     time.Duration // of the release
		most      time.Duration
		beside    bool
	}{
		"a long call":        {20 * time.Second, false, 15 * time.Second, 28 * time.Second, false},
		"a restarted plugin": {20 * time.Second, true, 0, 2 * time.Second, false},
		"a call without end": {time.Minute, false, 30 * time.Second, 2 * time.Minute, true},
	} {
		t.Run(what, func(t *testing.T) {
			inEnv(t, stages, func(t *testing.T, n *env) {
				n.script(csifake.Rule{RPC: string(stage), Times: 1, Delay: csifake.Duration(c.takes)})
				first, group := n.shim, n.group("a1", wish{volumes: []int{0}})
				n.async(func() { _, _ = first.allocs.Prepare(first.ctx, registry.Call{}, group) })
				time.Sleep(time.Second)
				n.crash()
				if c.restarted {
					n.plugin.Load().end(true)
					n.startPlugin()
				}
				n.startShim()
				if c.restarted {
					n.removePlugin()
				}
				n.introduce()
				began := time.Now()
				noErr(t, n.shim.allocs.Release(n.shim.ctx, registry.Call{}, "a1", false))
				if took := time.Since(began); took < c.least || took > c.most {
					t.Errorf("the release took %v", took)
				}
				found := journal.Check(n.journal.Lines(), journal.Options{Strict: true})
				if len(found) > 0 != c.beside {
					t.Errorf("the journal: %v", found)
				}
			})
		})
	}
}

// An expansion without an end delays a release only for a round, whether the controller or the node expands, and
// however the plugin fails. The next use completes the expansion.
func TestReleaseDoesNotWaitForAnExpansion(t *testing.T) {
	for what, rule := range map[string]csifake.Rule{
		"the node plugin is unavailable":   {RPC: string(expandOnNode), Code: "UNAVAILABLE"},
		"the node plugin cuts connections": {RPC: string(expandOnNode), Drop: true},
		"the node plugin hangs":            {RPC: string(expandOnNode), Hang: csifake.UntilCancelled},
		"the controller is busy":           {RPC: string(expand), Code: "ABORTED"},
		"the controller hangs":             {RPC: string(expand), Hang: csifake.UntilCancelled},
	} {
		t.Run(what, func(t *testing.T) {
			inEnv(t, stages+expands, func(t *testing.T, n *env) {
				n.up("a1", wish{})
				n.script(rule)
				if err := n.expand(2 * gib); err == nil {
					t.Error("the expansion did not fail")
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				noErr(t, n.shim.allocs.Release(ctx, registry.Call{}, "a1", false))
				synctest.Wait()
			})
		})
	}
}

// Another node has tried to detach a volume of this node while this node was lost, and does not know the outcome. This
// node comes back and still has the volume mounted. The detach is repeated before this node unmounts the volume.
func TestLostNodeUnmountsAfterAnOpenDetach(t *testing.T) {
	for what, c := range map[string]struct{ published, claimed bool }{
		"published": {true, true}, "staged": {false, true}, "staged, without a claim": {},
	} {
		t.Run(what, func(t *testing.T) {
			inEnv(t, attaches+stages, func(t *testing.T, n *env) {
				n.up("a1", wish{})
				if !c.published {
					noErr(t, n.shim.stager.Unpublish(t.Context(), intent.Caller{}, claimOf("a1"), false))
				}
				if !c.claimed {
					n.commit(registry.Change{Delete: []registry.Key{claimOf("a1").ClaimRecord(),
						registry.AllocRecord("a1")}})
				}
				calls := n.shim.volumes.Calls
				other := controller.New(calls, n.shim.fleet,
					NewStager(calls, n.shim.fleet, n.machine, Options{Node: "node-2"}), hclog.NewNullLogger())
				n.journal.NoteReboot("csifake.example.org", string(nodeName))
				n.fails(detach, "UNAVAILABLE")
				by := intent.Caller{RetryUntil: time.Now().Add(time.Second)}
				wantErr(t, other.Detach(t.Context(), by, v0, nodeName), registry.ErrUncertain)
				n.script()
				noErr(t, n.shim.allocs.Lose(t.Context(), "out-of-service"))
				time.Sleep(time.Minute)
				if c.claimed {
					n.view(func(v registry.View) {
						if al, known := v.Alloc("a1"); !known || al.State != registry.AllocReleasing {
							t.Errorf("before its host has released the alloc, its record is %+v", al)
						}
					})
					noErr(t, n.shim.allocs.Release(t.Context(), registry.Call{ID: "release"}, "a1",
						false))
				}
				for _, left := range n.left() {
					t.Errorf("left: %s", left)
				}
			})
		})
	}
}

// In a cluster, an alloc of another node may have the same ID.
func TestReleaseLeavesClaimsOfOtherNodes(t *testing.T) {
	inEnv(t, attaches+stages, func(t *testing.T, n *env) {
		n.shim.allocs.AwaitAdmitted = func(context.Context, func(string)) error { return nil }
		v1 := n.volume(1, "x-v1")
		n.up("a1", wish{})
		there := registry.Claim{Volume: v1.VolumeKey(), Name: v1.VolumeName(), Alloc: "a1", Request: "v1",
			Node: "other"}
		n.put(there, registry.Attachment{Volume: v1.VolumeKey(), Name: v1.VolumeName(), Node: "other",
			NodeID: "other-id",
			State:  registry.MarkDone})
		n.down("a1")
		n.view(func(v registry.View) {
			if left := v.AllClaims(); len(left) != 1 || left[0].Node != "other" || len(v.AllAttachments()) != 1 {
				t.Errorf("left: claims %+v, attachments %+v", left, v.AllAttachments())
			}
		})
		n.commit(registry.Change{Delete: []registry.Key{there.Key(),
			registry.AttachmentKey{Volume: v1.VolumeKey(), Node: "other"}.Key()}})
	})
}

// unsettled is a Controller whose commits have no certain outcome before settled is closed.
type unsettled struct {
	Controller
	settled chan struct{}
}

func (u unsettled) SettleClaims(context.Context) error {
	<-u.settled
	return nil
}

// etcd may still grant a claim of a Prepare that was cancelled. The alloc's record stays until that is known, so that a
// killed shim finds the claim again.
func TestAllocIsRecordedUntilItsClaimsAreSettled(t *testing.T) {
	inEnv(t, attaches+stages, func(t *testing.T, n *env) {
		allocs := n.shim.allocs
		allocs.AwaitAdmitted = func(context.Context, func(string)) error { return nil }
		claims := unsettled{allocs.controller, make(chan struct{})}
		allocs.controller = claims
		n.up("a1", wish{})
		n.async(func() { n.down("a1") })
		n.view(func(v registry.View) {
			if _, known := v.Alloc("a1"); !known || len(v.AllRefs()) > 0 {
				t.Errorf("before the claims are settled: alloc known: %v, refs: %v", known, v.AllRefs())
			}
		})
		close(claims.settled)
	})
}

// viewed calls after at the end of each view.
type viewed struct {
	registry.State
	after func()
}

func (s *viewed) View(ctx context.Context, read func(registry.View) error) error {
	err := s.State.View(ctx, read)
	s.after()
	return err
}

// The host releases an alloc that has lost its volumes just after a release has kept the alloc's record for the host.
func TestReleaseAtTheEndOfAnEarlierRelease(t *testing.T) {
	inEnv(t, stages, func(t *testing.T, n *env) {
		allocs, views, last := n.shim.allocs, 0, 0
		n.up("a1", wish{})
		noErr(t, allocs.Lose(t.Context(), "fenced"))
		synctest.Wait()
		state := &viewed{allocs.State, func() { views++ }}
		allocs.State = state
		allocs.startRelease("a1")
		synctest.Wait()
		last, views = views-1, 0 // the last view of a release is made by resumeKept
		state.after = func() {
			if views++; views == last {
				noErr(t, errOf(allocs.Sync(t.Context(), nil)))
			}
		}
		allocs.startRelease("a1")
		synctest.Wait()
		allocs.State = state.State
		n.view(func(v registry.View) {
			if al, known := v.Alloc("a1"); known {
				t.Errorf("no release continues for %+v", al)
			}
		})
	})
}

// The mount of a container does not prevent the plugin from unmounting its own. Therefore a lost volume stays published
// and attached until the containers have ended or the host releases the alloc.
func TestLostVolumeIsUnmountedAfterItsContainers(t *testing.T) {
	for _, released := range []bool{false, true} {
		inEnv(t, attaches+stages, func(t *testing.T, n *env) {
			n.up("a1", wish{})
			target := n.status("a1").Volumes[0].Target.Host
			n.machine.setUser(target, "a container has it at /data")
			n.rpcs()
			noErr(t, n.shim.allocs.Lose(t.Context(), "fenced"))
			time.Sleep(time.Hour)
			n.want("while a container uses the volume")
			const why = "a container has it at /data: stop that first"
			if text := registry.Waits(n.status("a1").Waiting); !strings.Contains(text, why) {
				t.Errorf("the alloc waits for %q", text)
			}
			if !released {
				n.machine.setUser(target, "")
				time.Sleep(time.Minute)
			}
			noErr(t, n.shim.allocs.Release(t.Context(), registry.Call{ID: "release"}, "a1", false))
			for _, left := range n.left() {
				t.Errorf("left: %s", left)
			}
		})
	}
}

// The recorded time of the next try is counted from the failure, not from the start of the try.
func TestNextTryOfAReleaseIsAfterItsFailure(t *testing.T) {
	inEnv(t, stages, func(t *testing.T, n *env) {
		n.up("a1", wish{})
		n.removePlugin()
		n.async(func() { _ = n.tryDown("a1") })
		time.Sleep(roundLimit + retryFirst/2) // the first try waits for the plugin for a round
		n.view(func(v registry.View) {
			al, _ := v.Alloc("a1")
			if len(al.Waiting) != 1 || !al.Waiting[0].Next.After(time.Now()) {
				t.Errorf("at %v: %+v", time.Now(), al.Waiting)
			}
		})
		n.introduce()
	})
}
