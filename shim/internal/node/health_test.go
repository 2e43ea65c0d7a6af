package node

import (
	"cmp"
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
)

const statsRPC = string(registry.NodeStatsRPC)

// healthCalls are the calls by which a plugin reports the health of volumes or storage.
var healthCalls = []string{
	statsRPC, "NodeGetVolumeHealth", "NodeGetStorageHealth", "ListVolumes", "ControllerGetVolume",
	"ControllerListVolumeHealth", "ControllerGetVolumeHealth",
}

// health returns the recorded condition of volume v0 or of the storage, and the events about health.
func (n *env) health() (c registry.Condition, events []string) {
	n.view(func(v registry.View) {
		p, _ := v.Staging(v0)
		vol, _ := v.VolumeByKey(v0)
		in, _ := n.shim.table.Find(registry.RoleNode, pluginID)
		for _, one := range []registry.Condition{p.Condition, vol.Health.Controller, in.Storage} {
			if one.Abnormal {
				c = one
			}
		}
		all, _ := v.Events(0, 10000)
		for _, e := range all {
			if e.External != "" && e.External != v0.External {
				continue
			}
			if text := string(e.Kind); strings.HasPrefix(text, "volume ") && strings.HasSuffix(text, "healthy") ||
				strings.HasPrefix(text, "storage ") {
				events = append(events, strings.TrimSpace(text+" "+e.Detail))
			}
		}
	})
	return c, events
}

// asked counts the calls of an RPC. If volume is set, it counts only calls for this volume.
func (n *env) asked(rpc, volume string) (calls int) {
	for _, c := range journal.Calls(n.journal.Lines()) {
		if c.RPC == rpc && (c.Volume == volume || volume == "") {
			calls++
		}
	}
	return calls
}

// reports makes the plugin report a condition. The zero value reports a good one.
func (n *env) reports(rpc string, c csifake.Condition) {
	n.script()
	n.script(csifake.Rule{RPC: rpc, Condition: &c})
	if rpc == "ControllerListVolumeHealth" { // a volume that is missing in the list is asked for separately
		n.script(csifake.Rule{RPC: "ControllerGetVolumeHealth", Condition: &c})
	}
}

