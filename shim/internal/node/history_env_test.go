package node_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
	"holdfast/shim/internal/node"
)

// historyEnv is a machine with one plugin and one shim, all in memory: the records outlive the shim, the storage system
// outlives the plugin.
type historyEnv struct {
	t       *testing.T
	random  *rand.Rand
	log     *registrytest.Log
	storage *csifake.Backend
	journal *journal.Memory
	caps    []string
	boot    string
	mounts  *mountTable // nil: the plugin's word is all there is
	forgets bool        // plugins that are killed have forgotten everything when they are started again
	plugin  atomic.Pointer[fake]
	shim    *shim
	allocs  sync.WaitGroup // what was asked for allocs and volumes
	starts  int            // of plugins
	size    int64          // more than volumes had that were asked to have
	boots   int
}

const (
	pluginID = registry.PluginID("p")
	nodeName = registry.NodeName("node-1")
)

func newHistoryEnv(t *testing.T, seed uint64) *historyEnv {
	n := &historyEnv{
		t: t, random: rand.New(rand.NewPCG(seed, 1)), log: registrytest.NewLog(time.Now),
		storage: csifake.NewBackend(""), journal: &journal.Memory{},
		caps: []string{"LIST_VOLUMES"}, boot: "boot-1",
	}
	for _, c := range []string{"PUBLISH_UNPUBLISH_VOLUME", "STAGE_UNSTAGE_VOLUME"} {
		if n.random.IntN(4) > 0 {
			n.caps = append(n.caps, c)
		}
	}
	if n.random.IntN(4) > 0 {
		n.caps = append(n.caps, []string{"EXPAND_VOLUME", "controller/EXPAND_VOLUME",
			"node/EXPAND_VOLUME"}[n.random.IntN(3)])
		n.caps = append(n.caps, [][]string{{"expansion/ONLINE"}, {"expansion/OFFLINE"}, {}}[n.random.IntN(3)]...)
	}
	if n.random.IntN(2) == 0 {
		n.caps = append(n.caps, "node/GET_VOLUME_STATS", "VOLUME_CONDITION")
	}
	if n.random.IntN(2) == 0 {
		n.mounts = &mountTable{storage: n.storage, late: time.Duration(n.random.IntN(4)) * 300 * time.Millisecond}
	}
	n.forgets = n.random.IntN(3) == 0
	ids := csifake.IDForms[n.random.IntN(len(csifake.IDForms))]
	for i := range 3 {
		id := registry.VolumeID(fmt.Sprintf("v%d", i))
		n.put(registry.Volume{VolumeSpec: registry.VolumeSpec{
			Namespace: "default", ID: id, Plugin: pluginID, External: registry.ExternalID(ids.VolumeID(string(id))),
			Capabilities: []registry.VolumeCapability{{Access: accessOf(i), Attachment: registry.FileSystem}},
		}, State: registry.VolumeReady})
	}
	return n
}

// accessOf is how the volumes may be used: the last one by one alloc at a time.
func accessOf(volume int) registry.AccessMode {
	if volume == 2 {
		return registry.SingleNodeWriter
	}
	return registry.MultiNodeMultiWriter
}

func (n *historyEnv) put(records ...registry.Record) {
	registrytest.Put(n.t, n.log, records...)
}

// fake is one process of the plugin, and the socket at which it listens.
type fake struct {
	*csifake.Plugin
	ended    chan struct{}
	listener *bufconn.Listener
	server   *grpc.Server
}

