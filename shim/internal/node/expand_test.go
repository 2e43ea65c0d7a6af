package node_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
	"holdfast/shim/internal/node"
)

// expanding is a world with one volume, whose plugin expands at its controller and on the node, and what is made of it
// first.
func expanding(t *testing.T, change func(*world)) *world {
	w := open(t)
	w.expands, w.grows = true, true
	if change != nil {
		change(w)
	}
	return w
}

func (w *world) expand(ctx context.Context, size int64) error {
	_, err := w.mediator.Expand(ctx, registry.Call{ID: "op"}, volumeOf("one").VolumeName(),
		registry.CapacityRange{Required: size})
	return err
}

// sizes is what the plugin was asked of sizes since the last time.
func (w *world) sizes() (calls []string) {
	for _, line := range w.journal {
		if rpc := registry.RPC(strings.Fields(line)[0]); rpc.Expands() {
			calls = append(calls, line)
		}
	}
	w.journal = nil
	return calls
}

func (w *world) asked(t *testing.T, when string, want ...string) {
	t.Helper()
	if got := w.sizes(); !slices.Equal(got, want) {
		t.Errorf("%s the plugin was asked %q, want %q", when, got, want)
	}
}

func (w *world) expansion() (e registry.Expansion) {
	w.view(func(view registry.View) {
		v, _ := view.VolumeByKey(volumeOf("one").VolumeKey())
		p, _ := view.Staging(v.VolumeKey())
		e = v.Expansion.On(p.Expanded)
	})
	return e
}

// A volume that was expanded while nobody used it is expanded on its node when it is used next, wherever the process
// died between: after it is staged and before it is published, or after it is published by a plugin that does not
// stage. It is so once.
func TestExpandedWhileUnused(t *testing.T) {
	const controller = "ControllerExpandVolume ext-one 5"
	for name, c := range map[string]struct {
		change func(*world)
		usage  func(*registry.Usage)
		asked  []string
	}{
		"staged": {nil, nil, []string{controller, "NodeExpandVolume ext-one 5 at staging"}},
		"not staged": {func(w *world) { w.stages = false }, nil,
			[]string{controller, "NodeExpandVolume ext-one 5 at target"}},
		"offline": {func(w *world) { w.offline = true }, nil,
			[]string{controller, "NodeExpandVolume ext-one 5 at staging"}},
		"node alone": {func(w *world) { w.expands = false }, nil, []string{"NodeExpandVolume ext-one 5 at staging"}},
		"block device": {nil, func(u *registry.Usage) {
			u.Attachment = registry.BlockDevice
		}, []string{controller, "NodeExpandVolume ext-one 5 at target"}},
		"controller": {func(w *world) { w.grows = false }, nil, []string{controller}},
	} {
		t.Run(name, func(t *testing.T) {
			w := expanding(t, c.change)
			if err := w.expand(t.Context(), 5); err != nil {
				t.Fatal(err)
			}
			w.crash()
			u := shared()
			if c.usage != nil {
				c.usage(&u)
			}
			w.mustUp("a1", u)
			order := w.take()
			grown, published := slices.Index(order, "NodeExpandVolume"), slices.Index(order, "NodePublishVolume")
			at := strings.Join(c.asked, " ")
			if strings.Contains(at, "staging") && grown > published || strings.Contains(at, "target") &&
				grown < published {
				t.Errorf("the order is %q", order)
			}
			w.crash()
			w.mustUp("a2", u)
			w.asked(t, "by the second user")
			w.mustDown("a1")
			w.mustDown("a2")
			w.mustUp("a1", u)
			w.asked(t, "when it is mounted again")
			if e := w.expansion(); e.Pending() || e.Done != 5 {
				t.Errorf("recorded: %+v", e)
			}
		})
		t.Run(name+", as it was asked", func(t *testing.T) {
			w := expanding(t, c.change)
			u := shared()
			if c.usage != nil {
				c.usage(&u)
			}
			if err := w.expand(t.Context(), 5); err != nil {
				t.Fatal(err)
			}
			w.mustUp("a1", u)
			w.asked(t, "until it is used", c.asked...)
			if d := w.disk("ext-one"); w.grows && d.shown != 5 {
				t.Errorf("the node shows %d bytes", d.shown)
			}
		})
	}
}

