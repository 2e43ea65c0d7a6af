package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// env is a node with one plugin and one shim, all in memory. The records outlive the shim, and the storage system
// outlives the plugin. It lives in a synctest bubble.
type env struct {
	t       *testing.T
	log     *registrytest.Log
	storage *csifake.Backend
	journal *journal.Memory
	seen    int // number of journaled calls that calls has returned
	caps    []string
	spec    string // CSI version on which the plugin is built; empty: any
	machine *machine
	dir     string // of suspensions
	forgets bool   // a killed plugin has lost its state when it starts again
	secrets intent.Secrets
	plugin  atomic.Pointer[fake] // the newest process
	sockets sync.Map             // path of a socket -> *fake, the process that listens there
	task    registry.TaskKey     // of the newest process
	shim    *shim
	allocs  sync.WaitGroup // requests that run in the background
	starts  int            // of plugins

	mu       sync.Mutex
	requests map[string]proto.Message // the last one of each RPC
}

const (
	pluginID = registry.PluginID("p")
	nodeName = registry.NodeName("node-1")
	gib      = int64(1) << 30
)

var layout = hooks.Layout{Run: "/run/h", State: "/var/lib/h"}

// Capabilities of plugins.
const (
	attaches  = "PUBLISH_UNPUBLISH_VOLUME "
	stages    = "STAGE_UNSTAGE_VOLUME "
	expands   = "EXPAND_VOLUME expansion/ONLINE "
	measures  = "node/GET_VOLUME_STATS "
	snapshots = "CREATE_DELETE_SNAPSHOT "
	groups    = "GROUP_CONTROLLER_SERVICE CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT "
	reports   = measures + "VOLUME_CONDITION " // CSI up to 1.12
	// CSI 1.13
	reportsOnNode   = "node/GET_VOLUME_HEALTH "
	reportsLists    = "controller/GET_VOLUME_HEALTH LIST_VOLUME_HEALTH "
	reportsStorages = "GET_STORAGE_HEALTH "
)

func newEnv(t *testing.T, caps string) *env {
	storage := csifake.NewBackend("")
	n := &env{
		t: t, log: registrytest.NewLog(time.Now), storage: storage, journal: &journal.Memory{},
		caps: append(strings.Fields(caps), "LIST_VOLUMES"), machine: newMachine(t, storage),
		task: registry.TaskKey{Alloc: "plugin", Task: "p"}, secrets: noSecrets{}, requests: map[string]proto.Message{},
		dir: t.TempDir(),
	}
	for i := range 3 {
		n.put(n.volume(i, fmt.Sprintf("x-v%d", i)))
	}
	return n
}

// inEnv runs f with a started env. Afterwards it releases all volumes, and checks that nothing is left and that the
// journal is legal.
func inEnv(t *testing.T, caps string, f func(t *testing.T, n *env)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := newEnv(t, caps)
		n.start()
		f(t, n)
		n.settle()
		n.judge()
	})
}

func (n *env) start() {
	n.startPlugin()
	n.startShim()
	n.introduce()
}

func (n *env) volume(i int, external string) registry.Volume {
	return registry.Volume{VolumeSpec: registry.VolumeSpec{
		Namespace: "default", ID: registry.VolumeID(fmt.Sprintf("v%d", i)), Plugin: pluginID,
		External: registry.ExternalID(external), Secrets: map[string]registry.Secret{"token": {Env: "TOKEN"}},
		Capabilities: []registry.VolumeCapability{{Access: accessOf(i), Attachment: registry.FileSystem},
			{Access: accessOf(i), Attachment: registry.BlockDevice}},
	}, State: registry.VolumeReady}
}

// accessOf returns the access mode of a volume. Only the last volume is limited to one alloc at a time.
func accessOf(volume int) registry.AccessMode {
	if volume == 2 {
		return registry.SingleNodeWriter
	}
	return registry.MultiNodeMultiWriter
}

