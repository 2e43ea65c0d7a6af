package node

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/hooks"
	"holdfast/internal/csifake"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// A volume is mounted step by step, and released in the opposite order. A mounted volume is not mounted again, not even
// by the next shim. A mount begins with a commit of the claim, a release with a commit that records it. Each intent is
// a commit. An outcome is part of the next commit or of the last one. Only the outcome of an attach, or of an unstage
// before a detach, has its own commit.
func TestVolumeIsMountedAndReleasedInOrder(t *testing.T) {
	for _, c := range []struct {
		caps     string
		up, down []registry.RPC
		commits  int // each way
	}{
		{attaches + stages, []registry.RPC{attach, stage, publish}, []registry.RPC{unpublish, unstage, detach}, 6},
		{attaches, []registry.RPC{attach, publish}, []registry.RPC{unpublish, detach}, 5},
		{stages, []registry.RPC{stage, publish}, []registry.RPC{unpublish, unstage}, 4},
		{"", []registry.RPC{publish}, []registry.RPC{unpublish}, 3},
	} {
		t.Run(c.caps, func(t *testing.T) {
			inEnv(t, c.caps, func(t *testing.T, n *env) {
				call := registry.Call{ID: "op", Method: "m", Digest: "d"}
				before := n.log.Commits()
				plans, err := n.shim.allocs.Prepare(t.Context(), call, n.group("a1", wish{volumes: []int{0}}))
				up := n.log.Commits() - before
				want := hooks.Bind{Source: targetOf("a1"), Target: "/v0", Propagation: hooks.Private}
				if err != nil || !slices.Contains(plans["t"].Binds, want) {
					t.Errorf("plan %+v lacks %+v: %v", plans["t"], want, err)
				}
				n.want("up", c.up...)
				n.view(func(v registry.View) {
					if op, ok := v.Operation("op"); !ok || len(op.Answer) == 0 {
						t.Errorf("the response is not stored: %+v", op)
					}
				})
				n.up("a1", wish{})
				n.restart()
				n.up("a1", wish{})
				n.want("up again")
				before = n.log.Commits()
				n.down("a1")
				n.want("down", c.down...)
				if down := n.log.Commits() - before; up != c.commits || down != c.commits {
					t.Errorf("%d commits up and %d down, want %d", up, down, c.commits)
				}
			})
		})
	}
}

// If a shim dies at any commit of a mount and its release, before or after the commit is on disk, the next shim can
// mount and release the volume. The plugin gets only legal calls, and nothing is left (inEnv).
func TestShimDiesAtAnyCommit(t *testing.T) {
	for at := range 12 {
		for _, written := range []bool{false, true} {
			inEnv(t, attaches+stages, func(t *testing.T, n *env) {
				n.log.LoseAfter(at, written)
				err := n.tryUp("a1", wish{})
				if up := err == nil; up != (at >= 6) || up && n.tryDown("a1") == nil {
					t.Errorf("commit %d does not fail: %v", at, err)
				}
				n.restart()
				if at < 6 {
					n.up("a1", wish{})
				}
				n.down("a1")
				n.empty()
			})
		}
	}
}

// After a failure no later step is sent, neither on the way up nor on the way down, and the claim stays. The next try
// continues with the failed step.
func TestNothingLaterAfterAFailure(t *testing.T) {
	up, down := []registry.RPC{attach, stage, publish}, []registry.RPC{unpublish, unstage, detach}
	for i := range up {
		inEnv(t, attaches+stages, func(t *testing.T, n *env) {
			n.fails(up[i], "INVALID_ARGUMENT")
			if err := n.tryUp("a1", wish{}); err == nil {
				t.Errorf("%s failed, and Prepare did not", up[i])
			}
			n.want("up with a failure", up[:i+1]...)
			n.script()
			n.up("a1", wish{})
			n.want("up", up[i:]...)
			n.fails(down[i], "FAILED_PRECONDITION")
			if err := n.tryDown("a1"); err == nil {
				t.Errorf("%s failed, and Release did not", down[i])
			}
			n.want("down with a failure", down[:i+1]...)
			n.view(func(v registry.View) {
				if len(v.AllClaims()) != 1 {
					t.Errorf("%s: the claim is released", down[i])
				}
			})
			n.script()
			n.down("a1")
			n.want("down", down[i:]...)
		})
	}
}

