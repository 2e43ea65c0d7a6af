package node

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/hooks"
	"holdfast/internal/csifake"
	"holdfast/registry"
)

// creates is the capability to create volumes.
const creates = "CREATE_DELETE_VOLUME "

// makes returns the wish for an alloc with a create block.
func makes(onStop string) wish { return wish{create: "on_stop = \"" + onStop + "\""} }

// made returns the volume of the create block.
func (n *env) made() (vol registry.Volume, known bool) {
	n.view(func(v registry.View) { vol, known = v.Volume(registry.VolumeName{Namespace: "default", ID: "made"}) })
	return vol, known
}

// end releases an alloc as a host does, and waits until the release and all that follows it are done.
func (n *env) end(id registry.AllocID) {
	n.t.Helper()
	n.endFor(id, false)
}

// endFor is end. keep means that another alloc follows.
func (n *env) endFor(id registry.AllocID, keep bool) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.shim.ctx, time.Minute)
	defer cancel()
	call := registry.Call{ID: registry.OperationID("end-" + id), Method: "Allocs.Release"}
	if err := n.shim.allocs.Release(ctx, call, id, keep); err != nil {
		n.t.Errorf("end %s: %v", id, err)
	}
	time.Sleep(10 * time.Minute)
}

// A create block makes its volume with the alloc, before the claim. Later allocs use it. If the block says so, the
// volume is deleted with the last alloc, even if a shim or the plugin dies meanwhile. The next alloc then gets a new
// volume.
func TestCreateBlockMakesItsVolume(t *testing.T) {
	inEnv(t, creates+attaches+stages+"MODIFY_VOLUME ", func(t *testing.T, n *env) {
		named := wish{create: "name = \"data-1\"\n mutable_parameters = { tier = \"gold\" }"}
		reasons, _, err := n.shim.allocs.Feasible(t.Context(), n.group("a1", named))
		if err != nil || len(reasons) > 0 {
			t.Errorf("the node cannot take the alloc: %v, %v", reasons, err)
		}
		n.up("a1", named)
		n.end("a1")
		first, known := n.made()
		if !known || first.State != registry.VolumeReady || first.Name != "data-1" || first.Mutable["tier"] != "gold" {
			t.Fatalf("%+v", first)
		}
		n.up("a2", makes("keep"))
		n.restart()
		n.reboot()
		n.up("a2", makes("delete"))
		n.up("a3", makes("delete"))
		n.end("a2")
		if again, _ := n.made(); again.External != first.External {
			t.Errorf("the volume was %s, and is %s although an alloc uses it", first.External, again.External)
		}
		n.end("a3")
		if vol, known := n.made(); known {
			t.Errorf("the volume remains: %+v", vol)
		}
		n.wantEvent(registry.EventVolumeDeleted, "with alloc a3")
		n.up("a4", makes("delete"))
		if next, _ := n.made(); next.External == "" {
			t.Error("the next alloc got no volume")
		}
		n.end("a4")
	})
}

// If another alloc follows an alloc, the volume is kept for it, even if the shim dies during the release.
func TestVolumeIsKeptForTheAllocThatFollows(t *testing.T) {
	inEnv(t, creates+stages, func(t *testing.T, n *env) {
		n.up("a1", makes("delete"))
		first, _ := n.made()
		n.script(csifake.Rule{RPC: "NodeUnpublishVolume", When: csifake.After, Hang: csifake.ForEver, Times: 1})
		n.async(func() {
			_ = n.shim.allocs.Release(n.shim.ctx, registry.Call{ID: "end-a1", Method: "Allocs.Release"}, "a1", true)
		})
		n.crash()
		n.plugin.Load().end(true)
		n.start()
		n.endFor("a1", true)
		n.up("a2", makes("delete"))
		if next, _ := n.made(); next.External != first.External {
			t.Errorf("the volume was %s, and is %s", first.External, next.External)
		}
		n.end("a2")
		if vol, known := n.made(); known {
			t.Errorf("the volume remains: %+v", vol)
		}
	})
}

// A volume is kept only if all calls that release its alloc set keep, in whichever order they come. That also holds if
// another shim gets the second call.
func TestOneReleaseWithoutASuccessorDeletesTheVolume(t *testing.T) {
	for _, keep := range []bool{true, false} {
		for _, crash := range []bool{false, true} {
			inEnv(t, creates+stages, func(t *testing.T, n *env) {
				n.up("a1", makes("delete"))
				fails := csifake.Rule{RPC: "NodeUnpublishVolume", When: csifake.After, Code: "UNAVAILABLE", Times: 1}
				if crash {
					fails.Code, fails.Hang = "", csifake.ForEver
				}
				n.script(fails)
				n.async(func() {
					_ = n.shim.allocs.Release(n.shim.ctx, registry.Call{ID: "first", Method: "Allocs.Release"}, "a1",
						keep)
				})
				if crash {
					n.crash()
					n.plugin.Load().end(true)
					n.startPlugin()
					// the first release must not end before the second call
					n.fails("NodeUnpublishVolume", "UNAVAILABLE")
					n.startShim()
					n.introduce()
					time.AfterFunc(time.Second, func() { n.script() })
				} else {
					synctest.Wait()
				}
				n.endFor("a1", !keep)
				if vol, known := n.made(); known {
					t.Errorf("the first call had keep %t, then crash %t: the volume remains: %+v", keep, crash, vol)
				}
			})
		}
	}
}