// A volume in use is expanded on its node right away, where it is staged, if its plugin does that; else it is refused,
// with who uses it, and nothing is sent.
func TestExpandedWhileUsed(t *testing.T) {
	t.Run("online", func(t *testing.T) {
		w := expanding(t, nil)
		w.mustUp("a1", shared())
		w.take()
		if err := w.expand(t.Context(), 5); err != nil {
			t.Fatal(err)
		}
		w.asked(t, "in use", "ControllerExpandVolume ext-one 5", "NodeExpandVolume ext-one 5 at staging")
		r := w.last.grow
		if r.StagingPath != r.Path || r.Usage != shared() || len(r.Secrets) != 1 {
			t.Errorf("the node was asked %+v", r)
		}
		for _, size := range []int64{5, 5} {
			if err := w.expand(t.Context(), size); err != nil {
				t.Errorf("%d bytes again: %v", size, err)
			}
		}
		w.asked(t, "for what is so")
		if err := w.expand(t.Context(), 4); !errors.Is(err, registry.ErrInvalid) ||
			!strings.Contains(err.Error(), "smaller") {
			t.Errorf("shrinking: %v", err)
		}
	})
	for name, alone := range map[string]bool{"offline": false, "offline, node alone": true} {
		t.Run(name, func(t *testing.T) {
			w := expanding(t, func(w *world) { w.offline, w.expands = true, !alone })
			w.mustUp("a1", shared())
			w.take()
			err := w.expand(t.Context(), 5)
			if !errors.Is(err, registry.ErrConflict) || !strings.Contains(err.Error(), "alloc a1") ||
				!strings.Contains(err.Error(), "stop the jobs") {
				t.Errorf("in use: %v", err)
			}
			w.asked(t, "in use")
			w.mustDown("a1")
			if err := w.expand(t.Context(), 5); err != nil {
				t.Error(err)
			}
			w.mustUp("a1", shared())
			if d := w.disk("ext-one"); d.shown != 5 {
				t.Errorf("the node shows %d bytes", d.shown)
			}
		})
	}
}

// Nothing that is read-only wherever it is grows: that waits for a user who may write. One who may not does not matter
// where the volume is staged for writing.
func TestReadOnlyVolumeGrowsLater(t *testing.T) {
	w := expanding(t, func(w *world) { w.stages = false })
	reader := shared()
	reader.ReadOnly = true
	if err := w.expand(t.Context(), 5); err != nil {
		t.Fatal(err)
	}
	w.mustUp("a1", reader)
	w.asked(t, "read-only", "ControllerExpandVolume ext-one 5")
	if !w.expansion().Pending() {
		t.Error("nothing is pending any more")
	}
	w.mustUp("a2", shared())
	w.asked(t, "for writing", "NodeExpandVolume ext-one 5 at target")
	w = expanding(t, nil)
	if err := w.expand(t.Context(), 5); err != nil {
		t.Fatal(err)
	}
	w.mustUp("a1", reader)
	w.asked(t, "staged for writing", "ControllerExpandVolume ext-one 5", "NodeExpandVolume ext-one 5 at staging")
}

// What the node refuses for certain keeps nobody from the volume, is told, and is asked again at the next mount and not
// before, whatever asks.
func TestNodeRefusesToExpand(t *testing.T) {
	for _, code := range []string{"FAILED_PRECONDITION", "INTERNAL"} {
		t.Run(code, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := expanding(t, nil)
				if err := w.expand(t.Context(), 5); err != nil {
					t.Fatal(err)
				}
				w.sizes()
				w.fault = func(rpc registry.RPC) fault {
					if rpc == registry.NodeExpandRPC {
						return fault{code: code, outcome: registry.OutcomeFailed}
					}
					return fault{}
				}
				w.mustUp("a1", shared())
				sent := len(w.sizes())
				if want := map[string]int{"FAILED_PRECONDITION": 1, "INTERNAL": 3}[code]; sent != want {
					t.Errorf("sent %d times, want %d", sent, want)
				}
				if e := w.expansion(); !e.Pending() || e.Refused != code || e.RPC != registry.NodeExpandRPC ||
					e.Code != code || e.Detail != "injected" {
					t.Errorf("recorded: %+v", e)
				}
				w.crash()
				w.mustUp("a2", shared())
				w.asked(t, "by the second user")
				if err := w.expand(t.Context(), 5); err != nil {
					t.Error(err)
				}
				if again, want := len(w.sizes()), map[string]int{"FAILED_PRECONDITION": 0,
					"INTERNAL": 3}[code]; again != want {
					t.Errorf("a person who asks again has it sent %d times, want %d", again, want)
				}
				w.mustDown("a1")
				w.mustDown("a2")
				w.fault = func(registry.RPC) fault { return fault{} }
				w.mustUp("a1", shared())
				w.asked(t, "at the next mount", "NodeExpandVolume ext-one 5 at staging")
				if e := w.expansion(); e.Pending() || e.Refused != "" || e.Code != "" {
					t.Errorf("recorded: %+v", e)
				}
			})
		})
	}
}