// A volume whose plugin call hangs delays no other volume of the alloc.
func TestWaitForOneVolumeHoldsUpNoOther(t *testing.T) {
	inEnv(t, attaches+stages, func(t *testing.T, n *env) {
		n.up("a1", wish{volumes: []int{0, 1}})
		n.script(csifake.Rule{RPC: string(unpublish), Volume: "x-v0", Hang: csifake.UntilCancelled})
		wantErr(t, n.tryDown("a1"), registry.ErrUnavailable)
		n.view(func(v registry.View) {
			if claims := v.AllClaims(); len(claims) != 1 || claims[0].Volume != v0 {
				t.Errorf("claims: %+v", claims)
			}
		})
	})
}

// A Release ends the waits of all Prepares of its alloc, at any step, and releases their volumes. No Prepare records
// the alloc again.
func TestReleaseCancelsPrepare(t *testing.T) {
	for _, waiting := range []registry.RPC{"", attach, stage, publish} {
		t.Run("in "+string(waiting), func(t *testing.T) {
			inEnv(t, attaches+stages, func(t *testing.T, n *env) {
				if waiting == "" {
					n.removePlugin()
				} else {
					n.script(csifake.Rule{RPC: string(waiting), Hang: csifake.UntilCancelled})
				}
				group, errs := n.group("a1", wish{volumes: []int{0}}), make(chan error, 3)
				for range cap(errs) {
					n.async(func() {
						_, err := n.shim.allocs.Prepare(n.shim.ctx, registry.Call{}, group)
						errs <- err
					})
				}
				if waits := registry.Waits(n.status("a1").Waiting); waiting == "" &&
					!strings.Contains(waits, "plugin p") {
					t.Errorf("the alloc waits for %q", waits)
				}
				n.script()
				n.down("a1")
				for range cap(errs) {
					wantErr(t, <-errs, errReleased)
				}
				if left := n.left(); len(left) > 0 {
					t.Errorf("left: %q", left)
				}
			})
		})
	}
}

