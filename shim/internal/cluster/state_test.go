package cluster

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/etcdtest"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/store"
)

func TestMain(m *testing.M) {
	store.BecomeVerifier()
	becomeKilledMigration()
	os.Exit(m.Run())
}

// testNode is a node of a test cluster.
type testNode struct {
	*State
	dir, name string
	client    *clientv3.Client
	wrap      func(registry.State) registry.State // wraps the node's store; nil: use the store itself
	stop      func()
}

// newNode starts a node of the cluster that is named after the test.
func newNode(t testing.TB, client *clientv3.Client, name string) *testNode {
	t.Helper()
	n := &testNode{dir: filepath.Join(t.TempDir(), "state"), name: name, client: client}
	n.start(t)
	t.Cleanup(func() { n.stop() })
	return n
}

// newShim starts another shim of the node, with its own state.
func newShim(t *testing.T, of *testNode) *testNode {
	t.Helper()
	n := &testNode{dir: filepath.Join(t.TempDir(), "state"), name: of.name, client: of.client}
	n.offline(t, func(s registry.State) {
		registrytest.Put(t, s, registry.Copy{Cluster: of.id, Member: of.member(t)})
	})
	n.start(t)
	t.Cleanup(func() { n.stop() })
	return n
}

// member returns the node's ID as a member of its cluster.
func (n *testNode) member(t *testing.T) (id string) {
	look(t, n, func(v registry.View) { id = n.copyIn(v).Member })
	return id
}

// offline calls use with the store of a node that does not run.
func (n *testNode) offline(t *testing.T, use func(registry.State)) {
	t.Helper()
	local, err := store.Open(t.Context(), store.Options{Path: filepath.Join(n.dir, "shim.db")})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = local.Run(ctx) })
	use(local)
	cancel()
	running.Wait()
	if err := local.Close(); err != nil {
		t.Error(err)
	}
}

func (n *testNode) start(t testing.TB) {
	t.Helper()
	local, err := store.Open(t.Context(), store.Options{Path: filepath.Join(n.dir, "shim.db")})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = local.Run(ctx) })
	n.State = New(local, n.client, t.Name(), registry.NodeName(n.name))
	if n.wrap != nil {
		n.State.local = n.wrap(local)
	}
	running.Go(func() { _ = n.Run(ctx) })
	n.stop = sync.OnceFunc(func() { cancel(); running.Wait(); _ = local.Close() })
	if err := n.copy.wait(ctx, 1); err != nil {
		t.Fatal(err)
	}
}

// suiteState is a State without the copy record, which the test suite does not expect.
type suiteState struct{ *State }

func (s suiteState) View(ctx context.Context, read func(registry.View) error) error {
	return s.State.View(ctx, func(v registry.View) error {
		return read(registry.View{Reader: suiteReader{v.Reader, registry.CopyRecord(s.id).Path}})
	})
}

type suiteReader struct {
	registry.Reader
	hidden string
}

func (r suiteReader) Paths(b registry.Bucket, prefix string) iter.Seq[string] {
	paths := slices.Collect(r.Reader.Paths(b, prefix))
	return slices.Values(slices.DeleteFunc(paths, func(path string) bool {
		return b == registry.BucketCopies && path == r.hidden
	}))
}

func TestStateOnEtcd(t *testing.T) {
	client := etcdtest.Start(t)
	opened := 0
	registrytest.TestLog(t, func(t *testing.T) (registry.State, func() registry.State) {
		opened++
		n := newNode(t, client, fmt.Sprint("node-", opened))
		return suiteState{n.State}, func() registry.State {
			n.stop()
			n.start(t)
			return suiteState{n.State}
		}
	})
}

func claim(volume, alloc string) registry.Claim {
	return registry.Claim{Volume: registry.VolumeKey{Plugin: "p", External: registry.ExternalID(volume)},
		Alloc: registry.AllocID(alloc), Request: "r", Node: "n"}
}