// A call that was lost is sent again as it was, by who comes next: to use the volume, to give it back, or nobody (Run).
// An earlier boot's is not.
func TestLostExpansionIsResumed(t *testing.T) {
	used := func(w *world, _ *testing.T) { w.mustUp("a2", shared()) }
	freed := func(w *world, _ *testing.T) { w.mustDown("a1") }
	const enlarge, grow = "ControllerExpandVolume ext-one 5", "NodeExpandVolume ext-one 5 at staging"
	for name, c := range map[string]struct {
		rpc   registry.RPC
		next  func(*world, *testing.T)
		asked []string
	}{
		"at the controller, then used": {registry.ControllerExpandRPC, used, []string{enlarge, enlarge, grow}},
		"on the node, then used":       {registry.NodeExpandRPC, used, []string{enlarge, grow, grow}},
		"at the controller, then not":  {registry.ControllerExpandRPC, freed, []string{enlarge, enlarge}},
		"on the node, then not":        {registry.NodeExpandRPC, freed, []string{enlarge, grow, grow}},
		"at the controller, by nobody": {registry.ControllerExpandRPC, (*world).runs, []string{enlarge, enlarge, grow}},
		"on the node, by nobody":       {registry.NodeExpandRPC, (*world).runs, []string{enlarge, grow, grow}},
		"on the node, and a boot": {registry.NodeExpandRPC, func(w *world, t *testing.T) {
			w.reboot()
			w.crash()
			w.runs(t)
		}, []string{enlarge, grow}},
		"at the controller, and a boot": {registry.ControllerExpandRPC, func(w *world, t *testing.T) {
			w.reboot()
			w.crash()
			w.runs(t)
		},
			[]string{enlarge, enlarge}},
		"another size": {registry.ControllerExpandRPC, func(w *world, t *testing.T) {
			if err := w.expand(t.Context(), 7); err != nil {
				t.Error(err)
			}
		}, []string{enlarge, enlarge, grow, "ControllerExpandVolume ext-one 7",
			"NodeExpandVolume ext-one 7 at staging"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := expanding(t, nil)
				w.mustUp("a1", shared())
				w.failNext(c.rpc, fault{code: "UNAVAILABLE", outcome: registry.OutcomeUncertain, effect: true,
					then: w.crash})
				if err := w.expand(t.Context(), 5); err == nil {
					t.Error("a process that died has answered")
				}
				c.next(w, t)
				w.asked(t, "", c.asked...)
				w.view(func(view registry.View) {
					if open, found := registry.OpenIntent(view, volumeOf("one").VolumeKey()); found {
						t.Errorf("still open: %+v", open)
					}
				})
			})
		})
	}
}

// runs has the mediator finish what nobody waits for.
func (w *world) runs(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = w.mediator.Run(ctx)
	}()
	synctest.Wait()
	cancel()
	<-done
}

// A process that dies between the controller's half and the node's has left a volume that is expanded on its node by
// the next one.
func TestDeathBetweenTheHalves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := expanding(t, nil)
		w.mustUp("a1", shared())
		w.take()
		ctx, cancel := context.WithCancel(t.Context())
		w.failNext(registry.ControllerExpandRPC, fault{then: cancel})
		if err := w.expand(ctx, 5); err == nil {
			t.Error("who is dead has answered")
		}
		w.asked(t, "before", "ControllerExpandVolume ext-one 5")
		w.crash()
		if !w.expansion().Pending() {
			t.Fatal("nothing is pending")
		}
		w.runs(t)
		w.asked(t, "after", "NodeExpandVolume ext-one 5 at staging")
	})
}

// refuses has the plugin refuse the calls with the code, until it is told otherwise.
func (w *world) refuses(rpc registry.RPC, code string) {
	w.fault = func(sent registry.RPC) fault {
		if sent == rpc {
			return fault{code: code, outcome: registry.OutcomeFailed}
		}
		return fault{}
	}
}