// The next shim continues a release by itself.
func TestReleaseResumes(t *testing.T) {
	inEnv(t, attaches+stages, func(t *testing.T, n *env) {
		n.up("a1", wish{})
		n.script(csifake.Rule{RPC: string(unpublish), Code: "FAILED_PRECONDITION", Message: "busy"})
		wantErr(t, n.tryDown("a1"), nil, "busy")
		n.script()
		n.restart()
		time.Sleep(time.Minute)
		if left := n.left(); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

func TestSyncReleasesWhatIsNotNamed(t *testing.T) {
	inEnv(t, stages, func(t *testing.T, n *env) {
		n.up("a1", wish{volumes: []int{0}})
		n.up("a2", wish{volumes: []int{1}})
		gone, err := n.shim.allocs.Sync(t.Context(), []registry.AllocID{"a2", "not-prepared-yet"})
		if err != nil || !slices.Equal(gone, []registry.AllocID{"a1"}) {
			t.Errorf("Sync = %v, %v", gone, err)
		}
		time.Sleep(time.Minute)
		list, _, _ := n.shim.allocs.Status(t.Context(), "")
		if len(list) != 1 || list[0].ID != "a2" {
			t.Errorf("allocs: %+v", list)
		}
	})
}

// The error about a volume that is not known or not ready says what to do.
func TestUnknownVolumeIsNamed(t *testing.T) {
	inEnv(t, "", func(t *testing.T, n *env) {
		n.put(registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: "v7", Plugin: pluginID},
			State: registry.VolumeCreating})
		for volume, want := range map[int]string{6: "create or register it first", 7: "is creating; it must be ready"} {
			err := n.tryUp("a1", wish{volumes: []int{volume}})
			if kind := map[int]error{6: registry.ErrNotFound, 7: registry.ErrConflict}[volume]; !errors.Is(err, kind) ||
				!strings.Contains(err.Error(), want) {
				t.Errorf("volume v%d: %v", volume, err)
			}
		}
		n.down("a1")
		n.down("an-unknown-alloc")
	})
}

// The transaction that deletes the alloc stores the response of the call that began the release. The response of a
// later call is stored too.
func TestReleaseIsAnsweredForGood(t *testing.T) {
	inEnv(t, "", func(t *testing.T, n *env) {
		n.up("a1", wish{})
		var last registry.Change
		n.log.OnApplied(func(a registry.Applied) {
			if slices.Contains(a.Change.Delete, registry.AllocRecord("a1")) {
				last = a.Change
			}
		})
		for _, id := range []registry.OperationID{"first", "second"} {
			if err := n.shim.allocs.Release(t.Context(), registry.Call{ID: id, Method: "m"}, "a1", false); err != nil {
				t.Fatal(err)
			}
			n.view(func(v registry.View) {
				if op, ok := v.Operation(id); !ok || op.Method != "m" {
					t.Errorf("the response to %s is not stored: %+v", id, op)
				}
			})
		}
		if len(last.Put) != 1 || last.Put[0].Key() != registry.OperationRecord("first") {
			t.Errorf("the transaction that deletes the alloc puts %v", last.Put)
		}
	})
}

// A volume that is staged and attached without a claim is released automatically. A claimed volume stays.
func TestUnclaimedIsTakenDown(t *testing.T) {
	inEnv(t, attaches+stages, func(t *testing.T, n *env) {
		n.fails(stage, "INVALID_ARGUMENT")
		if err := n.tryUp("a1", wish{}); err == nil {
			t.Error("the stage did not fail")
		}
		n.rpcs()
		n.restart()
		time.Sleep(time.Minute)
		n.want("claimed")
		n.commit(registry.Change{Delete: []registry.Key{claimOf("a1").ClaimRecord(), registry.AllocRecord("a1")}})
		n.script(csifake.Rule{RPC: string(unstage), Code: "FAILED_PRECONDITION", Times: 2})
		n.restart()
		time.Sleep(time.Minute)
		n.want("not claimed", unstage, detach)
	})
}

// If a swap cuts off a release, the error says so, and the host calls the next shim. The release reads no records,
// because the state is being released. If the caller of a release is gone, the error says what the release waits for.
func TestReleaseIsCutOffByASwap(t *testing.T) {
	inEnv(t, "", func(t *testing.T, n *env) {
		n.up("a1", wish{})
		n.removePlugin()
		for _, why := range []error{registry.Errorf(registry.ErrUnavailable, "%w", intent.ErrReleased),
			errors.New("the caller has gone")} {
			ctx, cancel := context.WithCancelCause(t.Context())
			done := make(chan error, 1)
			n.async(func() { done <- n.shim.allocs.Release(ctx, registry.Call{}, "a1", false) })
			cancel(why)
			err := <-done
			if told := strings.Contains(err.Error(), "plugin p"); !errors.Is(err, why) ||
				!errors.Is(err, registry.ErrUnavailable) || told == errors.Is(err, intent.ErrReleased) {
				t.Errorf("%v: %v", why, err)
			}
		}
	})
}

// A release returns when its shim ends, even if no commit can end any more.
func TestReleaseOfAnEndingShimWritesNothing(t *testing.T) {
	inEnv(t, "", func(t *testing.T, n *env) {
		n.up("a1", wish{})
		n.removePlugin()
		done := make(chan error, 1)
		n.async(func() { done <- n.shim.allocs.Release(t.Context(), registry.Call{}, "a1", false) })
		resume := n.log.Hold()
		n.shim.cancel(errShimEnds)
		synctest.Wait()
		select {
		case err := <-done:
			wantErr(t, err, nil, errShimEnds.Error())
		default:
			t.Error("Release waits for a commit")
		}
		resume()
		n.restart()
	})
}

// An inline volume is deleted with its alloc, even if the alloc's spec cannot be read. A registered volume is never
// taken for an inline one, whatever its name.
func TestInlineVolumesGoWithTheirAlloc(t *testing.T) {
	inEnv(t, "", func(t *testing.T, n *env) {
		inline := n.volume(0, "csi-inline")
		inline.ID, inline.Ephemeral, inline.Owner = "scratch@a1", true, "a1"
		n.put(inline, registry.Alloc{ID: "a1", Namespace: "default", Sealed: []byte("?"),
			State: registry.AllocPreparing})
		n.down("a1")
		known := func() (known bool) {
			n.view(func(v registry.View) { _, known = v.Volume(inline.VolumeName()) })
			return known
		}
		if known() {
			t.Error("the inline volume remains")
		}
		inline.Ephemeral, inline.Owner = false, ""
		n.put(inline)
		wantErr(t, n.tryUp("a1", wish{inline: true}), registry.ErrConflict)
		n.down("a1")
		n.want("conflict")
		if !known() {
			t.Error("the registered volume is gone")
		}
	})
}