// Whatever happens between the end of an alloc and the deletion of its volume, the volume is deleted in the end.
func TestVolumeGoesWithItsAllocInTheEnd(t *testing.T) {
	for name, c := range map[string]struct {
		before func(n *env) // an alloc ends
		after  func(n *env)
	}{
		"deletion refused": {
			func(n *env) { n.fails(registry.DeleteVolumeRPC, "FAILED_PRECONDITION") },
			func(n *env) {
				n.wantEvent(registry.EventVolumeKept, "with alloc a1")
				n.script()
			},
		},
		"plugin away": {
			func(n *env) { n.fails(registry.DeleteVolumeRPC, "UNAVAILABLE") },
			func(n *env) { n.restart(); n.script() },
		},
		"killed in the call": {
			func(n *env) {
				n.script(csifake.Rule{RPC: "DeleteVolume", When: csifake.After, Hang: csifake.ForEver, Times: 1})
			},
			func(n *env) { n.crash(); n.plugin.Load().end(true); n.start() },
		},
	} {
		t.Run(name, func(t *testing.T) {
			inEnv(t, creates+stages, func(t *testing.T, n *env) {
				n.up("a1", makes("delete"))
				c.before(n)
				n.end("a1")
				if _, known := n.made(); !known {
					t.Error("the volume is gone already")
				}
				c.after(n)
				time.Sleep(10 * time.Minute)
				if vol, known := n.made(); known {
					t.Errorf("the volume remains: %+v", vol)
				}
			})
		})
	}
}

// If a shim dies during the creation, the next shim completes it.
func TestCreationWithAnAllocIsResumed(t *testing.T) {
	inEnv(t, creates+attaches+stages, func(t *testing.T, n *env) {
		n.script(csifake.Rule{RPC: "CreateVolume", When: csifake.After, Hang: csifake.ForEver, Times: 1})
		n.async(func() { _ = n.tryUp("a1", makes("delete")) })
		n.crash()
		n.plugin.Load().end(true)
		n.start()
		n.up("a1", makes("delete"))
		if all, err := n.storage.Volumes(); err != nil || len(all) != 1 {
			t.Errorf("the plugin has %d volumes, %v", len(all), err)
		}
		n.end("a1")
	})
}

// A creation that has not succeeded ends with the alloc, and leaves nothing at the plugin.
func TestUnfinishedCreationEndsWithItsAlloc(t *testing.T) {
	inEnv(t, creates+stages, func(t *testing.T, n *env) {
		n.script(csifake.Rule{RPC: "CreateVolume", When: csifake.After, Code: "UNAVAILABLE"})
		if err := n.tryUp("a1", makes("delete")); err == nil {
			t.Error("the alloc is up")
		}
		if w := n.status("a1").Waiting; len(w) != 1 || w[0].Step != registry.StepCreate {
			t.Errorf("the alloc waits for %+v", w)
		}
		n.end("a1")
		n.script()
		time.Sleep(10 * time.Minute)
		if vol, known := n.made(); known {
			t.Errorf("the volume remains: %+v", vol)
		}
	})
}

// A volume that the block has not made is used and stays. The volume of an alloc that the host has not released stays
// too.
func TestVolumeOfOthersIsKept(t *testing.T) {
	inEnv(t, creates+stages, func(t *testing.T, n *env) {
		n.up("a1", makes("delete"))
		noErr(t, errOf(n.shim.allocs.Sync(t.Context(), nil)))
		time.Sleep(10 * time.Minute)
		vol, known := n.made()
		if !known {
			t.Fatal("the volume went although its alloc was not released")
		}
		vol.Origin.Job = "another"
		n.put(vol)
		n.up("a2", makes("delete"))
		n.end("a2")
		if _, known := n.made(); !known {
			t.Fatal("the volume went although another job has made it")
		}
		inline := vol
		inline.Ephemeral, inline.Owner = true, "a9"
		n.commit(registry.Change{Delete: []registry.Key{vol.Key()}, Put: []registry.Record{inline}})
		wantErr(t, n.tryUp("a2", makes("keep")), registry.ErrConflict, "inline volume of alloc a9")
		n.end("a2")
		n.commit(registry.Change{Delete: []registry.Key{inline.Key()}, Put: []registry.Record{vol}})
		vol.Plugin = "other"
		n.put(vol)
		wantErr(t, n.tryUp("a3", makes("keep")), registry.ErrConflict)
		n.end("a3")
		n.commit(registry.Change{Delete: []registry.Key{vol.Key()}})
	})
}

// For Feasible, volumes that do not exist yet are different volumes: they neither exclude each other nor count as one.
func TestPlannedVolumesDiffer(t *testing.T) {
	inEnv(t, creates+stages, func(t *testing.T, n *env) {
		keys := map[registry.VolumeKey]bool{}
		n.view(func(v registry.View) {
			for _, source := range []string{"one", "two"} {
				r := hooks.VolumeRequest{Source: source, Create: &hooks.Create{Plugin: pluginID}}
				vol, err := volumeOf(v, hooks.AllocGroup{Alloc: "a1", Namespace: "default"}, r)
				if err != nil {
					t.Error(err)
				}
				keys[vol.VolumeKey()] = true
			}
		})
		if len(keys) != 2 {
			t.Errorf("the volumes have the keys %v", keys)
		}
	})
}