// What the node has said stands, whatever its controller says later: after FAILED_PRECONDITION it is not asked again.
// And what the controller has said of an expansion without a known end stands, whatever the node says.
func TestEachHalfHasItsOwnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := expanding(t, nil)
		w.mustUp("a1", shared())
		w.refuses(registry.NodeExpandRPC, "FAILED_PRECONDITION")
		if err := w.expand(t.Context(), 2); err != nil {
			t.Fatal(err)
		}
		w.refuses(registry.ControllerExpandRPC, "INTERNAL")
		w.sizes()
		for range 2 {
			if err := w.expand(t.Context(), 3); err == nil {
				t.Error("expanded by a controller that failed")
			}
		}
		w.fault = func(registry.RPC) fault { return fault{} }
		if err := w.expand(t.Context(), 3); err != nil {
			t.Error(err)
		}
		if got := w.sizes(); strings.Contains(strings.Join(got, " "), "Node") {
			t.Errorf("a node that is not to be asked again was: %q", got)
		}
		w.mustDown("a1")
		w.mustUp("a1", shared())
		w.asked(t, "at the next mount", "NodeExpandVolume ext-one 3 at staging")
	})
	synctest.Test(t, func(t *testing.T) {
		w := expanding(t, nil)
		if err := w.expand(t.Context(), 2); err != nil {
			t.Fatal(err)
		}
		w.refuses(registry.ControllerExpandRPC, "INTERNAL")
		if err := w.expand(t.Context(), 3); err == nil {
			t.Error("expanded by a controller that failed")
		}
		for _, code := range []string{"INTERNAL", ""} {
			w.refuses(registry.NodeExpandRPC, code)
			w.mustUp("a1", shared())
			e := w.expansion()
			if !e.Open() || e.RPC != registry.ControllerExpandRPC || e.Code != "INTERNAL" || e.Refused != code ||
				e.Pending() != (code != "") {
				t.Errorf("the node says %q: %+v", code, e)
			}
			w.mustDown("a1")
		}
	})
}

// A size that a node can never make, where nobody else does, is told to who asks for it, and asked for no more. One
// that it has not made yet gives way to another.
func TestNodeAloneAndAnotherSize(t *testing.T) {
	alone := func(t *testing.T) *world {
		w := expanding(t, func(w *world) { w.expands = false })
		v := volumeOf("one")
		v.Capacity = 3
		w.put(v)
		return w
	}
	for _, code := range []string{"OUT_OF_RANGE", "INVALID_ARGUMENT"} {
		w := alone(t)
		w.mustUp("a1", shared())
		w.refuses(registry.NodeExpandRPC, code)
		if err := w.expand(t.Context(), 5000); !errors.Is(err, registry.ErrInvalid) ||
			!strings.Contains(err.Error(), code) {
			t.Errorf("%s: %v", code, err)
		}
		w.asked(t, "", "NodeExpandVolume ext-one 5000 at staging")
		w.fault = func(registry.RPC) fault { return fault{} }
		w.mustDown("a1")
		w.mustUp("a1", shared())
		w.asked(t, "at the next mount")
		if err := w.expand(t.Context(), 5); err != nil || w.expansion().Done != 5 {
			t.Errorf("another size: %v, %+v", err, w.expansion())
		}
		w.asked(t, "", "NodeExpandVolume ext-one 5 at staging")
	}
	for what, c := range map[string]struct {
		size  int64
		asked []string
	}{
		"a smaller one": {5, []string{"NodeExpandVolume ext-one 5 at staging"}},
		"a larger one":  {9000, []string{"NodeExpandVolume ext-one 9000 at staging"}},
		"none":          {3, nil},
	} {
		w := alone(t)
		for _, size := range []int64{5000, c.size} {
			if err := w.expand(t.Context(), size); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
		w.mustUp("a1", shared())
		w.asked(t, what, c.asked...)
		if e := w.expansion(); e.Pending() {
			t.Errorf("%s: %+v", what, e)
		}
	}
}

// A node is asked where something is mounted, and nowhere else: there the plugin would make larger what lies below, and
// say that it is done.
func TestNothingGrowsWhereNothingIsMounted(t *testing.T) {
	for name, change := range map[string]func(*world){"staged": nil,
		"not staged": func(w *world) { w.stages = false }} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := expanding(t, change)
				w.mustUp("a1", shared())
				clear(w.mounts) // by somebody
				if err := w.expand(t.Context(), 5); err != nil {
					t.Error(err)
				}
				w.runs(t)
				w.asked(t, "", "ControllerExpandVolume ext-one 5")
				if !w.expansion().Pending() {
					t.Error("nothing is pending any more")
				}
				w.mustUp("a1", shared())
				if asked := w.sizes(); len(asked) != 1 || w.expansion().Pending() {
					t.Errorf("mounted again: asked %q, %+v", asked, w.expansion())
				}
			})
		})
		t.Run(name+", and a call is open", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := expanding(t, change)
				w.mustUp("a1", shared())
				w.failNext(registry.NodeExpandRPC,
					fault{code: "UNAVAILABLE", outcome: registry.OutcomeUncertain, then: w.crash})
				if err := w.expand(t.Context(), 5); err == nil {
					t.Error("a process that died has answered")
				}
				w.sizes()
				clear(w.mounts)
				w.runs(t)
				w.asked(t, "")
				w.view(func(view registry.View) {
					p, _ := view.Staging(volumeOf("one").VolumeKey())
					if e := w.expansion(); !e.Pending() || p.Expanded.At != "" {
						t.Errorf("recorded: %+v, %+v", e, p.Expanded)
					}
				})
			})
		})
	}
	w := expanding(t, func(w *world) { w.mountsStaging = false })
	w.mustUp("a1", shared())
	w.sizes()
	if err := w.expand(t.Context(), 5); err != nil {
		t.Error(err)
	}
	w.asked(t, "where its plugin mounts nothing to stage", "ControllerExpandVolume ext-one 5",
		"NodeExpandVolume ext-one 5 at staging")
}