// startPlugin starts the plugin's next process.
func (n *historyEnv) startPlugin() {
	n.starts++
	port := &csifake.Port{}
	before := n.mounts.held()
	p, err := csifake.New(csifake.Config{
		Port: port, Memory: n.journal, Backend: n.storage, Blind: true, AnyVolume: true, Caps: n.caps,
		Instance:  fmt.Sprintf("p-%d", n.starts),
		Forgetful: n.forgets,
	})
	if err != nil {
		n.t.Fatal(err)
	}
	n.mounts.orphaned(before)
	instance := fmt.Sprintf("p-%d", n.starts)
	f := &fake{Plugin: p, ended: make(chan struct{}), listener: bufconn.Listen(1 << 16)}
	f.server = grpc.NewServer(grpc.UnknownServiceHandler(through(port, func() bool { return n.hasStopped(instance) })))
	go func() {
		_ = p.Run(context.Background())
		f.server.Stop() // as a process that dies takes its connections with it
		close(f.ended)
	}()
	go func() { _ = f.server.Serve(f.listener) }()
	n.plugin.Store(f)
}

// end ends the process: it is told to stop, or killed.
func (f *fake) end(killed bool) {
	if killed {
		f.Kill()
	} else {
		f.Stop()
	}
	<-f.ended
}

// hasStopped says whether the journal says that a process of the plugin is at its end.
func (n *historyEnv) hasStopped(instance string) bool {
	for _, l := range slices.Backward(n.journal.Lines()) {
		if l.Instance == instance && l.Kind == journal.Stop {
			return true
		}
	}
	return false
}

// through answers every call of a gRPC server by the plugin at the port. The dead answer nobody: what a call was about
// to say when its plugin was killed is not heard.
func through(port *csifake.Port, dead func() bool) grpc.StreamHandler {
	return func(_ any, stream grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(stream)
		in, out, err := messages(method)
		if err != nil {
			return err
		}
		if err := stream.RecvMsg(in); err != nil {
			return err
		}
		err = port.Invoke(stream.Context(), method, in, out)
		if dead() {
			<-stream.Context().Done() // its connections are cut
			return stream.Context().Err()
		}
		if err != nil {
			return err
		}
		return stream.SendMsg(out)
	}
}

// messages are an empty request and an empty answer of a method.
func messages(method string) (in, out proto.Message, err error) {
	name := protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", "."))
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if err != nil {
		return nil, nil, err
	}
	m := d.(protoreflect.MethodDescriptor)
	made := func(of protoreflect.MessageDescriptor) (proto.Message, error) {
		t, err := protoregistry.GlobalTypes.FindMessageByName(of.FullName())
		if err != nil {
			return nil, err
		}
		return t.New().Interface(), nil
	}
	if in, err = made(m.Input()); err != nil {
		return nil, nil, err
	}
	out, err = made(m.Output())
	return in, out, err
}

// shim is one process of the shim, without its sockets and its disk.
type shim struct {
	table   *registry.Registry
	fleet   *csi.Fleet
	volumes *controller.Controller
	allocs  *node.Allocs
	cancel  context.CancelCauseFunc
	ctx     context.Context
	loops   sync.WaitGroup
}

var errShimEnds = errors.New("the shim ends")

// startShim starts the next shim on the records that the last one left.
func (n *historyEnv) startShim() {
	s := &shim{table: registry.New(n.log)}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	n.log.OnApplied(s.table.Applied)
	if err := s.table.Load(s.ctx); err != nil {
		n.t.Fatal(err)
	}
	s.fleet = csi.NewDialing(s.table, func(ctx context.Context, _ string) (net.Conn, error) {
		return n.plugin.Load().listener.DialContext(ctx)
	})
	calls := intent.Calls{
		Sender:  intent.Sender{State: n.log, Now: time.Now, Drain: intent.DrainTime},
		Plugins: s.table, Secrets: noSecrets{}, Locks: &intent.Locks{},
	}
	stager := node.NewStager(calls, s.fleet, kernel{n.boot, n.mounts},
		node.Options{Layout: layout, Node: nodeName, Check: n.mounts != nil})
	s.volumes = controller.New(calls, s.fleet, stager, hclog.NewNullLogger())
	s.allocs = node.NewAllocs(calls, s.volumes, stager,
		node.Host{Node: nodeName, Operations: hooks.Operations}, hclog.NewNullLogger())
	s.loops.Go(func() { _ = s.allocs.Run(s.ctx) })
	s.loops.Go(func() { _ = s.volumes.Run(s.ctx) })
	s.loops.Go(func() { _ = stager.WatchHealth(s.ctx) })
	n.shim = s
}

