package control

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/registry"
)

var update = flag.Bool("update", false, "rewrite testdata")

var (
	disk = host.VolumeName{Namespace: "default", ID: "disk"}
	noon = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
)

// A wait is explained with the holders of the volume and their waits, the plugin, and the next attempt.
func TestWaitsAreExplained(t *testing.T) {
	h := &fakeHost{sealed: hooks.Sealed("s"), refuse: registry.Errorf(registry.ErrConflict, "volume disk is held")}
	waits := func() []registry.Wait {
		h.mu.Lock()
		defer h.mu.Unlock()
		return []registry.Wait{{Alloc: h.prepared, Request: "data", Volume: disk, Step: registry.StepClaim,
			Since: noon},
			{Alloc: "other-alloc", Volume: disk, Step: registry.StepUnpublish, For: "plugin loopfs",
				RPC: registry.NodeUnpublishRPC, Code: "INTERNAL", Detail: "busy"}}
	}
	h.allocs = func() []host.AllocStatus {
		mine := waits()[:1]
		use := registry.AllocVolume{Request: "data", Name: disk, Trouble: "its server is gone", Troubled: noon}
		return []host.AllocStatus{{Alloc: registry.Alloc{ID: mine[0].Alloc, Waiting: mine},
			Volumes: []registry.AllocVolume{use}}}
	}
	h.volumes = func() []host.VolumeStatus {
		claim := registry.Claim{Name: disk, Alloc: "other-alloc", Since: noon}
		v := host.VolumeStatus{Waiting: waits(), Holders: []registry.Holder{{Claim: claim, Trouble: "it hangs"}}}
		v.Namespace, v.ID, v.Plugin = disk.Namespace, disk.ID, "loopfs"
		return []host.VolumeStatus{v}
	}
	s, socket := serveAgent(t, h)
	c := NewClient(socket)
	_, err := c.RunJob(t.Context(), Submission{Name: "user", Text: []byte("x")}, agent.SubmitOptions{})
	must(t, err)
	const line = "volume disk is held by alloc other-al"
	job := awaitJob(t, c, "user", func(j Job) bool { return len(j.Allocs) == 1 && j.Allocs[0].Reason == line })
	if list, err := c.Allocs(t.Context()); err != nil || len(list) != 1 || list[0].Reason != line {
		t.Errorf("the list of allocs: %+v, %v", list, err)
	}
	lists := 0
	o := s.Overview(context.WithValue(t.Context(), countKey{}, &lists))
	if o.Missing != nil || lists != 1 || len(o.Jobs) != 1 || o.Jobs[0].Allocs[0].Reason != line {
		t.Errorf("an overview that lists the volumes %d times: %+v", lists, o)
	}
	a, err := c.Alloc(t.Context(), job.Allocs[0].ID)
	must(t, err)
	hasText(t, a.Notices, NoticeWaiting, line, "since 2026-05-04 12:00:00", "INTERNAL: busy", "job stop user")
	hasText(t, a.Notices, NoticeTrouble, "its server is gone", "holdfast job stop --wait user",
		"holdfast job start user")
	v, err := c.Volume(t.Context(), disk)
	must(t, err)
	hasText(t, v.Notices, NoticeWaiting, line)
	hasText(t, v.Notices, NoticeTrouble, "it hangs")
	must(t, c.StopJob(t.Context(), "user", agent.StopOptions{Purge: true}))
}

// hasText checks that a notice of the kind has all texts.
func hasText(t *testing.T, list []Notice, kind NoticeKind, texts ...string) {
	t.Helper()
	for _, n := range list {
		missing := func(text string) bool { return !strings.Contains(format(n), text) }
		if n.Kind == kind && !slices.ContainsFunc(texts, missing) {
			return
		}
	}
	t.Errorf("no %s notice has %q: %+v", kind, texts, list)
}

// format formats a notice as the golden file has it.
func format(n Notice) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s\n", n.Kind, n.Summary)
	for _, f := range append(slices.Clone(n.Facts), Fact{"Meaning", n.Meaning}, Fact{"Next", n.Next}) {
		fmt.Fprintf(&b, "  %s: %s\n", f.Name, f.Text)
	}
	for _, c := range n.Commands {
		fmt.Fprintf(&b, "  %s: %s\n", c.Purpose, c.Line)
	}
	return b.String()
}

