package node_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// healthOf is what is recorded of volume one, and the events that told of it.
func (w *world) healthOf(t *testing.T) (h registry.VolumeHealth, told []string) {
	t.Helper()
	w.view(func(view registry.View) {
		v, _ := view.Volume(one)
		h = v.Health
		p, _ := view.Staging(volumeOf("one").VolumeKey())
		h.Node = p.Condition
		events, _ := view.Events(0, 10000)
		for _, e := range events {
			if e.Kind == registry.EventVolumeUnhealthy || e.Kind == registry.EventVolumeHealthy {
				told = append(told, strings.TrimSpace(string(e.Kind)+" "+e.Detail))
			}
		}
	})
	return h, told
}

// measured is how often the plugin was asked for the volume's statistics.
func (w *world) measured() (n int) {
	for _, line := range w.plugin.journal {
		if strings.HasPrefix(line, "NodeGetVolumeStats ") {
			n++
		}
	}
	return n
}

// watchHealth has the stager watch the health of volumes until the test ends.
func (w *world) watchHealth(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- w.stager.WatchHealth(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("it ended with %v", err)
		}
	})
}

// A plugin that declares that it tells the health of volumes is asked now and then about those in use. A change is
// recorded, and told once.
func TestUnhealthyVolumeIsToldUnasked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := open(t)
		w.conditions = true
		w.stager.Locks = &intent.Locks{}
		w.mustUp("a1", shared())
		w.watchHealth(t)
		sick := &registry.VolumeCondition{Abnormal: true, Message: "source path doesn't exist"}
		still := &registry.VolumeCondition{Abnormal: true, Message: "still not"}
		for _, says := range []*registry.VolumeCondition{{}, sick, sick, nil, still, {}, {}} {
			before := w.measured()
			w.says.Store(says)
			time.Sleep(2 * time.Minute)
			synctest.Wait()
			if w.measured() == before {
				t.Error("nobody asked")
			}
		}
		h, told := w.healthOf(t)
		if h.Abnormal() || !slices.Equal(told, []string{"volume unhealthy source path doesn't exist",
			"volume healthy"}) {
			t.Errorf("recorded %+v, told %q", h, told)
		}
		w.says.Store(sick)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		h, _ = w.healthOf(t)
		if c := h.Node; !c.Abnormal || c.Message != sick.Message || c.Since.IsZero() || h.Controller.Abnormal {
			t.Errorf("recorded %+v", h)
		}
		w.mustDown("a1")
		asked := w.measured()
		time.Sleep(time.Hour)
		synctest.Wait()
		if h, _ := w.healthOf(t); h.Abnormal() || w.measured() != asked {
			t.Errorf("nothing of it is mounted here any more: %+v, asked %d times more", h, w.measured()-asked)
		}
		w.empty()
	})
}

// A plugin that does not declare that it tells the health of volumes is not asked unasked. One that dies of it is not
// asked again, and a volume for which another call is under way is left out.
func TestHealthIsNotAskedForAtAPrice(t *testing.T) {
	for what, c := range map[string]struct {
		prepare func(w *world)
		asked   int
	}{
		"it does not declare it": {func(w *world) { w.conditions = false }, 0},
		"it has no statistics":   {func(w *world) { w.blind = true }, 0},
		"it is unhealthy":        {func(w *world) { w.health = registry.Health{State: registry.Unhealthy} }, 0},
		"it dies": {func(w *world) {
			w.measure = func(context.Context) ([]registry.VolumeUsage, error) {
				return nil, &registry.CallError{
					RPC: registry.NodeStatsRPC, Code: "UNAVAILABLE", Outcome: registry.OutcomeFailed,
					Kind: registry.ErrUnavailable, Lost: true,
				}
			}
		}, 1},
		"the volume is busy": {func(w *world) {
			_, _ = w.stager.Locks.Lock(context.Background(), volumeOf("one").VolumeKey(), "something else")
		}, 0},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := open(t)
				w.conditions, w.stager.Locks, w.stager.Suspended = true, &intent.Locks{}, csi.NewSuspensions("")
				w.says.Store(&registry.VolumeCondition{Abnormal: true, Message: "m"})
				w.mustUp("a1", shared())
				c.prepare(w)
				w.watchHealth(t)
				time.Sleep(time.Hour)
				synctest.Wait()
				if h, told := w.healthOf(t); w.measured() != c.asked || h.Abnormal() || len(told) > 0 {
					t.Errorf("asked %d times, not %d: %+v, %q", w.measured(), c.asked, h, told)
				}
			})
		})
	}
}

// What a plugin says of a volume's health is read only if the plugin declares that it says so.
func TestConditionWithoutCapabilityIsNotBelieved(t *testing.T) {
	w := open(t)
	w.says.Store(&registry.VolumeCondition{Abnormal: true, Message: "m"})
	w.mustUp("a1", shared())
	for _, declared := range []bool{false, true} {
		w.conditions = declared
		if _, err := w.stager.Stats(t.Context(), one); err != nil {
			t.Fatal(err)
		}
		if h, _ := w.healthOf(t); h.Abnormal() != declared {
			t.Errorf("declared %v: recorded %+v", declared, h)
		}
	}
}

// An error about one volume does not keep the others of its plugin from being asked about, however often it comes.
func TestFailedHealthOfOneVolumeHidesNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := open(t)
		w.put(volumeOf("two"))
		w.conditions, w.stager.Locks, w.stager.Suspended = true, &intent.Locks{}, csi.NewSuspensions("")
		w.mustUp("a1", shared())
		if _, err := w.up(t.Context(), "two", "a2", shared()); err != nil {
			t.Fatal(err)
		}
		w.measure = func(context.Context) ([]registry.VolumeUsage, error) {
			return nil, &registry.CallError{
				RPC: registry.NodeStatsRPC, Code: "NOT_FOUND", Outcome: registry.OutcomeFailed,
				Kind: registry.ErrNotFound,
			}
		}
		w.watchHealth(t)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		for _, id := range []string{"ext-one", "ext-two"} {
			if !strings.Contains(strings.Join(w.plugin.journal, "\n"), "NodeGetVolumeStats "+id+" ") {
				t.Errorf("nobody asked about %s: %q", id, w.plugin.journal)
			}
		}
	})
}

// A node plugin of CSI 1.13 does not report conditions any more: what its predecessor said last is dropped.
func TestConditionEndsWithThePluginThatReportsIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := open(t)
		w.conditions, w.stager.Locks = true, &intent.Locks{}
		w.says.Store(&registry.VolumeCondition{Abnormal: true, Message: "m"})
		w.mustUp("a1", shared())
		if _, err := w.stager.Stats(t.Context(), one); err != nil {
			t.Fatal(err)
		}
		if h, _ := w.healthOf(t); !h.Abnormal() {
			t.Fatalf("recorded %+v", h)
		}
		w.conditions = false
		w.watchHealth(t)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if h, _ := w.healthOf(t); h.Abnormal() {
			t.Errorf("recorded %+v", h)
		}
	})
}
