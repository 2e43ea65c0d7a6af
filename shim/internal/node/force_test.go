package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

const operator = "user ada (uid 7)"

// force ends the release of an alloc by force, with the confirmation.
func (n *env) force(id registry.AllocID) error {
	ctx, cancel := context.WithTimeout(n.shim.ctx, time.Minute)
	defer cancel()
	return errOf(n.shim.allocs.ForceRelease(ctx, id, registry.Force{By: operator, Confirm: string(id)}))
}

// forceSteps returns the steps of a release of an alloc by force.
func (n *env) forceSteps(id registry.AllocID) (texts []string) {
	n.t.Helper()
	steps, err := n.shim.allocs.ForceRelease(n.shim.ctx, id, registry.Force{DryRun: true})
	noErr(n.t, err)
	for _, s := range steps {
		texts = append(texts, fmt.Sprintf("%s %s", s.Action, s.RPC))
	}
	return texts
}

// inGone runs f with allocs that request w and whose plugin is gone for good, and checks that nothing is left
// afterwards.
func inGone(t *testing.T, allocs []registry.AllocID, w wish, f func(t *testing.T, n *env)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := newEnv(t, attaches+stages)
		n.start()
		for _, id := range allocs {
			n.up(id, w)
		}
		n.plugin.Load().end(false)
		n.removePlugin()
		n.rpcs()
		f(t, n)
		n.checkNothingLeft()
	})
}

var withPart = wish{subPaths: []string{"a"}}

// checkNothingLeft checks that no record, mount and directory is left, and ends the shim.
func (n *env) checkNothingLeft() {
	n.t.Helper()
	for _, what := range append(n.left(), n.machine.left()...) {
		n.t.Errorf("left: %s", what)
	}
	n.endShim()
}

// A release by force needs a confirmation, and fails while a mount is in use. Otherwise it takes down all that the
// plugin has left, and its events name the calls that it skips.
func TestForceReleaseTakesDownWhatAGonePluginLeft(t *testing.T) {
	inGone(t, []registry.AllocID{"a1"}, withPart, func(t *testing.T, n *env) {
		ctx := n.shim.ctx
		wantErr(t, n.force("a1"), registry.ErrConflict, "stop it first")
		if err := n.tryDown("a1"); err == nil {
			t.Fatal("released without its plugin")
		}
		want := []string{"unmount ", "skip NodeUnpublishVolume", "unmount ", "skip NodeUnstageVolume", "unmount ",
			"skip ControllerUnpublishVolume", "release "}
		if steps := n.forceSteps("a1"); !slices.Equal(steps, want) {
			t.Errorf("dry run: %q", steps)
		}
		_, err := n.shim.allocs.ForceRelease(ctx, "a1", registry.Force{By: operator, Confirm: "a2"})
		wantErr(t, err, registry.ErrDenied, "add --confirm a1", "NodeUnpublishVolume of volume v0")
		wantErr(t, errOf(n.shim.allocs.ForceRelease(ctx, "a1", registry.Force{Confirm: "a1"})), registry.ErrInvalid)
		for _, path := range []string{targetOf("a1"), stagingPath} {
			n.machine.setUser(path, "process 7 (cat)")
			wantErr(t, n.force("a1"), registry.ErrConflict, "process 7 (cat)")
			if mounted, _ := n.machine.Mounted(path); !mounted {
				t.Errorf("%s was unmounted", path)
			}
		}
		if forced := n.events(registry.EventForced); len(forced) > 0 {
			t.Errorf("refused, but begun: %q", forced)
		}
		n.machine.setUser("", "")
		noErr(t, n.force("a1"))
		if forced := n.events(registry.EventForced); !slices.Equal(forced, []string{"by " + operator}) {
			t.Errorf("events: %q", forced)
		}
		skipped := strings.Join(n.events(registry.EventAbandoned), "\n")
		for _, part := range []string{"NodeUnpublishVolume and NodeUnstageVolume", "ControllerUnpublishVolume",
			operator, "no task on this node serves plugin p"} {
			if !strings.Contains(skipped, part) {
				t.Errorf("%q is not in the events: %s", part, skipped)
			}
		}
		wantErr(t, n.force("a1"), registry.ErrNotFound)
		n.want("skipped")
	})
}

// If an alloc uses a volume twice, the last steps take down what both uses share.
func TestForceStepsOfAVolumeUsedTwice(t *testing.T) {
	inGone(t, []registry.AllocID{"a1"}, wish{volumes: []int{0}, mixed: true}, func(t *testing.T, n *env) {
		_ = n.tryDown("a1")
		first := claimOf("a1")
		first.Request = "again"
		n.machine.setUser(stagingPath, layout.Target(first, tree).Host) // an earlier step unmounts that
		want := []string{"skip NodeUnpublishVolume", "unmount ", "release ", "skip NodeUnpublishVolume", "unmount ",
			"skip NodeUnstageVolume", "unmount ", "skip ControllerUnpublishVolume", "release "}
		if steps := n.forceSteps("a1"); !slices.Equal(steps, want) {
			t.Errorf("dry run: %q", steps)
		}
		n.machine.setUser("", "")
		noErr(t, n.force("a1"))
	})
}