// instance returns an active instance of a plugin.
func instance(role registry.Role, alloc host.AllocID, state registry.HealthState) Instance {
	i := Instance{Active: true}
	i.Role, i.Alloc, i.Task = role, alloc, "t"
	i.Health = registry.Health{State: state, Cause: registry.CauseMissed, Since: noon.Add(-time.Hour)}
	return i
}

// noticeCases returns notices of each kind. End-to-end scripts do not reach most of them.
func noticeCases() map[string][]Notice {
	const mine, other = "mine-alloc-1", "other-alloc-2"
	at := func(step registry.Step, rpc registry.RPC) registry.Wait {
		return registry.Wait{Alloc: mine, Request: "data", Volume: disk, Step: step, RPC: rpc, For: "plugin p",
			Since: noon.Add(-75 * time.Second), Advice: "advice of the retry table"}
	}
	failed := at(registry.StepStage, registry.NodeStageRPC)
	failed.Alloc, failed.Code, failed.Detail, failed.Attempt = other, "UNAVAILABLE", "backend is down", 5
	failed.Next = noon.Add(4 * time.Second)
	half := &Plugin{ID: "p", Instances: []Instance{instance("csi-controller", "ctrl-alloc", registry.Healthy),
		instance("csi-node", "node-alloc", registry.Unhealthy)}}
	healthy := func(role registry.Role) *Plugin {
		return &Plugin{ID: "p", Instances: []Instance{instance(role, "some-alloc", registry.Healthy)}}
	}
	starting := &Plugin{ID: "p", Tasks: []host.PluginTask{{TaskKey: registry.TaskKey{Alloc: "a", Task: "t"}, Job: "pj",
		Phase: "starting", Attempt: 3}}}
	restarting := &Plugin{ID: "p", Instances: half.Instances, Tasks: []host.PluginTask{{
		TaskKey: registry.TaskKey{Alloc: "node-alloc", Task: "t"},
		Restart: &registry.RestartRequest{Cause: registry.CauseMissed}}}}
	stopped := &Plugin{ID: "p", Jobs: []PluginJob{{Job: "pj", Status: "stopped"}}}
	nodeOnly := healthy("csi-node")
	nodeOnly.Jobs = []PluginJob{
		{Job: "pc", Alloc: "ctrl-alloc", Task: "c", Type: "controller", Status: "failed", Reason: "exit code 3"},
		{Job: "pn", Alloc: "node-alloc", Task: "n", Type: "node", Status: "running"}}
	detach := registry.Wait{Volume: disk, Step: registry.StepPlugin, Role: registry.RoleController}
	unreachable := registry.Wait{For: "plugin p", RPC: registry.CreateVolumeRPC, Detail: "connection lost", Attempt: 2}
	turn, call := at(registry.StepTurn, ""), &registry.Intent{RPC: registry.DeleteVolumeRPC, Since: noon}
	turn.For = "the deletion"
	namespaced := host.VolumeName{Namespace: "mine", ID: "disk"}

	waits := map[string]wait{
		"the volume is unknown": {Wait: at(registry.StepClaim, ""), job: "j"},
		"three holders": {Wait: at(registry.StepClaim, ""), job: "j", plugin: half, others: []registry.Wait{failed},
			holders: []Holder{{Job: "a", Alloc: other, State: agent.AllocReleasing, Access: "single-node-writer",
				ReadOnly: true, Since: noon}, {Job: "b", Alloc: "2"}, {Job: "j", Alloc: "3"}, {Alloc: "4"}}},
		"a holder on another node": {Wait: at(registry.StepClaim, ""), job: "j", plugin: half,
			holders: []Holder{{Alloc: "2", Node: "node-2", Access: "single-node-writer", Since: noon}}},
		"no holder is known":            {Wait: at(registry.StepClaim, ""), job: "j", plugin: half},
		"a claim is not released":       {Wait: at(registry.StepClaim, ""), leaving: true, job: "j"},
		"the plugin is unknown":         {Wait: at(registry.StepPlugin, ""), job: "j"},
		"the plugin is not running":     {Wait: at(registry.StepPlugin, ""), leaving: true, job: "j", plugin: stopped},
		"the plugin starts":             {Wait: at(registry.StepPlugin, ""), job: "j", plugin: starting},
		"the plugin is unhealthy":       {Wait: at(registry.StepPlugin, ""), job: "j", plugin: half},
		"the plugin is to be restarted": {Wait: at(registry.StepPlugin, ""), job: "j", plugin: restarting},
		"the plugin lacks the role": {Wait: at(registry.StepPlugin, ""), job: "j",
			plugin: healthy("csi-controller")},
		"the plugin is healthy again":   {Wait: at(registry.StepPlugin, ""), job: "j", plugin: healthy("csi-node")},
		"a detach without a controller": {Wait: detach, leaving: true, plugin: nodeOnly},
		"another alloc's operation":     {Wait: at(registry.StepTurn, ""), job: "j", others: []registry.Wait{failed}},
		"another operation":             {Wait: turn, job: "j", open: call},
		"a failed call":                 {Wait: failed, job: "j", plugin: healthy("csi-node")},
		"a call of an unhealthy plugin": {Wait: at(registry.StepStage, registry.NodeStageRPC), job: "j", plugin: half},
		"a controller's call":           {Wait: at(registry.StepAttach, registry.ControllerPublishRPC), plugin: half},
		"an unmount that changed nothing": {
			Wait: at(registry.StepUnstage, registry.NodeUnstageRPC), leaving: true, mounted: "/mnt"},
		"a creation":   {Wait: unreachable},
		"a deletion":   {Wait: registry.Wait{Volume: namespaced, RPC: registry.DeleteVolumeRPC}},
		"an expansion": {Wait: registry.Wait{Volume: namespaced, RPC: registry.ControllerExpandRPC}},
	}
	out := map[string][]Notice{}
	for name, w := range waits {
		out[name] = []Notice{(&explainer{}).explainWait(w)}
	}
	claim := registry.Claim{Name: disk, Volume: registry.VolumeKey{Plugin: "p"}, Alloc: mine, Request: "data"}
	out["a dead mount"] = []Notice{mountTrouble(
		registry.Holder{Claim: claim, Trouble: "its server is gone", Troubled: noon}, "j")}
	out["holders without a wait"] = heldNotices(namespaced, []Holder{
		{Job: "a", Alloc: other, State: agent.AllocReleasing},
		{Job: "b", Alloc: "2"}, {Job: "b", Alloc: "3"}, {Alloc: "4", Node: "node-2"}, {Alloc: "5"},
		{Alloc: "6", Engines: []EngineUse{{Engine: "docker"}, {Engine: "podman"}}}})
	half9, asked := registry.CapacityRange{Required: 9}, registry.Expansion{Asked: registry.CapacityRange{Required: 9}}
	open := asked
	open.RPC, open.Code, open.Detail = registry.ControllerExpandRPC, "INTERNAL", "no"
	for name, e := range map[string]registry.Expansion{
		"an expansion that is done":          {Done: 9},
		"an expansion that runs":             asked,
		"an uncertain expansion":             open,
		"a pending expansion":                {Node: half9},
		"a refused expansion":                {Node: half9, Refused: "INTERNAL", RPC: registry.NodeExpandRPC},
		"an expansion refused while mounted": {Node: half9, Refused: "FAILED_PRECONDITION"},
	} {
		out[name] = expansionNotices(namespaced, e)
	}
	out["an uncertain modification"] = modificationNotices(host.VolumeStatus{Volume: registry.Volume{
		VolumeSpec: registry.VolumeSpec{Namespace: namespaced.Namespace, ID: namespaced.ID},
		Modification: registry.Modification{Asked: map[string]string{"tier": "gold", "apiToken": registry.Masked},
			Code: "INTERNAL", Detail: "no", Since: noon}}})
	sick := registry.VolumeHealth{Node: registry.Condition{Abnormal: true, Reason: "DATA_LOSS/DiskFailed",
		Message: "disk is failing", Since: noon}}
	out["an unhealthy volume"] = healthNotices(disk, "p", sick)
	addNodeCases(out)
	return out
}