// A plugin that reports health is asked at intervals, by the best call that it has. The node plugin is asked about the
// volumes in use and its storage, the controller about all volumes. A change is recorded with one event, even if the
// shim is restarted. A status that this build does not know is ignored.
func TestHealthChangesAreRecordedAtIntervals(t *testing.T) {
	sick := func(message string) csifake.Condition { return csifake.Condition{Abnormal: true, Message: message} }
	lost := csifake.Condition{Abnormal: true, Status: "DATA_LOSS", Reason: "DiskFailed", Message: "disk 3"}
	later := csifake.Condition{Abnormal: true, Status: "99", Reason: "Later"}
	old := []csifake.Condition{{}, sick("path is gone"), sick("path is gone"), sick("still gone"), {}, {}}
	oldTold := []string{"volume unhealthy path is gone", "volume healthy"}
	now := append(slices.Clone(old[:4]), lost, lost, later, csifake.Condition{})
	nowTold := []string{
		"volume unhealthy DEGRADED/Scripted: path is gone", "volume unhealthy DATA_LOSS/DiskFailed: disk 3",
		"volume healthy",
	}
	const waits = 7 * time.Minute
	for rpc, c := range map[string]struct {
		caps  string
		says  []csifake.Condition
		told  []string
		after bool // the plugin is asked about unused volumes
	}{
		statsRPC:              {reports, old, oldTold, false},
		"NodeGetVolumeHealth": {reportsOnNode, now, nowTold, false},
		"NodeGetStorageHealth": {reportsStorages, old, []string{
			"storage unhealthy STORAGE_DEGRADED/Scripted: path is gone", "storage healthy"}, true},
		"ListVolumes":                {"controller/VOLUME_CONDITION ", old, oldTold, true},
		"ControllerGetVolume":        {"controller/VOLUME_CONDITION GET_VOLUME ", old, oldTold, true},
		"ControllerListVolumeHealth": {reportsLists, now, nowTold, true},
		"ControllerGetVolumeHealth":  {"controller/GET_VOLUME_HEALTH ", now, nowTold, true},
	} {
		t.Run(rpc, func(t *testing.T) {
			inEnv(t, stages+c.caps, func(t *testing.T, n *env) {
				if rpc == "ControllerGetVolume" {
					in, _ := n.shim.table.Find(registry.RoleController, pluginID)
					in.Options = map[string]string{registry.OptionListVolumes: registry.OptionOff}
					n.put(in)
				}
				n.up("a1", wish{})
				for i, says := range c.says {
					before := n.asked(rpc, "")
					n.reports(rpc, says)
					time.Sleep(waits)
					if n.asked(rpc, "") == before {
						t.Error("the plugin is not asked")
					}
					abnormal := says.Abnormal && says.Status != "99"
					if c, _ := n.health(); c.Abnormal != abnormal || c.Abnormal && c.Since.IsZero() {
						t.Errorf("after %+v: recorded %+v", says, c)
					}
					if i == 2 && rpc != "ControllerGetVolume" { // introduce sets no options
						n.restart()
					}
				}
				if _, events := n.health(); !slices.Equal(events, c.told) {
					t.Errorf("events: %q", events)
				}
				n.down("a1")
				before := n.asked(rpc, "")
				time.Sleep(time.Hour)
				if asked := n.asked(rpc, "") > before; asked != c.after {
					t.Errorf("the plugin is asked while the volume is not used: %v", asked)
				}
			})
		})
	}
}

