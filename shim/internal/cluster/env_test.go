package cluster

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/etcdtest"
	"holdfast/internal/proc"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/store"
)

func TestMain(m *testing.M) {
	store.BecomeVerifier()
	becomeKilledMigration()
	abandonLimit = time.Second
	_ = flag.Set("test.parallel", "8") // unless the command line says otherwise: most tests wait for etcd and the disk
	os.Exit(etcdtest.Run(m))
}

// parallelWithEtcd marks the test as parallel, and returns a client of the etcd that such tests share.
func parallelWithEtcd(t *testing.T) *clientv3.Client {
	t.Helper()
	t.Parallel()
	return etcdtest.Shared(t, "/holdfast/"+t.Name()+"/")
}

// testNode is a node of a test cluster, which has the name of the test.
type testNode struct {
	*State
	dir, name string
	etcd      *clientv3.Client
	wrap      func(registry.State) registry.State    // wraps the node's store; nil: use the store itself
	applied   atomic.Pointer[func(registry.Applied)] // called with each change of the store; nil: nothing is
	stop      func()
}

// newOffline returns a node that does not run.
func newOffline(t testing.TB, etcd *clientv3.Client, name string) *testNode {
	return &testNode{dir: filepath.Join(t.TempDir(), "state"), name: name, etcd: etcd}
}

// newNode starts a node.
func newNode(t testing.TB, etcd *clientv3.Client, name string) *testNode {
	t.Helper()
	n := newOffline(t, etcd, name)
	n.start(t)
	return n
}

// newShim starts another shim of the node, with its own state.
func newShim(t *testing.T, of *testNode) *testNode {
	t.Helper()
	n := newOffline(t, of.etcd, of.name)
	var own registry.Copy
	look(t, of, func(v registry.View) { own = of.copyIn(v) })
	n.offline(t, func(s registry.State) {
		registrytest.Put(t, s, registry.Copy{Cluster: own.Cluster, Member: own.Member})
	})
	n.start(t)
	return n
}

