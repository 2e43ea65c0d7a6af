package cluster

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/intent"
)

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
	client := parallelWithEtcd(t)
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

func claim(volume, alloc string) registry.Claim { return claimOf("n", volume, alloc) }

func claimOf(node registry.NodeName, volume, alloc string) registry.Claim {
	return registry.Claim{Volume: registry.VolumeKey{Plugin: "p", External: registry.ExternalID(volume)},
		Alloc: registry.AllocID(alloc), Request: "r", Node: node}
}

// refOf returns the record of a volume that is published for the alloc of a claim.
func refOf(c registry.Claim) registry.Ref {
	return registry.Ref{Volume: c.Volume, Alloc: c.Alloc, Request: c.Request, Publish: registry.MarkDone}
}

// callsOf returns the parts of calls on a node without plugins.
func callsOf(s registry.State) intent.Calls {
	return intent.Calls{Sender: intent.Sender{State: s, Now: time.Now}, Plugins: noPlugins{}, Locks: &intent.Locks{}}
}

// TestDecisionsOfNodesAreLinear lets three nodes decide on the same records at the same time. Each node makes two
// commits at a time, which may share a transaction. Each decision depends on what it reads: a record, an empty range,
// or another record in a range.
func TestDecisionsOfNodesAreLinear(t *testing.T) {
	client := parallelWithEtcd(t)
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
	nodes[0].catchUp(t)
	look(t, nodes[0], func(v registry.View) {
		if counter, _ := v.Volume(counterName); counter.Capacity != 3*rounds*allocs {
			t.Errorf("counted to %d instead of %d", counter.Capacity, 3*rounds*allocs)
		}
	})
	for round := range rounds { // of two claims, one is given up only while the other one remains
		volume := fmt.Sprint("pair-", round)
		registrytest.Put(t, nodes[0], claim(volume, "alloc-0"), claim(volume, "alloc-1"))
		for i, n := range nodes[:2] {
			wg.Go(func() { n.deleteUnlessLast(t, claim(volume, fmt.Sprint("alloc-", i))) })
		}
		wg.Wait()
		nodes[2].catchUp(t)
		look(t, nodes[2], func(v registry.View) {
			if left := v.Claims(claim(volume, "").Volume); len(left) != 1 {
				t.Errorf("%d claims of %s are left", len(left), volume)
			}
		})
	}
}

var counterName = registry.VolumeName{Namespace: "default", ID: "counter"}

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

// deleteUnlessLast deletes the claim if its volume has another claim too.
func (n *testNode) deleteUnlessLast(t *testing.T, c registry.Claim) {
	_, err := n.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
		if len(v.Claims(c.Volume)) < 2 {
			return registry.Change{}, errTaken
		}
		return registry.Change{Delete: []registry.Key{c.Key()}}, nil
	})
	if err != nil && err != errTaken {
		t.Errorf("delete a claim: %v", err)
	}
}

// TestLostAnswerOfEtcd loses answers of transactions that etcd has carried out. Each change is still made only once.
func TestLostAnswerOfEtcd(t *testing.T) {
	client := parallelWithEtcd(t)
	n, other := newNode(t, client, "node"), newNode(t, client, "other")
	var calls int
	n.kv = losing(n.kv, func() bool { calls++; return calls%2 == 1 })
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

// TestRegistrationThatArrivesLate has etcd carry out the request to register a shim late, after the shim has repeated
// it. The shim stays the active one.
func TestRegistrationThatArrivesLate(t *testing.T) {
	client := parallelWithEtcd(t)
	s := New(nil, client, t.Name(), "node")
	kv, sendFirst := delayingFirst(s.kv, func() {})
	s.kv = kv
	if err := s.register(t.Context(), "member"); err != nil {
		t.Fatal(err)
	}
	if late, err := sendFirst(); err != nil || late.Succeeded {
		t.Errorf("the late request: %+v, %v", late, err)
	}
	if answer, err := client.Txn(t.Context()).If(s.active()).Commit(); err != nil || !answer.Succeeded {
		t.Errorf("the shim is not the active one: %+v, %v", answer, err)
	}
}

// TestSettleEndsCommits delays a commit whose caller has gone. etcd does not carry it out after Settle.
func TestSettleEndsCommits(t *testing.T) {
	client := parallelWithEtcd(t)
	n := newNode(t, client, "node")
	ctx, cancel := context.WithCancel(t.Context())
	kv, sendFirst := delayingFirst(n.kv, cancel)
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
	if late, err := sendFirst(); err != nil || late.Succeeded {
		t.Errorf("the late commit: %+v, %v", late, err)
	}
	registrytest.Put(t, n, claim("v", "b"))
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
	client := parallelWithEtcd(t)
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

// TestFieldsOfALaterReleaseSurvive has nodes rewrite records that have an unknown field. One node has seen the record
// being written; the other one has loaded it.
func TestFieldsOfALaterReleaseSurvive(t *testing.T) {
	client := parallelWithEtcd(t)
	n := newNode(t, client, "node")
	later := func(c registry.Claim) {
		t.Helper()
		if _, err := client.Put(t.Context(), n.record(c.Key()), fmt.Sprintf(
			`{"volume":{"plugin":"p","external_id":%q},"alloc":%q,"request":"r","node":"n","later":"kept"}`,
			c.Volume.External, c.Alloc)); err != nil {
			t.Fatal(err)
		}
	}
	later(claim("v", "seen"))
	later(claim("v", "loaded"))
	loading := newNode(t, client, "loading")
	for at, c := range map[*testNode]registry.Claim{n: claim("v", "seen"), loading: claim("v", "loaded")} {
		at.catchUp(t)
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
	client := parallelWithEtcd(t)
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