// TestDecisionsOfNodesAreLinear lets three nodes decide on the same records at the same time. Each node makes two
// commits at a time, which may share a transaction. Each decision depends on what it reads: a record, an empty range,
// or another record in a range.
func TestDecisionsOfNodesAreLinear(t *testing.T) {
	client := etcdtest.Start(t)
	var nodes []*testNode
	for i := range 3 {
		nodes = append(nodes, newNode(t, client, fmt.Sprint("node-", i)))
	}
	const rounds, allocs = 20, 2 // allocs per node
	var won [rounds]int          // the number of winners in each round
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range allocs * len(nodes) {
		n := nodes[i%len(nodes)]
		wg.Go(func() {
			for round := range rounds {
				mine := claim(fmt.Sprint("volume-", round), fmt.Sprint("alloc-", i))
				if n.count(t) && n.claimAlone(t, mine) {
					mu.Lock()
					won[round]++
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	for round, winners := range won {
		if winners != 1 {
			t.Errorf("volume-%d was claimed alone by %d allocs", round, winners)
		}
	}
	if err := nodes[0].copy.wait(t.Context(), max(nodes[1].reached(), nodes[2].reached())); err != nil {
		t.Fatal(err)
	}
	look(t, nodes[0], func(v registry.View) {
		if counter, _ := v.Volume(counterName); counter.Capacity != 3*rounds*allocs {
			t.Errorf("counted to %d instead of %d", counter.Capacity, 3*rounds*allocs)
		}
	})
	for round := range rounds { // of two claims, one is given up only while the other one remains
		volume := fmt.Sprint("pair-", round)
		registrytest.Put(t, nodes[0], claim(volume, "alloc-0"), claim(volume, "alloc-1"))
		for i, n := range nodes[:2] {
			wg.Go(func() { n.leaveOther(t, claim(volume, fmt.Sprint("alloc-", i))) })
		}
		wg.Wait()
		if err := nodes[2].copy.wait(t.Context(), max(nodes[0].reached(), nodes[1].reached())); err != nil {
			t.Fatal(err)
		}
		look(t, nodes[2], func(v registry.View) {
			if left := v.Claims(claim(volume, "").Volume); len(left) != 1 {
				t.Errorf("%d claims of %s are left", len(left), volume)
			}
		})
	}
}

var counterName = registry.VolumeName{Namespace: "default", ID: "counter"}

func (n *testNode) reached() int64 {
	n.copy.mu.Lock()
	defer n.copy.mu.Unlock()
	return n.copy.revision
}

// count adds one to a counter that all nodes share.
func (n *testNode) count(t *testing.T) bool {
	_, err := n.Commit(t.Context(), counting)
	if err != nil {
		t.Errorf("count: %v", err)
	}
	return err == nil
}

func counting(v registry.View) (registry.Change, error) {
	counter, _ := v.Volume(counterName)
	counter.Namespace, counter.ID = counterName.Namespace, counterName.ID
	counter.Capacity++
	return registry.Change{Put: []registry.Record{counter}}, nil
}

var errTaken = errors.New("taken")

// claimAlone puts the claim if its volume has no claim yet.
func (n *testNode) claimAlone(t *testing.T, c registry.Claim) bool {
	_, err := n.Commit(t.Context(), claimingAlone(c))
	if err != nil && err != errTaken {
		t.Errorf("claim: %v", err)
	}
	return err == nil
}

func claimingAlone(c registry.Claim) registry.Decision {
	return func(v registry.View) (registry.Change, error) {
		if len(v.Claims(c.Volume)) > 0 {
			return registry.Change{}, errTaken
		}
		return registry.Change{Put: []registry.Record{c}}, nil
	}
}

// leaveOther deletes the claim if its volume has another claim too.
func (n *testNode) leaveOther(t *testing.T, c registry.Claim) {
	_, err := n.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
		if len(v.Claims(c.Volume)) < 2 {
			return registry.Change{}, errTaken
		}
		return registry.Change{Delete: []registry.Key{c.Key()}}, nil
	})
	if err != nil && err != errTaken {
		t.Errorf("leave: %v", err)
	}
}

func look(t *testing.T, s registry.State, read func(registry.View)) {
	t.Helper()
	if err := s.View(t.Context(), func(v registry.View) error { read(v); return nil }); err != nil {
		t.Fatal(err)
	}
}

// lossy loses the answers of transactions that etcd has carried out, whenever lose returns true.
type lossy struct {
	clientv3.KV
	lose func() bool
}

type lossyTxn struct {
	clientv3.Txn
	lose func() bool
}

func (l lossy) Txn(ctx context.Context) clientv3.Txn { return &lossyTxn{l.KV.Txn(ctx), l.lose} }

func (t *lossyTxn) If(c ...clientv3.Cmp) clientv3.Txn  { t.Txn = t.Txn.If(c...); return t }
func (t *lossyTxn) Then(o ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Then(o...); return t }
func (t *lossyTxn) Else(o ...clientv3.Op) clientv3.Txn { t.Txn = t.Txn.Else(o...); return t }
func (t *lossyTxn) Commit() (*clientv3.TxnResponse, error) {
	answer, err := t.Txn.Commit()
	if err == nil && t.lose() {
		return nil, status.Error(codes.Unavailable, "the answer was lost")
	}
	return answer, err
}

// TestLostAnswerOfEtcd loses answers of transactions that etcd has carried out. Each change is still made only once.
func TestLostAnswerOfEtcd(t *testing.T) {
	client := etcdtest.Start(t)
	n, other := newNode(t, client, "node"), newNode(t, client, "other")
	var calls int
	n.kv = lossy{n.kv, func() bool { calls++; return calls%2 == 1 }}
	const times = 20
	for range times {
		n.count(t)
		other.count(t)
	}
	look(t, other, func(v registry.View) {
		if counter, _ := v.Volume(counterName); counter.Capacity != 2*times {
			t.Errorf("counted to %d instead of %d", counter.Capacity, 2*times)
		}
	})
	if calls < 2*times {
		t.Errorf("only %d transactions", calls)
	}
}

// slow keeps the first transaction back, and answers that its outcome is unknown.
type slow struct {
	clientv3.KV
	first  *slowTxn
	answer func() // called before the answer
}

type slowTxn struct {
	lossyTxn
	answer func()
}

func (s *slow) Txn(ctx context.Context) clientv3.Txn {
	txn := lossyTxn{s.KV.Txn(context.WithoutCancel(ctx)), func() bool { return false }}
	if s.first != nil {
		return &txn
	}
	s.first = &slowTxn{txn, s.answer}
	return s.first
}

func (t *slowTxn) If(c ...clientv3.Cmp) clientv3.Txn  { t.lossyTxn.If(c...); return t }
func (t *slowTxn) Then(o ...clientv3.Op) clientv3.Txn { t.lossyTxn.Then(o...); return t }
func (t *slowTxn) Else(o ...clientv3.Op) clientv3.Txn { t.lossyTxn.Else(o...); return t }
func (t *slowTxn) Commit() (*clientv3.TxnResponse, error) {
	if t.answer == nil {
		return t.lossyTxn.Commit()
	}
	t.answer()
	t.answer = nil
	return nil, status.Error(codes.Unavailable, "the request is under way")
}

// TestRegistrationThatArrivesLate has etcd carry out the request to register a shim late, after the shim has repeated
// it. The shim stays the active one.
func TestRegistrationThatArrivesLate(t *testing.T) {
	client := etcdtest.Start(t)
	s := New(nil, client, t.Name(), "node")
	kv := &slow{KV: s.kv, answer: func() {}}
	s.kv = kv
	if err := s.register(t.Context(), "member"); err != nil {
		t.Fatal(err)
	}
	if late, err := kv.first.Commit(); err != nil || late.Succeeded {
		t.Errorf("the late request: %+v, %v", late, err)
	}
	if answer, err := client.Txn(t.Context()).If(s.active()).Commit(); err != nil || !answer.Succeeded {
		t.Errorf("the shim is not the active one: %+v, %v", answer, err)
	}
}

// TestSettleEndsCommits delays a commit whose caller has gone. etcd does not carry it out after Settle.
func TestSettleEndsCommits(t *testing.T) {
	client := etcdtest.Start(t)
	n := newNode(t, client, "node")
	ctx, cancel := context.WithCancel(t.Context())
	kv := &slow{KV: n.kv, answer: cancel}
	n.kv = kv
	change := registry.Change{Put: []registry.Record{claim("v", "a")}}
	if _, err := registrytest.Write(ctx, n, change); !errors.Is(err, registry.ErrUncertain) {
		t.Errorf("the commit ends with %v", err)
	}
	for range 2 {
		if err := n.Settle(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if late, err := kv.first.Commit(); err != nil || late.Succeeded {
		t.Errorf("the late commit: %+v, %v", late, err)
	}
	registrytest.Put(t, n, claim("v", "b"))
}

// TestTransactionThatEtcdRefuses commits more than etcd takes in one transaction. Nothing is repeated or written.
func TestTransactionThatEtcdRefuses(t *testing.T) {
	n := newNode(t, etcdtest.Start(t), "node")
	if _, err := n.Commit(t.Context(), deciding(large("v"))); !errors.Is(err, registry.ErrInternal) {
		t.Errorf("a record of 1.6 MB: %v", err)
	}
	registrytest.Put(t, n, claim("v", "a"))
	look(t, n, func(v registry.View) {
		if len(v.AllClaims()) != 1 || len(v.Volumes()) != 0 {
			t.Errorf("%d claims, %d volumes", len(v.AllClaims()), len(v.Volumes()))
		}
	})
}

// large returns a record that is too large for a transaction of etcd.
func large(id string) registry.Record {
	v := volumeOf(id, id)
	v.Name = strings.Repeat("x", 1_600_000)
	return v
}

// deciding returns a decision that puts the records.
func deciding(records ...registry.Record) registry.Decision {
	return func(registry.View) (registry.Change, error) { return registry.Change{Put: records}, nil }
}

func TestEarlierShimOfANodeIsFenced(t *testing.T) {
	client := etcdtest.Start(t)
	earlier := newNode(t, client, "node")
	later := newShim(t, earlier)
	_, err := registrytest.Write(t.Context(), earlier, registry.Change{Put: []registry.Record{claim("v", "a")}})
	if !errors.Is(err, registry.ErrFenced) {
		t.Errorf("the earlier shim writes: %v", err)
	}
	registrytest.Put(t, later, claim("v", "b"))
	look(t, later, func(v registry.View) {
		if len(v.AllClaims()) != 1 {
			t.Errorf("claims: %+v", v.AllClaims())
		}
	})
}

// TestUnreachableEtcd stops etcd's answers. Reads and changes of the node's own records succeed, and shared changes
// fail.
func TestUnreachableEtcd(t *testing.T) {
	client := etcdtest.Start(t)
	n := newNode(t, client, "node")
	registrytest.Put(t, n, claim("v", "a"))
	n.kv = lossy{n.kv, func() bool { return true }}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := n.Commit(ctx, func(v registry.View) (registry.Change, error) {
		return registry.Change{}, errors.Join(errTaken, fmt.Errorf("%d claims", len(v.AllClaims())))
	})
	if !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("a refusal that could not be confirmed: %v", err)
	}
	registrytest.Put(t, n, registry.Alloc{ID: "a"})
	look(t, n, func(v registry.View) {
		if len(v.AllClaims()) != 1 || len(v.Allocs()) != 1 {
			t.Errorf("claims %v, allocs %v", v.AllClaims(), v.Allocs())
		}
	})
}

// TestFieldsOfALaterReleaseSurvive has nodes rewrite records that have an unknown field. One node has seen the record
// being written; the other one has loaded it.
func TestFieldsOfALaterReleaseSurvive(t *testing.T) {
	client := etcdtest.Start(t)
	n := newNode(t, client, "node")
	var written int64 // the revision of the last record
	later := func(c registry.Claim) {
		t.Helper()
		answer, err := client.Put(t.Context(), n.record(c.Key()), fmt.Sprintf(
			`{"volume":{"plugin":"p","external_id":%q},"alloc":%q,"request":"r","node":"n","later":"kept"}`,
			c.Volume.External, c.Alloc))
		if err != nil {
			t.Fatal(err)
		}
		written = answer.Header.Revision
	}
	later(claim("v", "seen"))
	later(claim("v", "loaded"))
	loading := newNode(t, client, "loading")
	for at, c := range map[*testNode]registry.Claim{n: claim("v", "seen"), loading: claim("v", "loaded")} {
		if err := at.copy.wait(t.Context(), written); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			c.Name.ID += "rewritten"
			registrytest.Put(t, at, c)
		}
		answer, err := client.Get(t.Context(), at.record(c.Key()))
		if err != nil {
			t.Fatal(err)
		}
		if text := string(answer.Kvs[0].Value); !strings.Contains(text, `"later":"kept"`) ||
			!strings.Contains(text, "rewrittenrewritten") {
			t.Errorf("record %s is now %s", c.Alloc, text)
		}
	}
}

// TestReadAsideIsNoCondition reads claims aside, and has another node change them before the commit. The decision is
// not made again.
func TestReadAsideIsNoCondition(t *testing.T) {
	client := etcdtest.Start(t)
	n, other := newNode(t, client, "node"), newNode(t, client, "other")
	calls := 0
	_, err := n.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
		if calls++; calls == 1 {
			v.Aside().ClaimsAt("p")
			registrytest.Put(t, other, claim("theirs", "a"))
		}
		return registry.Change{Put: []registry.Record{claim("mine", "b")}}, nil
	})
	if err != nil || calls != 1 {
		t.Errorf("%d decisions, %v", calls, err)
	}
}
