package node

import (
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
)

const statsRPC = string(registry.NodeStatsRPC)

// health returns the recorded condition of volume v0, and the events about the health of volumes.
func (n *env) health() (c registry.VolumeCondition, events []string) {
	n.view(func(v registry.View) {
		p, _ := v.Staging(v0)
		c = p.Condition
		all, _ := v.Events(0, 10000)
		for _, e := range all {
			if e.Kind == registry.EventVolumeUnhealthy || e.Kind == registry.EventVolumeHealthy {
				events = append(events, strings.TrimSpace(string(e.Kind)+" "+e.Detail))
			}
		}
	})
	return c, events
}

// measured counts the calls of NodeGetVolumeStats for a volume.
func (n *env) measured(volume string) (calls int) {
	for _, c := range journal.Calls(n.journal.Lines()) {
		if c.RPC == statsRPC && c.Volume == volume {
			calls++
		}
	}
	return calls
}

// reports makes the plugin report a condition of every volume. An empty message reports a healthy one.
func (n *env) reports(message string) {
	n.script()
	n.script(csifake.Rule{RPC: statsRPC, Condition: &csifake.Condition{Abnormal: message != "", Message: message}})
}

// A plugin that declares conditions is asked now and then about the volumes in use. A change is recorded, with one
// event.
func TestUnhealthyVolumeIsToldUnasked(t *testing.T) {
	inEnv(t, stages+reports, func(t *testing.T, n *env) {
		n.up("a1", wish{})
		for _, message := range []string{"", "source path is gone", "source path is gone", "still gone", "", ""} {
			before := n.measured("x-v0")
			n.reports(message)
			time.Sleep(2 * time.Minute)
			if n.measured("x-v0") == before {
				t.Error("the plugin is not asked")
			}
			if c, _ := n.health(); c.Abnormal != (message != "") || c.Abnormal && c.Since.IsZero() {
				t.Errorf("after %q: recorded %+v", message, c)
			}
		}
		want := []string{"volume unhealthy source path is gone", "volume healthy"}
		if _, events := n.health(); !slices.Equal(events, want) {
			t.Errorf("events: %q", events)
		}
		n.down("a1")
		before := n.measured("x-v0")
		time.Sleep(time.Hour)
		if n.measured("x-v0") != before {
			t.Error("the plugin is asked about a volume that is not mounted")
		}
	})
}

// The plugin is not asked if it declares no conditions or no statistics, if it is unhealthy, or if it died of such a
// call. A volume with another call is left out.
func TestHealthIsNotAskedForAtAPrice(t *testing.T) {
	for what, c := range map[string]struct {
		caps  string
		rule  csifake.Rule
		state registry.HealthState
		busy  bool
		asked int
	}{
		"no conditions":    {caps: measures, state: registry.Healthy},
		"no statistics":    {state: registry.Healthy},
		"unhealthy plugin": {caps: reports, state: registry.Unhealthy},
		"death": {caps: reports, rule: csifake.Rule{RPC: statsRPC, Crash: true}, state: registry.Healthy,
			asked: 1},
		"busy volume": {caps: reports, state: registry.Healthy, busy: true},
	} {
		t.Run(what, func(t *testing.T) {
			inEnv(t, c.caps, func(t *testing.T, n *env) {
				n.up("a1", wish{})
				in, _ := n.shim.table.Find(registry.RoleNode, pluginID)
				in.Health.State = c.state
				n.put(in)
				if c.rule.RPC != "" {
					n.script(c.rule)
				}
				unlock := func() {}
				if c.busy {
					unlock, _ = n.shim.stager.Locks.Lock(t.Context(), v0, "something else")
				}
				time.Sleep(time.Minute + 30*time.Second)
				if c.asked > 0 {
					n.startPlugin()
					n.introduce()
				}
				time.Sleep(time.Hour)
				if got := n.measured("x-v0"); got != c.asked {
					t.Errorf("asked %d times, want %d", got, c.asked)
				}
				unlock()
			})
		})
	}
}

// An error about one volume does not keep its plugin from being asked about the others.
func TestFailedHealthOfOneVolumeHidesNoOther(t *testing.T) {
	inEnv(t, reports, func(t *testing.T, n *env) {
		n.up("a1", wish{volumes: []int{0, 1}})
		n.script(csifake.Rule{RPC: statsRPC, Code: "NOT_FOUND"})
		time.Sleep(2 * time.Minute)
		for _, volume := range []string{"x-v0", "x-v1"} {
			if n.measured(volume) == 0 {
				t.Errorf("the plugin is not asked about %s", volume)
			}
		}
	})
}

// A node plugin of CSI 1.13 declares no conditions. The last condition that its predecessor reported is dropped.
func TestConditionEndsWithThePluginThatReportsIt(t *testing.T) {
	inEnv(t, reports, func(t *testing.T, n *env) {
		n.up("a1", wish{})
		n.reports("m")
		time.Sleep(2 * time.Minute)
		if c, _ := n.health(); !c.Abnormal {
			t.Fatalf("recorded %+v", c)
		}
		n.restartPlugin(measures)
		time.Sleep(2 * time.Minute)
		if c, _ := n.health(); c.Abnormal {
			t.Errorf("recorded %+v", c)
		}
	})
}