var (
	tree        = registry.Tree{Host: layout.PluginRoot(pluginID), Task: "/csi"}
	v0          = registry.VolumeKey{Plugin: pluginID, External: "x-v0"}
	v0Name      = registry.VolumeName{Namespace: "default", ID: "v0"}
	stagingPath = layout.Staging(v0, tree).Host
)

const (
	attach       = registry.ControllerPublishRPC
	detach       = registry.ControllerUnpublishRPC
	stage        = registry.NodeStageRPC
	unstage      = registry.NodeUnstageRPC
	publish      = registry.NodePublishRPC
	unpublish    = registry.NodeUnpublishRPC
	expand       = registry.ControllerExpandRPC
	expandOnNode = registry.NodeExpandRPC
)

// claimOf returns the key of the claim of volume v0 by an alloc.
func claimOf(alloc registry.AllocID) registry.ClaimKey {
	return registry.ClaimKey{Volume: v0, Alloc: alloc, Request: "v0"}
}

// targetOf returns the host path at which volume v0 is published for an alloc.
func targetOf(alloc registry.AllocID) string { return layout.Target(claimOf(alloc), tree).Host }

func (n *env) put(records ...registry.Record) { n.commit(registry.Change{Put: records}) }

func (n *env) commit(c registry.Change) {
	if _, err := registrytest.Write(context.Background(), n.log, c); err != nil {
		n.t.Fatal(err)
	}
}