// How large a volume is its controller says. Where the node alone makes it larger, the node does.
func TestCapacityIsWhatItsMakerSays(t *testing.T) {
	for alone, want := range map[bool]int64{false: 5, true: 7} {
		w := expanding(t, func(w *world) { w.expands, w.tells = !alone, 7 })
		w.mustUp("a1", shared())
		if err := w.expand(t.Context(), 5); err != nil {
			t.Error(err)
		}
		w.view(func(view registry.View) {
			if v, _ := view.VolumeByKey(volumeOf("one").VolumeKey()); v.Capacity != want || v.Expansion.Pending() {
				t.Errorf("the node alone: %v; %d bytes, %+v", alone, v.Capacity, v.Expansion)
			}
		})
	}
}

// A boot mounts all anew, also for a plugin that does not stage and a volume with several users, whoever of them comes
// first.
func TestRefusalEndsWithTheBoot(t *testing.T) {
	w := expanding(t, func(w *world) { w.stages = false })
	w.refuses(registry.NodeExpandRPC, "FAILED_PRECONDITION")
	w.mustUp("a1", shared())
	w.mustUp("a2", shared())
	if err := w.expand(t.Context(), 5); err != nil {
		t.Fatal(err)
	}
	w.sizes()
	w.fault = func(registry.RPC) fault { return fault{} }
	w.mustUp("a2", shared())
	w.asked(t, "before")
	w.reboot()
	w.crash()
	w.mustUp("a2", shared())
	w.asked(t, "after", "NodeExpandVolume ext-one 5 at target")
}

// A process may die after the node has stored what it has done of an expansion, and before the volume records that. The
// next process records it, whatever happens to the volume first, and asks the plugin nothing again.
func TestNodesResultIsReportedAfterADeath(t *testing.T) {
	for what, next := range map[string]func(*testing.T, *world){
		"in the background":     func(t *testing.T, w *world) { w.runs(t) },
		"by the next expansion": func(t *testing.T, w *world) { _ = w.expand(t.Context(), 5) },
		"by the next user":      func(_ *testing.T, w *world) { w.mustUp("a2", shared()) },
	} {
		for _, alone := range []bool{false, true} { // the plugin expands on the node alone
			synctest.Test(t, func(t *testing.T) {
				w := expanding(t, func(w *world) { w.expands = !alone })
				w.mustUp("a1", shared())
				died := errors.New("died")
				w.mediator = w.newController(dies{w.stager, died})
				if err := w.expand(t.Context(), 5); !errors.Is(err, died) || !w.expansion().Pending() {
					t.Errorf("%s: %v, %+v", what, err, w.expansion())
				}
				w.crash()
				w.sizes()
				next(t, w)
				w.asked(t, what)
				w.view(func(view registry.View) {
					v, _ := view.VolumeByKey(volumeOf("one").VolumeKey())
					if v.Expansion.Pending() || v.Expansion.Done != 5 || v.Capacity < 5 {
						t.Errorf("%s: %d bytes, %+v", what, v.Capacity, v.Expansion)
					}
				})
			})
		}
	}
}

// dies is a node that dies after it has stored what it has done.
type dies struct {
	*node.Stager
	why error
}

func (d dies) Grow(
	ctx context.Context, by intent.Caller, key registry.VolumeKey, again bool,
) (registry.NodeExpansion, error) {
	n, err := d.Stager.Grow(ctx, by, key, again)
	if err == nil && n.Done > 0 {
		err = d.why
	}
	return n, err
}
