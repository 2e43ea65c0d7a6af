package e2e

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
)

// executing is a node and its plugin.
type executing struct {
	*env
	plugin *pluginTask
}

// TestNextExecutorRepeatsTheCall kills the executor's shim during a call, before or after the call takes effect, while
// its plugin still handles the call. The plugin of the next executor answers the same call. A different call for the
// volume is sent only when the former executor's shim is back and its plugin has answered too. Then the nodes change
// roles.
func TestNextExecutorRepeatsTheCall(t *testing.T) {
	t.Parallel()
	caps := []string{"CREATE_DELETE_SNAPSHOT", "EXPAND_VOLUME"}
	nodes := newCluster(t, 2, nil, slices.Concat(allCaps, groupCaps, caps)...)
	rpcs := []string{"CreateVolume", "ControllerUnpublishVolume", "CreateSnapshot"}
	if !testing.Short() { // six seconds each
		rpcs = append(rpcs, "ControllerPublishVolume", "ControllerExpandVolume", "DeleteVolume", "DeleteSnapshot",
			"CreateVolumeGroupSnapshot", "DeleteVolumeGroupSnapshot")
	}
	var both []*executing
	file := t.TempDir() + "/backend"
	for i, e := range nodes {
		e.backend = csifake.NewBackend(file) // of its own, so that no plugin knows what runs at the other one
		both = append(both, &executing{e, e.addPlugin("plugin-"+string(e.config.Node), csifake.Monolith)})
		if i == 0 { // then its node is the executor
			e.must(e.create("first"))
			e.must(e.delete("first"))
		}
	}
	former, next := both[0], both[1]
	for i, rpc := range rpcs {
		moment := []string{"before", "after"}[i%2]
		t.Logf("%s killed %s %s", former.config.Node, moment, rpc)
		takeOver(t, former, next, rpc, moment)
		former, next = next, former
	}
	for _, v := range csifake.Check(nodes[0].journal, journal.Options{Settled: true, Strict: true, ByNode: true}) {
		if v.Rule == "R3" && !strings.HasPrefix(v.Text, "Node") { // nodes use what the next executor has attached
			t.Error(v)
		}
	}
	for _, x := range both {
		x.stopPlugin(x.plugin)
	}
}

// takeOver kills the host of the executor during a call and lets the next one take over.
func takeOver(t *testing.T, former, next *executing, rpc, moment string) {
	volume := "vol-" + strings.ToLower(rpc) + "-" + moment
	snapshot := host.SnapshotSpec{Namespace: "default", ID: host.SnapshotID("snap-" + moment),
		Volume: host.VolumeID(volume)}
	group := snapshot
	group.Volume, group.Volumes = "", []host.VolumeID{snapshot.Volume}
	name := host.VolumeName{Namespace: "default", ID: snapshot.Volume}
	steps := map[string]func() error{
		"CreateVolume": func() error { return next.create(volume) },
		"ControllerPublishVolume": func() error {
			return errOf(next.prepare(next.group("user", request{source: volume})))
		},
		"ControllerExpandVolume": func() error {
			return errOf(next.host.ExpandVolume(next.ctx(), name, host.CapacityRange{Required: 2 << 30}))
		},
		"ControllerUnpublishVolume": func() error { return next.release("user") },
		"DeleteVolume":              func() error { return next.delete(volume) },
		"CreateSnapshot":            func() error { return errOf(next.host.CreateSnapshot(next.ctx(), snapshot)) },
		"DeleteSnapshot": func() error {
			return next.host.DeleteSnapshot(next.ctx(), snapshot.SnapshotName())
		},
		"CreateVolumeGroupSnapshot": func() error { return errOf(next.host.CreateGroupSnapshot(next.ctx(), group)) },
		"DeleteVolumeGroupSnapshot": func() error {
			return next.host.DeleteGroupSnapshot(next.ctx(), group.SnapshotName())
		},
	}
	order := []string{"CreateVolume", "ControllerPublishVolume", "ControllerExpandVolume", "ControllerUnpublishVolume",
		"DeleteVolume", "CreateVolume", "DeleteVolume"}
	if kind, is := strings.CutSuffix(rpc, "Snapshot"); is {
		of := strings.TrimPrefix(strings.TrimPrefix(kind, "Create"), "Delete") + "Snapshot"
		order = []string{"CreateVolume", "Create" + of, "Delete" + of, "Create" + of, "Delete" + of, "DeleteVolume"}
	}
	at := slices.Index(order, rpc)
	for _, step := range order[:at] {
		next.must(steps[step]())
	}
	on := former.plugin.On(rpc)
	if moment == "after" {
		on = on.After()
	}
	gate := on.Hold()
	done := background(steps[rpc])
	next.waitHeld(gate, done)
	next.must(former.host.Close())
	next.must(next.result(rpc+" at the next executor", done))

	another, before := order[at+1], len(next.calls())
	after := background(steps[another])
	former.config.Workload = host.Workload{Tasks: []host.WorkloadTask{former.running(former.plugin.task)}}
	former.open()
	former.waitUntil("the former executor repeats "+rpc, func() bool {
		return slices.ContainsFunc(next.calls()[before:], func(c journal.Call) bool {
			return c.RPC == rpc && c.Instance == string(former.plugin.task.Alloc)
		})
	})
	if slices.ContainsFunc(next.calls()[before:], func(c journal.Call) bool { return c.RPC == another }) {
		t.Errorf("%s was sent while %s runs at node %s", another, rpc, former.config.Node)
	}
	gate.Open()
	former.plugin.ClearScript()
	former.waitUntil("node "+string(former.config.Node)+" has handed over", func() bool {
		err := next.result(another, after)
		if err != nil && errors.Is(err, registry.ErrUnavailable) &&
			strings.Contains(err.Error(), string(former.config.Node)) {
			after = background(steps[another])
			return false
		}
		next.must(err)
		return true
	})
	for _, step := range order[at+2:] {
		next.must(steps[step]())
	}
}