// addNodeCases adds notices about the nodes of a cluster.
func addNodeCases(out map[string][]Notice) {
	node := func(name host.NodeName, state registry.NodeState, alive bool) host.NodeStatus {
		return host.NodeStatus{Node: registry.Node{Name: name, State: state}, Alive: alive}
	}
	v := host.VolumeStatus{Volume: registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "mine", ID: "disk",
		Plugin: "p"}}}
	stored := v
	stored.Node = "a"
	claims := []host.Claim{{Name: v.VolumeName(), Alloc: "mine-alloc-1", Node: "a", Since: noon}}
	for name, c := range map[string]struct {
		node   host.NodeStatus
		volume host.VolumeStatus
	}{
		"a suspect node":                       {node("a", registry.NodeReady, false), v},
		"a node that is out of service":        {node("a", registry.NodeOutOfService, false), v},
		"a fenced node":                        {node("a", registry.NodeFenced, false), v},
		"a fenced node that is back":           {node("a", registry.NodeFenced, true), v},
		"a node out of service, with the data": {node("a", registry.NodeOutOfService, false), stored},
	} {
		out["the claim of "+name] = []Notice{*lostHolder(c.node, c.volume, claims)}
	}
	// With controller_scope = "node", the volume waits for its own node, even if others have healthy controllers.
	other := node("b", registry.NodeReady, true)
	out["no executor"] = []Notice{noExecutor(v, []host.NodeStatus{other})}
	for _, state := range []registry.NodeState{registry.NodeReady, registry.NodeOutOfService} {
		out["no executor at the node of the volume, "+string(state)] = []Notice{
			noExecutor(stored, []host.NodeStatus{other, node("a", state, false)})}
	}
}