// The plugin is not asked if it declares no conditions or no statistics, if it is unhealthy, or if it died of such a
// call. A volume with an open call is skipped.
func TestPluginIsAskedForHealthOnlyIfItCanAnswer(t *testing.T) {
	for what, c := range map[string]struct {
		caps  string
		rpc   string
		state registry.HealthState
		dies  bool
		busy  bool
		asked int
	}{
		"no conditions":      {caps: measures, rpc: statsRPC},
		"no statistics":      {rpc: statsRPC},
		"unhealthy plugin":   {caps: reports, rpc: statsRPC, state: registry.Unhealthy},
		"unhealthy storage":  {caps: reportsStorages, rpc: "NodeGetStorageHealth", state: registry.Unhealthy},
		"busy volume":        {caps: reports, rpc: statsRPC, busy: true},
		"busy volume, 1.13":  {caps: reportsOnNode, rpc: "NodeGetVolumeHealth", busy: true},
		"death":              {caps: reports, rpc: statsRPC, dies: true, asked: 1},
		"death by a volume":  {caps: reportsOnNode, rpc: "NodeGetVolumeHealth", dies: true, asked: 1},
		"death by a storage": {caps: reportsStorages, rpc: "NodeGetStorageHealth", dies: true, asked: 1},
		"death by a list":    {caps: reportsLists, rpc: "ControllerListVolumeHealth", dies: true, asked: 1},
		"death by a get": {caps: "controller/GET_VOLUME_HEALTH ", rpc: "ControllerGetVolumeHealth", dies: true,
			asked: 1},
	} {
		t.Run(what, func(t *testing.T) {
			inEnv(t, c.caps, func(t *testing.T, n *env) {
				n.up("a1", wish{})
				in, _ := n.shim.table.Find(registry.RoleNode, pluginID)
				in.Health.State = cmp.Or(c.state, registry.Healthy)
				n.put(in)
				if c.dies {
					n.script(csifake.Rule{RPC: c.rpc, Crash: true})
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
				if got := n.asked(c.rpc, ""); got != c.asked {
					t.Errorf("asked %d times, want %d", got, c.asked)
				}
				unlock()
			})
		})
	}
}

// After an error about one volume, the plugin is still asked about the others.
func TestFailedHealthOfOneVolumeHidesNoOther(t *testing.T) {
	inEnv(t, reports, func(t *testing.T, n *env) {
		n.up("a1", wish{volumes: []int{0, 1}})
		n.script(csifake.Rule{RPC: statsRPC, Code: "NOT_FOUND"})
		time.Sleep(2 * time.Minute)
		for _, volume := range []string{"x-v0", "x-v1"} {
			if n.asked(statsRPC, volume) == 0 {
				t.Errorf("the plugin is not asked about %s", volume)
			}
		}
	})
}

// A plugin that no longer declares that it reports health is not asked, and what it reported before is dropped.
func TestConditionEndsWithThePluginThatReportsIt(t *testing.T) {
	for rpc, caps := range map[string]string{
		statsRPC: reports, "NodeGetStorageHealth": reportsStorages, "ControllerListVolumeHealth": reportsLists,
	} {
		inEnv(t, caps, func(t *testing.T, n *env) {
			n.up("a1", wish{})
			n.reports(rpc, csifake.Condition{Abnormal: true, Message: "m"})
			time.Sleep(7 * time.Minute)
			if c, _ := n.health(); !c.Abnormal {
				t.Fatalf("%s: recorded %+v", rpc, c)
			}
			n.restartPlugin(measures)
			asked := n.asked(rpc, "")
			time.Sleep(7 * time.Minute)
			if c, events := n.health(); c.Abnormal || len(events) != 1 || n.asked(rpc, "") != asked {
				t.Errorf("%s: recorded %+v, events %q", rpc, c, events)
			}
		})
	}
}

// A question about the health of a volume gives way to a mount, whichever service is asked. A plugin that hangs is not
// asked about its other volumes.
func TestHealthDelaysNoMount(t *testing.T) {
	for rpc, caps := range map[string]string{
		"NodeGetVolumeHealth": reportsOnNode, "ControllerGetVolumeHealth": "controller/GET_VOLUME_HEALTH ",
	} {
		inEnv(t, caps, func(t *testing.T, n *env) {
			n.up("a1", wish{volumes: []int{0, 1}})
			n.script(csifake.Rule{RPC: rpc, Hang: csifake.UntilCancelled})
			before := n.asked(rpc, "")
			for n.asked(rpc, "") == before {
				time.Sleep(time.Second)
			}
			began := time.Now()
			n.up("a2", wish{volumes: []int{0, 1}})
			if took := time.Since(began); took != 0 {
				t.Errorf("%s: the next user waited %v", rpc, took)
			}
		})
	}
}

// While a plugin has two instances, the older one is asked about the volumes whose mounts it serves.
func TestHealthIsAskedOfTheInstanceThatServesTheVolume(t *testing.T) {
	for rpc, caps := range map[string]string{statsRPC: reports, "NodeGetVolumeHealth": reportsOnNode} {
		inEnv(t, caps, func(t *testing.T, n *env) {
			n.up("a1", wish{})
			old, _ := n.shim.table.Find(registry.RoleNode, pluginID)
			var ref registry.Ref
			n.view(func(v registry.View) { ref = v.AllRefs()[0] })
			ref.Server = old.TaskKey()
			n.put(ref)
			next := old // a new instance, which does not report health
			next.Alloc, next.Fingerprint.Capabilities = "next", nil
			n.put(next)
			if active, _ := n.shim.table.Find(registry.RoleNode, pluginID); active.Alloc != "next" {
				t.Fatalf("%s is active", active.InstanceKey)
			}
			before := n.asked(rpc, "")
			time.Sleep(2 * time.Minute)
			if n.asked(rpc, "") == before {
				t.Errorf("%s: the plugin is not asked", rpc)
			}
			n.removeTask(next.TaskKey())
			ref.Server = registry.TaskKey{}
			n.put(ref)
		})
	}
}