// TestNextExecutorEndsCallsWithoutACaller kills the executor, with its caller, during a creation and a deletion. The
// next executor ends them.
func TestNextExecutorEndsCallsWithoutACaller(t *testing.T) {
	t.Parallel()
	nodes := newCluster(t, 2, nil, allCaps...)
	former, next := nodes[0], nodes[1]
	pluginOf := map[*env]*pluginTask{former: former.addPlugin("plugin-1", csifake.Monolith)}
	former.must(former.create("old"))
	pluginOf[next] = next.addPlugin("plugin-2", csifake.Monolith)
	for _, c := range []struct {
		rpc, volume string
		begin       func(*env) error
		want        map[string]string
	}{
		{"CreateVolume", "new", func(e *env) error { return e.create("new") },
			map[string]string{"old": "ready", "new": "ready"}},
		{"DeleteVolume", "old", func(e *env) error { return e.delete("old") }, map[string]string{"new": "ready"}},
	} {
		gate := pluginOf[former].On(c.rpc).Hold()
		done := background(func() error { return c.begin(former) })
		former.waitHeld(gate, done)
		former.must(former.host.Close())
		<-done
		gate.Open()
		pluginOf[former].ClearScript()
		next.waitUntil("the next executor ends "+c.rpc, func() bool { return maps.Equal(next.volumeStates(), c.want) })
		former.config.Workload = host.Workload{Tasks: []host.WorkloadTask{former.running(pluginOf[former].task)}}
		former.open()
		former, next = next, former
	}
	former.must(former.delete("new"))
	for _, e := range nodes {
		e.stopPlugin(pluginOf[e])
	}
}

// TestInterruptedAttachIsSettled kills the executor's shim in the middle of an attach for one node while another node
// waits to attach the same volume. Whichever call the next shim carries out first, both nodes get the volume.
func TestInterruptedAttachIsSettled(t *testing.T) {
	t.Parallel()
	nodes := newCluster(t, 3, nil, allCaps...)
	a := nodes[0]
	plugins := []*pluginTask{a.addPlugin("plugin-node-1", csifake.Monolith)}
	for _, e := range nodes[1:] {
		plugins = append(plugins, e.addPlugin("plugin-"+string(e.config.Node), csifake.Node))
	}
	a.must(a.create("vol"))
	for range 3 {
		gate := plugins[0].On("ControllerPublishVolume").Times(1).After().Hold()
		first, second := nodes[1], nodes[2]
		attach := func(e *env) <-chan error {
			return background(func() error {
				return errOf(e.prepare(e.group("user-"+string(e.config.Node),
					request{source: "vol", mode: manyWriters})))
			})
		}
		held := attach(first)
		a.waitHeld(gate, held)
		waits := attach(second)
		a.waitUntil("both ask for the attach", func() bool { return len(a.claims()) == 2 })
		a.killShim()
		gate.Open()
		for _, done := range []<-chan error{held, waits} {
			a.must(a.result("attach", done))
		}
		for _, e := range nodes[1:] {
			e.must(e.release("user-" + string(e.config.Node)))
		}
	}
	a.must(a.delete("vol"))
	for i, e := range nodes {
		e.stopPlugin(plugins[i])
	}
}