func TestNoticesMatchTheGoldenFile(t *testing.T) {
	defer func(clock func() time.Time) { now = clock }(now)
	now = func() time.Time { return noon }
	var text strings.Builder
	cases := noticeCases()
	for _, name := range slices.Sorted(maps.Keys(cases)) {
		fmt.Fprintf(&text, "# %s\n", name)
		for _, n := range cases[name] {
			text.WriteString(format(n))
		}
		text.WriteString("\n")
	}
	const path = "testdata/notices.want"
	if *update {
		must(t, os.WriteFile(path, []byte(text.String()), 0o644))
	}
	want, err := os.ReadFile(path)
	must(t, err)
	if text.String() != string(want) {
		t.Errorf("the notices are\n%s\nwant\n%s", text.String(), want)
	}
}

// A creation or deletion without a running call is explained. While a call runs, that call is shown instead.
func TestUncertainVolumeSaysWhyAndWhatToDo(t *testing.T) {
	for state, f := range map[registry.VolumeState]registry.Failure{
		registry.VolumeUncertain: {RPC: registry.CreateVolumeRPC, Code: "INTERNAL", Detail: "no"},
		registry.VolumeDeleting:  {RPC: registry.DeleteVolumeRPC, Code: "FAILED_PRECONDITION", Detail: "snapshots"},
		registry.VolumeReady:     {},
	} {
		v := host.VolumeStatus{Volume: registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "ns", ID: "v"},
			State: state, Failure: f}}
		list := append(creationNotices(v), deletionNotices(v)...)
		if state != registry.VolumeReady {
			hasText(t, list, list[0].Kind, f.Code+": "+f.Detail, "holdfast volume deregister --namespace=ns v",
				"holdfast volume delete --namespace=ns v")
		} else if list != nil {
			t.Errorf("of a volume that is ready: %+v", list)
		}
		v.Intent = &registry.Intent{RPC: f.RPC}
		if list := append(creationNotices(v), deletionNotices(v)...); list != nil {
			t.Errorf("%s, with a running call: %+v", state, list)
		}
	}
}