// crash ends the shim as SIGKILL does, as far as its plugin can tell: its calls are cut off, and it writes nothing
// more.
func (n *historyEnv) crash() {
	n.shim.cancel(errShimEnds)
	dead := n.log
	n.log = dead.Reopen() // from now on nobody reads what the dead one writes
	n.shim.fleet.CloseAll()
	n.shim.loops.Wait()
}

// reboot starts the machine anew: nothing is mounted any more, whoever ran is dead.
func (n *historyEnv) reboot() {
	n.crash()
	n.plugin.Load().end(true)
	n.journal.NoteReboot("csifake.example.org", "node-1")
	if err := n.storage.Reboot("node-1"); err != nil {
		n.t.Fatal(err)
	}
	n.mounts.clear()
	n.boots++
	n.boot = fmt.Sprintf("boot-%d", 1+n.boots)
	n.startPlugin()
	n.startShim()
	n.introduce()
}

// introduce has the plugin say what it is, and registers it as healthy. One that crashes meanwhile is started again.
func (n *historyEnv) introduce() {
	task := registry.TaskKey{Alloc: "plugin", Task: "p"}
	at := registry.Endpoint{Host: "/run/p"} // as a task keeps its socket
	conn, err := n.shim.fleet.Connect(pluginID, task, at)
	if err != nil {
		n.t.Fatal(err)
	}
	roles := []registry.Role{registry.RoleController, registry.RoleNode}
	var said map[registry.Role]registry.Fingerprint
	for said == nil {
		select {
		case <-n.plugin.Load().ended:
			n.startPlugin()
		default:
		}
		if said, err = conn.Describe(context.Background(), roles); err != nil {
			time.Sleep(time.Second)
		}
	}
	for _, role := range roles {
		_, err := n.log.Commit(context.Background(), func(v registry.View) (registry.Change, error) {
			return registry.PutChange(v, time.Now(), registry.Instance{
				InstanceKey: registry.InstanceKey{Role: role, Plugin: pluginID, Alloc: task.Alloc, Task: task.Task},
				Attempt:     uint64(n.starts), Endpoint: at,
				Volumes: registry.Tree{Host: layout.PluginRoot(pluginID), Task: "/csi"}, Fingerprint: said[role],
				Health: registry.Health{State: registry.Healthy, Cause: registry.CauseProbed},
			}), nil
		})
		if err != nil {
			n.t.Fatal(err)
		}
	}
}

// wish is what an alloc asks for.
type wish struct {
	volumes []int
	mixed   bool // some of them read-only, and one of them twice
	inline  bool // a volume of its own besides
	other   bool // with mount options that nobody else asks for
}

func (n *historyEnv) group(id registry.AllocID, w wish) hooks.AllocGroup {
	text, mounts := "job \"j\" {\n group \"g\" {\n", ""
	ask := func(name, access, more string) {
		text += fmt.Sprintf("volume %q {\n type = \"csi\"\n access_mode = %q\n attachment_mode = \"file-system\"\n%s\n}\n", name, access, more)
		mounts += fmt.Sprintf("volume_mount {\n volume = %q\n destination = \"/%s\"\n}\n", name, name)
	}
	more := func(volume int, readOnly bool) string {
		text := fmt.Sprintf("source = \"v%d\"\n read_only = %v", volume, readOnly)
		if w.other {
			text += "\n mount_options {\n fs_type = \"xfs\"\n}"
		}
		return text
	}
	for i, v := range w.volumes {
		ask(fmt.Sprintf("v%d", v), string(accessOf(v)), more(v, w.mixed && i%2 == 0))
	}
	if w.mixed && accessOf(w.volumes[0]) == registry.MultiNodeMultiWriter {
		ask("again", string(accessOf(w.volumes[0])), more(w.volumes[0], false))
	}
	if w.inline {
		ask("scratch", string(registry.SingleNodeWriter), fmt.Sprintf("ephemeral {\n plugin_id = %q\n}", pluginID))
	}
	text += "task \"t\" {\n driver = \"exec\"\n" + mounts + "}\n}\n}\n"
	job, diags := config.ParseJob(config.Source{Name: "j.hcl", Text: []byte(text)}, config.Options{})
	if err := diags.Err(); err != nil {
		n.t.Fatal(err)
	}
	return hooks.AllocGroup{Alloc: id, Namespace: "default", Sealed: job.Groups[0].Sealed,
		Isolated: map[string]bool{"t": true}}
}