// TestOpenAttachIsSettledForAnotherNode loses the executor during an attach for a node that cannot take over, and
// releases the alloc there. The next executor repeats the attach, and detaches the volume once the first one is back.
func TestOpenAttachIsSettledForAnotherNode(t *testing.T) {
	t.Parallel()
	nodes := newCluster(t, 3, nil, allCaps...)
	a, b, c := nodes[0], nodes[1], nodes[2]
	pa := a.addPlugin("plugin-a", csifake.Monolith)
	pb, pc := b.addPlugin("plugin-b", csifake.Node), c.addPlugin("plugin-c", csifake.Monolith)
	a.must(a.create("vol"))
	b.waitUntil("the volume is known", func() bool { return len(b.volumeStates()) == 1 })
	user := b.group("user", request{source: "vol"})
	gate := pa.On("ControllerPublishVolume").Times(1).After().Hold()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	used := background(func() error { return errOf(b.prepareAll(ctx, user)) })
	a.waitHeld(gate, used)
	a.must(a.host.Close())
	cancel()
	<-used
	gate.Open()
	released := background(func() error { return b.release("user") })
	c.waitUntil("the next executor settles the attach", func() bool {
		return slices.ContainsFunc(c.calls("ControllerPublishVolume"), func(call journal.Call) bool {
			return call.Instance == "plugin-c" && codeOf(call) == "OK"
		})
	})
	a.config.Workload = host.Workload{Tasks: []host.WorkloadTask{a.running(pa.task)}}
	a.open()
	b.must(b.result("the release", released))
	if last := c.calls("ControllerUnpublishVolume"); len(last) != 1 || codeOf(last[0]) != "OK" || len(b.claims()) > 0 {
		t.Errorf("detached by %q, claims %v", answers(last), b.claims())
	}
	b.must(b.delete("vol"))
	c.stopPlugin(pc)
	b.stopPlugin(pb)
	a.stopPlugin(pa)
}

// TestVolumesOfANode uses a plugin that keeps its volumes on its node. Each node makes the calls for its own.
func TestVolumesOfANode(t *testing.T) {
	t.Parallel()
	nodes := newCluster(t, 2, nil, allCaps...)
	var plugins []*pluginTask
	for _, e := range nodes {
		e.pluginBlocks = "controller_scope = \"node\"\n"
		e.backend = csifake.NewBackend("")
		plugins = append(plugins, e.addPlugin("plugin-"+string(e.config.Node), csifake.Monolith))
	}
	a, b := nodes[0], nodes[1]
	a.waitUntil("node-2 has registered", func() bool {
		all, _, err := a.host.Nodes(a.ctx(), host.NodeQuery{})
		return err == nil && len(all) == 2
	})
	a.must(a.create("vol-a"))
	a.must(a.createWith(a.ctx(), "vol-b", "node = \"node-2\"\n"))
	a.use("user-a", request{source: "vol-a"})
	_, err := a.prepare(a.group("user-b", request{source: "vol-b"}))
	a.wantWords("a claim of another node's volume", err, "vol-b", "node-2")
	b.use("user-b", request{source: "vol-b"})
	for _, c := range a.calls("CreateVolume") {
		if want := map[string]string{"vol-a": "plugin-node-1", "vol-b": "plugin-node-2"}[c.Name]; c.Instance != want {
			t.Errorf("%s was made by %s, not by %s", c.Name, c.Instance, want)
		}
	}
	a.must(a.release("user-a"))
	b.must(b.release("user-b"))
	b.must(b.delete("vol-a"))
	a.must(a.delete("vol-b"))
	for i, e := range nodes {
		e.stopPlugin(plugins[i])
	}
}