// decide commits the change that decide returns.
func (n *env) decide(decide func(registry.View) registry.Change) {
	_, err := n.log.Commit(context.Background(), func(v registry.View) (registry.Change, error) {
		return decide(v), nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
}

func (n *env) view(read func(registry.View)) {
	err := n.log.View(context.Background(), func(v registry.View) error { read(v); return nil })
	if err != nil {
		n.t.Fatal(err)
	}
}

// fake is one process of the plugin, and the socket at which it listens.
type fake struct {
	*csifake.Plugin
	ended    chan struct{}
	listener *bufconn.Listener
}

// startPlugin starts the plugin's next process.
func (n *env) startPlugin() {
	n.starts++
	before, listener := n.machine.held(), bufconn.Listen(1<<16)
	p, err := csifake.New(csifake.Config{
		Listener: listener, Intercept: n.intercept, Memory: n.journal, Backend: n.storage, Blind: true,
		AnyVolume: true, Caps: n.caps, Spec: n.spec, Instance: fmt.Sprintf("p-%d", n.starts), Forgetful: n.forgets,
		PublishContext: map[string]string{"device": "/dev/x"},
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.machine.forgotten(before)
	f := &fake{Plugin: p, ended: make(chan struct{}), listener: listener}
	go func() {
		_ = p.Run(context.Background())
		close(f.ended)
	}()
	n.plugin.Store(f)
	n.sockets.Store(n.socket(), f)
}

// socket returns the path of the socket of the newest process. A task keeps its socket.
func (n *env) socket() string { return "/run/" + string(n.task.Alloc) }

// end stops or kills the process.
func (f *fake) end(killed bool) {
	if killed {
		f.Kill()
	} else {
		f.Stop()
	}
	<-f.ended
}

// restartPlugin ends the plugin and starts its next process with the capabilities.
func (n *env) restartPlugin(caps string) {
	n.plugin.Load().end(false)
	n.caps = append(strings.Fields(caps), "LIST_VOLUMES")
	n.startPlugin()
	n.introduce()
}

// intercept records the request, and keeps the machine's view of the mounts up to date.
func (n *env) intercept(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler,
) (any, error) {
	n.mu.Lock()
	n.requests[path.Base(info.FullMethod)] = req.(proto.Message)
	n.mu.Unlock()
	if r, ok := req.(*spec.NodeUnpublishVolumeRequest); ok {
		n.machine.checkNoParts(r.GetTargetPath())
	}
	reply, err := next(ctx, req)
	if err != nil {
		return nil, err
	}
	switch r := req.(type) {
	case *spec.NodeStageVolumeRequest:
		n.machine.mountedAgain(r.GetStagingTargetPath())
	case *spec.NodePublishVolumeRequest:
		n.machine.mountedAgain(r.GetTargetPath())
	}
	return reply, nil
}

// lastRequest returns the last request of an RPC.
func lastRequest[M proto.Message](n *env, rpc registry.RPC) M {
	n.mu.Lock()
	defer n.mu.Unlock()
	r, ok := n.requests[string(rpc)].(M)
	if !ok {
		n.t.Errorf("the plugin got no %s", rpc)
	}
	return r
}

// shim is one process of the shim, without its sockets and its disk.
type shim struct {
	table     *registry.Registry
	fleet     *csi.Fleet
	volumes   *controller.Controller
	snapshots *controller.Snapshots
	stager    *Stager
	allocs    *Allocs
	cancel    context.CancelCauseFunc
	ctx       context.Context
	loops     sync.WaitGroup
}

var errShimEnds = errors.New("the shim ends")

// startShim starts the next shim on the records that the last one left.
func (n *env) startShim() {
	s := &shim{table: registry.New(n.log)}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	n.log.OnApplied(s.table.Applied)
	if err := s.table.Load(s.ctx); err != nil {
		n.t.Fatal(err)
	}
	s.fleet = csi.NewDialing(s.table, func(ctx context.Context, socket string) (net.Conn, error) {
		f, found := n.sockets.Load(socket)
		if !found {
			return nil, fs.ErrNotExist
		}
		return f.(*fake).listener.DialContext(ctx)
	})
	calls := intent.Calls{
		Sender:  intent.Sender{State: n.log, Now: time.Now, Drain: intent.DrainTime},
		Plugins: s.table, Secrets: n.secrets, Locks: &intent.Locks{},
	}
	s.stager = NewStager(calls, s.fleet, n.machine, Options{Layout: layout, Node: nodeName,
		Suspended: csi.NewSuspensions(n.dir), Logger: hclog.NewNullLogger()})
	s.volumes = controller.New(calls, s.fleet, s.stager, hclog.NewNullLogger())
	s.allocs = NewAllocs(calls, s.volumes, s.stager, Host{Node: nodeName, Operations: hooks.Operations},
		hclog.NewNullLogger())
	s.loops.Go(func() { _ = s.allocs.Run(s.ctx) })
	s.snapshots = controller.NewSnapshots(s.volumes, s.fleet)
	s.loops.Go(func() { _ = s.volumes.Run(s.ctx) })
	s.loops.Go(func() { _ = s.snapshots.Run(s.ctx) })
	s.loops.Go(func() { _ = s.stager.WatchHealth(s.ctx) })
	health := controller.NewHealth(calls, s.fleet, s.stager.Suspended, hclog.NewNullLogger())
	s.loops.Go(func() { _ = health.Run(s.ctx) })
	n.shim = s
}

// crash ends the shim as SIGKILL does, as far as its plugin can see: its calls are cut off, and it writes nothing more.
func (n *env) crash() {
	n.shim.cancel(errShimEnds)
	dead := n.log
	n.log = dead.Reopen() // what the dead shim still writes is not read any more
	n.shim.fleet.CloseAll()
	n.shim.loops.Wait()
}

// restart kills the shim and starts the next one.
func (n *env) restart() {
	n.crash()
	n.startShim()
	n.introduce()
}

// reboot restarts the node: all processes have ended, and nothing is mounted.
func (n *env) reboot() {
	n.crash()
	n.plugin.Load().end(true)
	n.journal.NoteReboot("csifake.example.org", string(nodeName))
	if err := n.storage.Reboot(string(nodeName)); err != nil {
		n.t.Fatal(err)
	}
	n.machine.reboot()
	n.start()
}

// introduce makes the plugin describe itself, and registers it as healthy. If the plugin crashes meanwhile, introduce
// starts it again.
func (n *env) introduce() {
	task, at := n.task, registry.Endpoint{Host: n.socket()}
	conn, err := n.shim.fleet.Connect(pluginID, task, at)
	if err != nil {
		n.t.Fatal(err)
	}
	roles := []registry.Role{registry.RoleController, registry.RoleNode}
	var found map[registry.Role]registry.Fingerprint
	for found == nil {
		select {
		case <-n.plugin.Load().ended:
			n.startPlugin()
		default:
		}
		if found, err = conn.Describe(context.Background(), roles); err != nil {
			time.Sleep(time.Second)
		}
	}
	for _, role := range roles {
		n.decide(func(v registry.View) registry.Change {
			return registry.PutChange(v, time.Now(), registry.Instance{
				InstanceKey: registry.InstanceKey{Role: role, Plugin: pluginID, Alloc: task.Alloc, Task: task.Task},
				Attempt:     uint64(n.starts), Endpoint: at, Volumes: tree, Fingerprint: found[role],
				Health: registry.Health{State: registry.Healthy, Cause: registry.CauseProbed},
			})
		})
	}
}

// removePlugin deregisters the plugin's instances, as the end of its task does.
func (n *env) removePlugin() { n.removeTask(n.task) }

func (n *env) removeTask(task registry.TaskKey) {
	n.decide(func(v registry.View) registry.Change { return registry.RemoveTaskChange(v, time.Now(), task) })
}

// script installs rules. Without rules it removes all installed rules.
func (n *env) script(rules ...csifake.Rule) {
	if len(rules) == 0 {
		n.plugin.Load().ClearScript()
	}
	if err := n.plugin.Load().Script(rules...); err != nil {
		n.t.Fatal(err)
	}
}

// fails makes every call of an RPC fail with a code, before it takes effect.
func (n *env) fails(rpc registry.RPC, code string) {
	n.script(csifake.Rule{RPC: string(rpc), When: csifake.Before, Code: code})
}

// wish has the requests of an alloc.
type wish struct {
	volumes  []int
	mixed    bool   // some of them read-only, and one of them twice
	inline   bool   // an inline volume besides
	block    bool   // as block devices
	options  string // more HCL of each volume
	subPaths []string
	create   string // the rest of the create block of one more volume, named made
}

// group returns an alloc with one task that mounts the requested volumes.
func (n *env) group(id registry.AllocID, w wish) hooks.AllocGroup {
	n.t.Helper()
	var volumes, mounts strings.Builder
	add := func(name, access, options string) {
		attachment := registry.FileSystem
		if w.block {
			attachment = registry.BlockDevice
		}
		fmt.Fprintf(&volumes, "volume %q {\n type = \"csi\"\n access_mode = %q\n attachment_mode = %q\n%s\n}\n", name,
			access, attachment, options)
		mount := "volume_mount {\n volume = %q\n destination = %q\n%s\n}\n"
		fmt.Fprintf(&mounts, mount, name, "/"+name, "")
		for _, path := range w.subPaths {
			fmt.Fprintf(&mounts, mount, name, "/"+name+"-"+path, fmt.Sprintf("sub_path = %q", path))
		}
	}
	for i, v := range w.volumes {
		options := fmt.Sprintf("source = \"v%d\"\n%s", v, w.options)
		if w.mixed {
			options += fmt.Sprintf("\nread_only = %v", i%2 == 0)
		}
		add(fmt.Sprintf("v%d", v), string(accessOf(v)), options)
	}
	if w.mixed && accessOf(w.volumes[0]) == registry.MultiNodeMultiWriter {
		add("again", string(accessOf(w.volumes[0])), fmt.Sprintf("source = \"v%d\"\n%s", w.volumes[0], w.options))
	}
	if w.inline {
		add("scratch", string(registry.SingleNodeWriter), fmt.Sprintf("ephemeral {\n plugin_id = %q\n}", pluginID))
	}
	if w.create != "" {
		add("made", string(registry.MultiNodeMultiWriter),
			fmt.Sprintf("source = \"made\"\n%s\ncreate {\n plugin_id = %q\n%s\n}\n", w.options, pluginID, w.create))
	}
	text := "job \"j\" {\n group \"g\" {\n" + volumes.String() + "task \"t\" {\n driver = \"exec\"\n" +
		mounts.String() +
		"}\n}\n}\n"
	job, diags := config.ParseJob(config.Source{Name: "j.hcl", Text: []byte(text)}, config.Options{})
	if err := diags.Err(); err != nil {
		n.t.Fatal(err)
	}
	return hooks.AllocGroup{Alloc: id, Namespace: "default", Sealed: job.Groups[0].Sealed,
		Isolated: map[string]bool{"t": true}}
}

// tryUp mounts the volumes that an alloc requests. The default is volume v0.
func (n *env) tryUp(id registry.AllocID, w wish) error {
	if len(w.volumes) == 0 && !w.inline && w.create == "" {
		w.volumes = []int{0}
	}
	ctx, cancel := context.WithTimeout(n.shim.ctx, time.Minute)
	defer cancel()
	_, err := n.shim.allocs.Prepare(ctx, registry.Call{}, n.group(id, w))
	return err
}

func (n *env) up(id registry.AllocID, w wish) {
	n.t.Helper()
	if err := n.tryUp(id, w); err != nil {
		n.t.Errorf("up %s: %v", id, err)
	}
}

// tryDown releases an alloc, and waits a minute for its end.
func (n *env) tryDown(id registry.AllocID) error {
	ctx, cancel := context.WithTimeout(n.shim.ctx, time.Minute)
	defer cancel()
	return n.shim.allocs.Release(ctx, registry.Call{}, id, false)
}

func (n *env) down(id registry.AllocID) {
	n.t.Helper()
	if err := n.tryDown(id); err != nil {
		n.t.Errorf("down %s: %v", id, err)
	}
}

// async runs f in the background, and waits until it blocks or has ended.
func (n *env) async(f func()) {
	n.allocs.Go(f)
	synctest.Wait()
}

// The RPCs that change volumes.
var changing = []string{
	"ControllerPublishVolume", "ControllerUnpublishVolume", "NodeStageVolume", "NodeUnstageVolume", "NodePublishVolume",
	"NodeUnpublishVolume", "ControllerExpandVolume", "NodeExpandVolume",
}

// journaled returns the calls that change volumes since it last returned them.
func (n *env) journaled() (calls []journal.Call) {
	all := journal.Calls(n.journal.Lines())
	for _, c := range all[n.seen:] {
		if slices.Contains(changing, c.RPC) {
			calls = append(calls, c)
		}
	}
	n.seen = len(all)
	return calls
}

// rpcs returns the RPCs of journaled, without repetitions of one RPC in a row.
func (n *env) rpcs() (rpcs []registry.RPC) {
	for _, c := range n.journaled() {
		rpcs = append(rpcs, registry.RPC(c.RPC))
	}
	return slices.Compact(rpcs)
}

// want checks which calls the plugin got since the last check. Repetitions of one RPC in a row count as one.
func (n *env) want(when string, want ...registry.RPC) {
	n.t.Helper()
	if got := n.rpcs(); !slices.Equal(got, want) {
		n.t.Errorf("%s: the plugin got %q, want %q", when, got, want)
	}
}

// events returns the details of the events of a kind.
func (n *env) events(kind registry.EventKind) (details []string) {
	n.view(func(v registry.View) {
		all, _ := v.Events(0, 10000)
		for _, e := range all {
			if e.Kind == kind {
				details = append(details, e.Detail)
			}
		}
	})
	return details
}

// wantEvent checks that there is one event of a kind, and that its details have a text.
func (n *env) wantEvent(kind registry.EventKind, text string) {
	n.t.Helper()
	if events := n.events(kind); len(events) != 1 || !strings.Contains(events[0], text) {
		n.t.Errorf("events of the kind %q: %q, want one with %q", kind, events, text)
	}
}

// status returns the status of an alloc.
func (n *env) status(id registry.AllocID) registry.AllocStatus {
	n.t.Helper()
	list, _, err := n.shim.allocs.Status(context.Background(), id)
	if err != nil || len(list) != 1 {
		n.t.Fatalf("status of %s: %+v, %v", id, list, err)
	}
	return list[0]
}

// settle ends all faults and all allocs, and waits until nothing is left.
func (n *env) settle() {
	n.plugin.Load().end(false)
	n.startPlugin()
	n.introduce()
	n.empty()
	n.useAgain()
	n.empty()
	n.endShim()
	n.plugin.Load().end(false)
}

// endShim ends the shim and waits for all that runs in the background.
func (n *env) endShim() {
	n.shim.cancel(errShimEnds)
	n.shim.fleet.CloseAll()
	n.shim.loops.Wait()
	n.allocs.Wait()
}

// empty releases all allocs, and waits until nothing is left.
func (n *env) empty() {
	noErr(n.t, errOf(n.shim.allocs.Sync(n.shim.ctx, nil)))
	for range 24 {
		n.deleteSnapshots()
		time.Sleep(n.retryTime())
		select {
		case <-n.plugin.Load().ended: // the plugin died in ListVolumes
			n.startPlugin()
			n.introduce()
		default:
		}
		if len(n.left()) == 0 {
			break
		}
		n.unmountReported()
	}
}

// deleteSnapshots deletes all snapshots, as far as that is possible now.
func (n *env) deleteSnapshots() {
	var list []registry.VolumeSnapshot
	n.view(func(v registry.View) { list = v.SnapshotRecords() })
	for _, snap := range list {
		ctx, cancel := context.WithTimeout(n.shim.ctx, time.Minute)
		remove := n.shim.snapshots.Delete
		if snap.IsGroup() {
			remove = n.shim.snapshots.DeleteGroup
		}
		_ = remove(ctx, registry.Call{}, snap.SnapshotName())
		cancel()
	}
}

// retryTime returns an hour, in which every automatic retry is made. If releases wait for a person, it returns less,
// because each retry costs the test time.
func (n *env) retryTime() time.Duration {
	if len(n.machine.unknown()) > 0 {
		return 10 * time.Minute
	}
	return time.Hour
}

// unmountReported unmounts the mounts that an alloc's status names, as a person would. No alloc is left, and every
// release has had time to fail. Each mount that the plugin has forgotten therefore has a record, and at least one is
// reported.
func (n *env) unmountReported() {
	unknown := n.machine.unknown()
	if len(unknown) == 0 {
		return
	}
	recorded, reported, some := map[string]bool{}, "", false
	n.view(func(v registry.View) {
		for _, r := range v.AllRefs() {
			recorded[r.Target.Host] = true
		}
		for _, p := range v.Stagings() {
			recorded[p.Path.Host] = true
		}
		for _, a := range v.Allocs() {
			reported += registry.Waits(a.Waiting) + "\n"
		}
	})
	for _, path := range unknown {
		if !recorded[path] {
			n.t.Errorf("lost: %s is still mounted and has no record", path)
		}
		if strings.Contains(reported, path) {
			n.machine.unmount(path)
			some = true
		}
	}
	if !some {
		n.t.Errorf("no status names the mount %s: %s", strings.Join(unknown, ", "), reported)
	}
}

// useAgain mounts all volumes once more for writing, which completes pending expansions.
func (n *env) useAgain() {
	group := n.group("alloc-last", wish{volumes: []int{0, 1, 2}})
	noErr(n.t, errOf(n.shim.allocs.Prepare(n.shim.ctx, registry.Call{}, group)))
}

// left lists all records about the use of volumes.
func (n *env) left() (left []string) {
	add := func(format string, args ...any) { left = append(left, fmt.Sprintf(format, args...)) }
	n.view(func(v registry.View) {
		for _, a := range v.Allocs() {
			add("alloc %s, %s: %s", a.ID, a.State, registry.Waits(a.Waiting))
		}
		for _, vol := range v.Volumes() {
			if vol.Ephemeral {
				add("inline volume %s", vol.VolumeName())
			}
			if vol.Health.Abnormal() {
				add("the health of volume %s", vol.VolumeName())
			}
		}
		for _, c := range v.AllClaims() {
			add("claim %s", c.ClaimKey())
		}
		for _, r := range v.AllRefs() {
			add("ref %s", r.ClaimKey())
		}
		for _, p := range v.Stagings() {
			add("staging of %s: %q", p.Volume, p.State)
		}
		for _, at := range v.AllAttachments() {
			add("attachment of %s: %q", at.Volume, at.State)
		}
		for _, i := range v.Intents() {
			add("%s of %s, %s", i.RPC, i.Volume, i.Outcome)
		}
		for _, snap := range v.SnapshotRecords() {
			add("snapshot %s, %s: %s", snap.ID, snap.State, snap.Failure.Detail)
		}
	})
	return left
}

// judge checks that nothing is left and that the journal is legal.
func (n *env) judge() {
	for _, what := range append(n.left(), n.machine.left()...) {
		n.t.Errorf("left: %s", what)
	}
	lines := n.journal.Lines()
	for _, v := range journal.Check(lines, journal.Options{Settled: true}) {
		n.t.Errorf("journal: %s", v)
	}
	for _, what := range shrunken(lines) {
		n.t.Error(what)
	}
	if n.t.Failed() {
		for i, l := range lines {
			n.t.Logf("%d %s %s %s %s call %d %s %s %s %s", i+1, l.Wall.Format("15:04:05.000"), l.Instance, l.Run,
				l.Kind, l.Call, l.RPC, l.Volume, l.Target, l.Code)
		}
	}
}

// shrunken lists the volumes whose node does not know the size that the controller has made, according to the plugin's
// calls. A plugin that has forgotten its volumes has also forgotten their sizes.
func shrunken(lines []journal.Line) (left []string) {
	for i, l := range slices.Backward(lines) {
		if l.Kind == journal.Forgot {
			lines = lines[i:]
			break
		}
	}
	owed := map[string]int64{}
	for _, c := range journal.Calls(lines) {
		switch {
		case c.End == nil || c.End.Code != "OK" || c.Abandoned || c.End.Answer == nil &&
			c.RPC == "ControllerExpandVolume":
		case c.RPC == "ControllerExpandVolume" && c.End.Answer.NodeExpand:
			owed[c.Volume] = c.End.Answer.Bytes
		case c.RPC == "NodeExpandVolume" && c.Bytes >= owed[c.Volume]:
			delete(owed, c.Volume)
		}
	}
	for id, bytes := range owed {
		left = append(left, fmt.Sprintf("%s has %d bytes, and its node does not know", id, bytes))
	}
	return left
}

// wantErr checks that err is of a kind and has texts. If kind is nil, any error will do.
func wantErr(t *testing.T, err, kind error, texts ...string) {
	t.Helper()
	if err == nil || kind != nil && !errors.Is(err, kind) {
		t.Errorf("the error is %v, want %v", err, kind)
		return
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("the error is %v, want %q in it", err, text)
		}
	}
}

func noErr(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// errOf returns the error of a call with another result.
func errOf[T any](_ T, err error) error { return err }

type noSecrets struct{}

func (noSecrets) Resolve(context.Context, map[string]registry.Secret) (map[string]registry.SecretValue, error) {
	return nil, nil
}