type noSecrets struct{}

func (noSecrets) Resolve(context.Context, map[string]registry.Secret) (map[string]registry.SecretValue, error) {
	return nil, nil
}

// kernel has no directories.
type kernel struct {
	boot   string
	mounts *mountTable
}

func (k kernel) Boot() string                      { return k.boot }
func (k kernel) Mounted(path string) (bool, error) { return k.mounts.mounted(path) }
func (kernel) Below(string) ([]string, error)      { return nil, nil }
func (kernel) Dirs(string) ([]string, error)       { return nil, nil }
func (kernel) MakeDir(string) error                { return nil }
func (kernel) RemoveDir(string) error              { return nil }

// mountTable shows what the plugin has staged and published, and what it has forgotten. It shows a change late,
// counted from when it is first looked at.
type mountTable struct {
	storage *csifake.Backend
	late    time.Duration

	mu      sync.Mutex
	shown   map[string]bool
	changed map[string]time.Time
	orphans map[string]bool // mounts that the plugin has forgotten
}

func (m *mountTable) mounted(path string) (bool, error) {
	if m == nil {
		return false, nil
	}
	is := m.held()[path]
	m.mu.Lock()
	defer m.mu.Unlock()
	if is {
		delete(m.orphans, path) // the plugin knows it again
	}
	if m.shown == nil {
		m.shown, m.changed = map[string]bool{}, map[string]time.Time{}
	}
	if m.orphans[path] { // nothing is late any more: who mounted it is dead
		m.shown[path] = true
		delete(m.changed, path)
		return true, nil
	}
	since, changes := m.changed[path]
	switch {
	case is == m.shown[path]:
		delete(m.changed, path)
	case !changes && m.late > 0:
		m.changed[path] = time.Now()
	case !changes || time.Since(since) >= m.late:
		m.shown[path] = is
		delete(m.changed, path)
	}
	return m.shown[path], nil
}

// held is the mounts that the plugin knows of, by the host's paths.
func (m *mountTable) held() map[string]bool {
	held := map[string]bool{}
	if m == nil {
		return held
	}
	all, _ := m.storage.Volumes() // memory does not fail
	for _, v := range all {
		for _, at := range append(v.Published["node-1"], v.Staged["node-1"]) {
			if at != "" {
				held[strings.Replace(at, "/csi", layout.PluginRoot(pluginID), 1)] = true
			}
		}
	}
	return held
}

// orphaned has the mounts stay that the plugin held before and does not know of any more.
func (m *mountTable) orphaned(before map[string]bool) {
	if m == nil {
		return
	}
	now := m.held()
	m.mu.Lock()
	defer m.mu.Unlock()
	for path := range before {
		if !now[path] {
			if m.orphans == nil {
				m.orphans = map[string]bool{}
			}
			m.orphans[path] = true
		}
	}
}

// stuck is the mounts that the plugin does not know of.
func (m *mountTable) stuck() []string {
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.orphans))
}

// unmount is a person's umount.
func (m *mountTable) unmount(path string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.orphans, path)
	delete(m.shown, path)
}

func (m *mountTable) clear() {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.shown)
	clear(m.changed)
	clear(m.orphans)
}