// TestVolumesOfALostNode loses a node whose plugin keeps its volumes there, with two of them in use. Out of service,
// their claims are released without a call. One volume is deregistered. The node is back, unmounts both, and detaches
// the other. The plugin detaches the deregistered one after its next use.
func TestVolumesOfALostNode(t *testing.T) {
	t.Parallel()
	nodes := newCluster(t, 2, nil, allCaps...)
	a, b := nodes[0], nodes[1]
	for _, e := range nodes {
		e.pluginBlocks = "controller_scope = \"node\"\n"
		e.backend = csifake.NewBackend("")
	}
	pb := b.addPlugin("plugin-b", csifake.Monolith)
	b.must(b.create("kept"))
	b.must(b.create("forsaken"))
	user := b.group("user", request{source: "kept"}, request{name: "other", source: "forsaken"})
	b.must(errOf(b.prepare(user)))
	b.lose()
	a.must(journal.NoteReboot(a.journal, "csifake.example.org", b.nodeID)) // its machine has lost its power
	a.waitEvent(func(e host.Event) bool { return e.Kind == host.EventKind("node suspect") && e.Node == "node-2" })
	a.must(errOf(a.host.NodeOutOfService(a.ctx(), "node-2",
		host.OutOfServiceOptions{By: "alice", Reason: "it burns", Confirm: "node-2"})))
	before := len(a.calls())
	a.waitUntil("the claims are released", func() bool { return len(a.claims()) == 0 })
	list, _, err := a.host.Volumes(a.ctx(), host.VolumeQuery{Name: volumeName("forsaken")})
	a.must(err)
	a.must(a.host.DeregisterVolume(a.ctx(), volumeName("forsaken")))
	a.waitEvent(func(e host.Event) bool {
		return e.Kind == host.EventKind("abandoned") && strings.Contains(e.Detail, "out-of-service by alice")
	})
	a.wantConflict(a.host.ForgetNode(a.ctx(), "node-2", host.ForgetOptions{By: "alice"}), "volume kept")
	a.wantCalls(before)

	b.reopen([]*pluginTask{pb}, user)
	b.waitEvent(func(e host.Event) bool { return e.Kind == host.EventKind("volumes lost") && e.Alloc == "user" })
	b.must(b.release("user"))
	b.waitUntil("the node is ready", func() bool {
		list, _, err := b.host.Nodes(b.ctx(), host.NodeQuery{Node: "node-2"})
		return err == nil && len(list) == 1 && list[0].State == host.NodeReady
	})
	got := answers(a.calls()[before:])
	slices.Sort(got)
	if want := []string{"ControllerUnpublishVolume OK", "NodeUnpublishVolume OK", "NodeUnpublishVolume OK",
		"NodeUnstageVolume OK", "NodeUnstageVolume OK"}; !slices.Equal(got, want) {
		t.Errorf("the node that is back made the calls %q", got)
	}
	b.must(errOf(b.host.RegisterVolume(b.ctx(), list[0].VolumeSpec))) // its plugin has it attached
	b.use("again", request{source: "forsaken"})
	b.must(b.release("again"))
	b.must(b.delete("forsaken"))
	b.must(b.delete("kept"))
	b.stopPlugin(pb)
}

// TestNoSecretInEtcd creates, attaches and snapshots a volume with a secret, and looks for its text in all that etcd
// has had. The value itself is refused in a spec.
func TestNoSecretInEtcd(t *testing.T) {
	nodes := newCluster(t, 2, nil, slices.Concat(allCaps, []string{"CREATE_DELETE_SNAPSHOT"})...)
	a, b := nodes[0], nodes[1]
	pa := a.addPlugin("plugin-a", csifake.Monolith)
	pb := b.addPlugin("plugin-b", csifake.Node)
	const text = "a-very-secret-text"
	client := a.etcd()
	watch := client.Watch(clientv3.WithRequireLeader(t.Context()), "", clientv3.WithPrefix(), clientv3.WithRev(1))
	t.Setenv("CLUSTER_SECRET", text)
	err := b.createWith(b.ctx(), "literal", "secrets {\n password = \""+text+"\"\n}\n")
	b.wantWords("a secret as a value", err, "password", "env", "file", "callback")
	path := a.dir + "/secret"
	a.writeFile(a.dir, "secret", text)
	b.must(b.createWith(b.ctx(), "vol", "secrets {\n password = { file = \""+path+"\" }\n}\n"))
	b.use("user", request{source: "vol"})
	b.must(errOf(b.host.CreateSnapshot(b.ctx(), host.SnapshotSpec{Namespace: "default", ID: "snap", Volume: "vol"})))
	b.must(b.host.DeleteSnapshot(b.ctx(), host.SnapshotName{Namespace: "default", ID: "snap"}))
	b.must(b.release("user"))
	b.must(b.delete("vol"))
	b.stopPlugin(pb)
	a.stopPlugin(pa)
	end, err := client.Get(t.Context(), "x")
	b.must(err)
	for answer := range watch {
		for _, e := range answer.Events {
			if strings.Contains(string(e.Kv.Key)+string(e.Kv.Value), text) {
				t.Errorf("etcd key %s has the secret: %s", e.Kv.Key, e.Kv.Value)
			}
		}
		if answer.Header.Revision >= end.Header.Revision {
			break
		}
	}
}