// openStore opens the node's store. end ends its Run and closes it.
func (n *testNode) openStore(
	t testing.TB,
) (local *store.Store, ctx context.Context, running *sync.WaitGroup, end func()) {
	t.Helper()
	local, err := store.Open(t.Context(), store.Options{Path: filepath.Join(n.dir, "shim.db"),
		Applied: func(a registry.Applied) {
			if applied := n.applied.Load(); applied != nil {
				(*applied)(a)
			}
		}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	running = &sync.WaitGroup{}
	running.Go(func() { _ = local.Run(ctx) })
	return local, ctx, running, sync.OnceFunc(func() {
		cancel()
		running.Wait()
		if err := local.Close(); err != nil {
			t.Error(err)
		}
	})
}

// offline calls use with the store of a node that does not run.
func (n *testNode) offline(t *testing.T, use func(registry.State)) {
	t.Helper()
	local, _, _, end := n.openStore(t)
	defer end()
	use(local)
}

// start runs the node until stop, or the end of the test.
func (n *testNode) start(t testing.TB) {
	t.Helper()
	local, ctx, running, end := n.openStore(t)
	n.stop = end
	t.Cleanup(end)
	n.State = New(local, n.etcd, t.Name(), registry.NodeName(n.name))
	if n.wrap != nil {
		n.State.local = n.wrap(local)
	}
	state := n.State // a later start replaces it
	running.Go(func() { _ = state.Run(ctx) })
	if err := n.copy.wait(ctx, 1); err != nil {
		t.Fatal(err)
	}
}

// catchUp waits until the node's copy has all that etcd has now, and returns the revision.
func (n *testNode) catchUp(t testing.TB) int64 {
	t.Helper()
	revision, err := n.changeBarrier(t.Context())
	if err == nil {
		err = n.copy.wait(t.Context(), revision)
	}
	if err != nil {
		t.Error(err)
	}
	return revision
}

func look(t testing.TB, s registry.State, read func(registry.View)) {
	t.Helper()
	if err := s.View(t.Context(), func(v registry.View) error { read(v); return nil }); err != nil {
		t.Fatal(err)
	}
}

// commit commits a change in one transaction.
func commit(t *testing.T, s registry.State, change registry.Change) {
	t.Helper()
	_, err := s.Commit(t.Context(), func(registry.View) (registry.Change, error) { return change, nil })
	if err != nil {
		t.Fatal(err)
	}
}

// until waits until a condition holds.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// see waits until seen is true in the node's copy.
func (n *testNode) see(t *testing.T, what string, seen func(registry.View) bool) {
	t.Helper()
	until(t, "node "+n.name+" sees: "+what, func() (is bool) {
		look(t, n, func(v registry.View) { is = seen(v) })
		return is
	})
}

func (n *testNode) seeState(t *testing.T, node registry.NodeName, state registry.NodeState) {
	t.Helper()
	n.see(t, string(node)+" is "+string(state), func(v registry.View) bool {
		r, _ := v.Node(node)
		return r.State == state
	})
}

// seeAlive waits until the node sees that another node has a lease or, if alive is false, that it has none.
func (n *testNode) seeAlive(t *testing.T, node registry.NodeName, alive bool) {
	t.Helper()
	n.see(t, string(node)+" is alive or suspect", func(v registry.View) bool {
		_, is := v.NodeLease(node)
		return is == alive
	})
}

var testKey = registry.ExecutorKey{Plugin: "p"}

// member is a node that has registered in its cluster. It becomes the executor of plugin p whenever it can.
type member struct {
	*testNode
	*Node
	plugins testPlugins
	boot    atomic.Int64 // added to CLOCK_BOOTTIME
	busy    atomic.Bool  // the plugin answers repeated calls with ABORTED
	asked   atomic.Int64 // how often a call was repeated
	cut     func()       // stops the renewal of the lease
}

func newMember(t *testing.T, etcd *clientv3.Client, name string) *member {
	t.Helper()
	return newNode(t, etcd, name).asMember(t)
}

// asMember registers the node, and runs what a member runs until the test ends.
func (n *testNode) asMember(t *testing.T) *member {
	t.Helper()
	m := &member{testNode: n}
	m.Node = &Node{State: n.State, session: newSession(n.State, 2*time.Second), plugins: &m.plugins,
		log: hclog.NewNullLogger()}
	m.session.boot = func() time.Duration { return proc.BootTime() + time.Duration(m.boot.Load()) }
	m.Executors = newExecutors(m.session, &m.plugins, time.Now, m.log)
	m.Executors.repeat = m.repeat
	n.expect = max(n.expect, 1)
	applied := m.Applied
	n.applied.Store(&applied)
	renewing, cut := context.WithCancel(t.Context())
	m.cut = cut
	m.run(t, func(context.Context) error { return m.session.Run(renewing) })
	m.run(t, m.Executors.Run)
	m.run(t, m.Executors.HandOver)
	m.session.awaitFirst(t.Context())
	m.see(t, "its lease", func(v registry.View) bool { return m.leaseIn(v) == m.session.Lease() })
	if err := m.describeNow(t.Context()); err != nil {
		t.Fatal(err)
	}
	return m
}

// run runs a loop of the member until the test ends.
func (m *member) run(t *testing.T, loop func(context.Context) error) {
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = loop(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
}

// repeat repeats a call at an instance of a plugin. Plugin a never answers.
func (m *member) repeat(ctx context.Context, at registry.Instance, call registry.LateCall) error {
	defer m.asked.Add(1)
	if at.Plugin == "a" {
		<-ctx.Done()
		return context.Cause(ctx)
	}
	if m.busy.Load() || call.Failed {
		return &registry.CallError{Code: "ABORTED", Outcome: registry.OutcomeUncertain}
	}
	return nil
}

// die ends the lease of the member, as if its machine had stopped a while ago. It returns once another one sees that.
func (m *member) die(t *testing.T, seenBy *member) {
	t.Helper()
	m.cut()
	if _, err := m.etcd.Revoke(t.Context(), clientv3.LeaseID(m.session.Lease())); err != nil {
		t.Fatal(err)
	}
	seenBy.seeAlive(t, registry.NodeName(m.name), false)
}

// restart starts the member again after it has died.
func (m *member) restart(t *testing.T) *member {
	t.Helper()
	m.testNode.stop()
	n := &testNode{dir: m.dir, name: m.name, etcd: m.etcd}
	n.start(t)
	return n.asMember(t)
}

// setHealthy changes the health of plugin p on the node.
func (m *member) setHealthy(healthy bool) {
	m.plugins.sick.Store(!healthy)
	m.Executors.changed.fire()
}

// exit ends plugin p on the node.
func (m *member) exit() {
	m.plugins.exited.Store(true)
	m.Executors.changed.fire()
}

// await waits until the node may send calls of plugin p or, if may is false, until it may not.
func (m *member) await(t *testing.T, may bool) (done func()) {
	t.Helper()
	until(t, "a change of the right to send", func() bool {
		var err error
		if done, err = m.Executors.Sending(t.Context(), testKey); err == nil && !may {
			done()
		}
		return may == (err == nil)
	})
	return done
}

// makeFormer waits until the member executes plugin p, and makes it give the role up.
func (m *member) makeFormer(t *testing.T) {
	t.Helper()
	m.await(t, true)()
	m.setHealthy(false)
	m.await(t, false)
}

// resign waits until the member executes plugin p, and makes it give the role up and hand its calls over.
func (m *member) resign(t *testing.T) {
	t.Helper()
	m.await(t, true)()
	m.setHealthy(false)
	until(t, "the end of the role", func() bool {
		e := m.executor(t)
		return e.Holder == "" && len(e.Former) == 0
	})
}

func (m *member) executor(t *testing.T) (e registry.Executor) {
	look(t, m, func(v registry.View) { e, _ = v.Executor("p") })
	return e
}

// remoteCalls returns how many records of remote calls there are.
func (m *member) remoteCalls(t *testing.T) (n int) {
	look(t, m, func(v registry.View) { n = len(v.RemoteCalls()) })
	return n
}

// lateCalls lists the late calls of all nodes.
func (m *member) lateCalls(t *testing.T) (list []registry.LateCall) {
	look(t, m, func(v registry.View) {
		for path := range v.Paths(registry.BucketLateCalls, "") {
			list = append(list, v.Get(registry.Key{Bucket: registry.BucketLateCalls, Path: path}).(registry.LateCall))
		}
	})
	return list
}

// testPlugins is a table with a healthy controller of plugin p, and one of plugin a that never answers.
type testPlugins struct{ sick, exited, silent atomic.Bool }

func (p *testPlugins) Find(role registry.Role, id registry.PluginID) (registry.Instance, bool) {
	for _, i := range p.All().Instances {
		if i.Role == role && i.Plugin == id {
			return i, true
		}
	}
	return registry.Instance{}, false
}

func (p *testPlugins) All() registry.Snapshot {
	if p.exited.Load() {
		return registry.Snapshot{}
	}
	health := registry.Healthy
	if p.sick.Load() {
		health = registry.Unhealthy
	}
	all := registry.Snapshot{Instances: []registry.Instance{{
		InstanceKey: registry.InstanceKey{Role: registry.RoleController, Plugin: "p", Alloc: "a", Task: "t"},
		Health:      registry.Health{State: health}}}}
	if p.silent.Load() {
		silent := registry.InstanceKey{Role: registry.RoleController, Plugin: "a", Alloc: "a", Task: "silent"}
		all.Instances = append(all.Instances, registry.Instance{InstanceKey: silent})
	}
	return all
}

type (
	// sendTxn sends a transaction to etcd. It may be called after the context of the transaction has ended.
	sendTxn = func() (*clientv3.TxnResponse, error)
	// commitTxn takes the place of Commit of a transaction.
	commitTxn = func(ctx context.Context, send sendTxn) (*clientv3.TxnResponse, error)
)

// withCommit returns a KV whose transactions call commit.
func withCommit(kv clientv3.KV, commit commitTxn) clientv3.KV { return committing{kv, commit} }

type committing struct {
	clientv3.KV
	commit commitTxn
}

type committingTxn struct {
	clientv3.Txn
	ctx    context.Context
	commit commitTxn
}

func (c committing) Txn(ctx context.Context) clientv3.Txn {
	return &committingTxn{c.KV.Txn(context.WithoutCancel(ctx)), ctx, c.commit}
}

func (t *committingTxn) If(c ...clientv3.Cmp) clientv3.Txn  { t.Txn = t.Txn.If(c...); return t }
func (t *committingTxn) Then(o ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Then(o...); return t }
func (t *committingTxn) Else(o ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Else(o...); return t }
func (t *committingTxn) Commit() (*clientv3.TxnResponse, error) {
	return t.commit(t.ctx, t.Txn.Commit)
}

// losing returns a KV that loses the answers of transactions that etcd has carried out, whenever lose returns true.
func losing(kv clientv3.KV, lose func() bool) clientv3.KV {
	return withCommit(kv, func(_ context.Context, send sendTxn) (*clientv3.TxnResponse, error) {
		answer, err := send()
		if err == nil && lose() {
			return nil, status.Error(codes.Unavailable, "the answer was lost")
		}
		return answer, err
	})
}

// delayingFirst returns a KV that sends the first transaction only when sendFirst is called. Before that, it calls
// answer, and answers that the outcome is unknown.
func delayingFirst(kv clientv3.KV, answer func()) (delaying clientv3.KV, sendFirst sendTxn) {
	var first atomic.Pointer[sendTxn]
	delaying = withCommit(kv, func(_ context.Context, send sendTxn) (*clientv3.TxnResponse, error) {
		if !first.CompareAndSwap(nil, &send) {
			return send()
		}
		answer()
		return nil, status.Error(codes.Unavailable, "the request is under way")
	})
	return delaying, func() (*clientv3.TxnResponse, error) { return (*first.Load())() }
}

// calling returns a KV that calls hook just before the first transaction.
func calling(kv clientv3.KV, hook func()) clientv3.KV {
	first := sync.OnceFunc(hook)
	return withCommit(kv, func(_ context.Context, send sendTxn) (*clientv3.TxnResponse, error) {
		first()
		return send()
	})
}