// Mounts that other allocs use stay.
func TestForceReleaseKeepsOtherUsers(t *testing.T) {
	inGone(t, []registry.AllocID{"a1", "a2"}, withPart, func(t *testing.T, n *env) {
		for _, id := range []registry.AllocID{"a1", "a2"} {
			if id == "a2" {
				for _, path := range []string{targetOf("a2"), stagingPath} {
					if mounted, _ := n.machine.Mounted(path); !mounted {
						t.Errorf("%s was unmounted with alloc a1", path)
					}
				}
			}
			_ = n.tryDown(id)
			noErr(t, n.force(id))
		}
	})
}

// If a shim is killed after any commit of a release by force, the next shim ends the release without another call.
func TestForceReleaseSurvivesKills(t *testing.T) {
	for kill, done := 1, false; !done; kill++ {
		inGone(t, []registry.AllocID{"a1"}, withPart, func(t *testing.T, n *env) {
			_ = n.tryDown("a1")
			commits, end := 0, n.shim.cancel
			n.log.OnApplied(func(registry.Applied) {
				if commits++; commits == kill {
					end(errShimEnds)
				}
			})
			err := n.force("a1")
			forced := len(n.events(registry.EventForced)) > 0
			done = err == nil && commits < kill
			n.crash()
			n.startShim()
			if !forced {
				t.Fatalf("kill %d: the release by force was not recorded: %v", kill, err)
			}
			time.Sleep(time.Minute)
		})
		if t.Failed() || kill > 50 {
			t.Fatalf("kill %d", kill)
		}
	}
}

// A release that waits ends with the release by force, without an error.
func TestForceReleaseEndsOtherCalls(t *testing.T) {
	inGone(t, []registry.AllocID{"a1"}, withPart, func(t *testing.T, n *env) {
		waiting := errors.New("not ended")
		n.async(func() {
			ctx, cancel := context.WithTimeout(n.shim.ctx, time.Hour)
			defer cancel()
			waiting = n.shim.allocs.Release(ctx, registry.Call{}, "a1", false)
		})
		noErr(t, n.force("a1"))
		if synctest.Wait(); waiting != nil {
			t.Errorf("the release: %v", waiting)
		}
	})
}

// An alloc that its host has lost has not ended: its volume is not deleted, even by a release by force.
func TestForceReleaseKeepsTheVolumeOfALostAlloc(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newEnv(t, creates+stages)
		n.start()
		n.up("a1", makes("delete"))
		n.plugin.Load().end(false)
		n.removePlugin()
		noErr(t, errOf(n.shim.allocs.Sync(t.Context(), nil)))
		noErr(t, n.force("a1"))
		n.introduce()
		time.Sleep(10 * time.Minute)
		if vol, known := n.made(); vol.State != registry.VolumeReady {
			t.Errorf("known: %v, %+v", known, vol)
		} else {
			n.commit(registry.Change{Delete: []registry.Key{vol.Key()}})
		}
		n.plugin.Load().end(false)
		n.checkNothingLeft()
	})
}

// The tasks of an alloc that has lost its volumes may still run. Its release is not forced before the host ends it.
func TestForceReleaseOfALostAllocNeedsItsStop(t *testing.T) {
	inEnv(t, attaches+stages, func(t *testing.T, n *env) {
		n.up("a1", wish{})
		n.machine.setUser(targetOf("a1"), "a container has it at /data")
		noErr(t, n.shim.allocs.Lose(t.Context(), "fenced"))
		time.Sleep(time.Minute)
		n.rpcs()
		wantErr(t, n.force("a1"), registry.ErrConflict, "stop it first")
		n.want("while a container uses the volume")
	})
}

// Another node may release the claim of a volume that is still mounted here, and delete the volume. The release of that
// mount by force needs a confirmation too.
func TestForceReleaseConfirmsAMountWithoutAClaim(t *testing.T) {
	inGone(t, []registry.AllocID{"a1"}, withPart, func(t *testing.T, n *env) {
		n.shim.allocs.AwaitAdmitted = func(context.Context, func(string)) error { return nil }
		volume := n.volume(0, "x-v0")
		n.commit(registry.Change{Delete: []registry.Key{claimOf("a1").ClaimRecord(), volume.Key()}})
		wantErr(t, n.tryDown("a1"), nil, "volume v0")
		_, err := n.shim.allocs.ForceRelease(n.shim.ctx, "a1", registry.Force{By: operator})
		wantErr(t, err, registry.ErrDenied, "NodeUnpublishVolume of volume v0")
		noErr(t, n.force("a1"))
	})
}

// If the plugin answers, only failing calls are skipped.
func TestForceReleaseSendsWhatStillSucceeds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newEnv(t, attaches+stages)
		n.start()
		n.up("a1", wish{})
		n.script(csifake.Rule{RPC: string(unstage), When: csifake.Before, Code: "INTERNAL"})
		n.rpcs()
		_ = n.tryDown("a1")
		n.rpcs()
		noErr(t, n.force("a1"))
		calls := n.rpcs()
		if len(calls) == 0 || calls[len(calls)-1] != detach || !slices.Contains(calls, unstage) {
			t.Errorf("calls: %v", calls)
		}
		if skipped := n.events(registry.EventAbandoned); len(skipped) != 1 || !strings.Contains(skipped[0],
			"without NodeUnstageVolume, by") || !strings.Contains(skipped[0], "INTERNAL") {
			t.Errorf("skipped: %q", skipped)
		}
		n.plugin.Load().end(false)
		n.checkNothingLeft()
	})
}
