package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/internal/etcdtest"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// TestCopyAfterCompaction stops a node while etcd changes records and forgets these changes. Afterwards the node's copy
// has them, deletions included.
func TestCopyAfterCompaction(t *testing.T) {
	t.Parallel()
	client := etcdtest.Start(t)
	n, other := newNode(t, client, "node"), newNode(t, client, "other")
	registrytest.Put(t, n, claim("v", "gone"), claim("v", "stays"))
	n.stop()
	if _, err := registrytest.Write(t.Context(), other, registry.Change{
		Put: []registry.Record{claim("v", "new")}, Delete: []registry.Key{claim("v", "gone").Key()}}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Compact(t.Context(), other.catchUp(t)); err != nil {
		t.Fatal(err)
	}
	n.start(t)
	n.catchUp(t)
	look(t, n, func(v registry.View) {
		var allocs []registry.AllocID
		for _, c := range v.AllClaims() {
			allocs = append(allocs, c.Alloc)
		}
		slices.Sort(allocs)
		if !slices.Equal(allocs, []registry.AllocID{"new", "stays"}) {
			t.Errorf("the copy has the claims of %v", allocs)
		}
	})
}

// watcher ends watches on request.
type watcher struct {
	clientv3.Watcher
	compact atomic.Bool // the next answer says that the changes were compacted
	calls   []time.Time
	fail    int // this many watches fail at once
}

func (w *watcher) Watch(ctx context.Context, key string, o ...clientv3.OpOption) clientv3.WatchChan {
	out := make(chan clientv3.WatchResponse, 1)
	w.calls = append(w.calls, time.Now())
	if len(w.calls) <= w.fail {
		out <- clientv3.WatchResponse{Canceled: true}
		close(out)
		return out
	}
	in := w.Watcher.Watch(ctx, key, o...)
	go func() {
		defer close(out)
		for answer := range in {
			if w.compact.CompareAndSwap(true, false) {
				answer = clientv3.WatchResponse{Canceled: true, CompactRevision: answer.Header.Revision}
			}
			select {
			case out <- answer:
			case <-ctx.Done():
			}
			if answer.Canceled {
				return
			}
		}
	}()
	return out
}

// newWatching starts a node whose etcd client uses the watcher.
func newWatching(t *testing.T, client *clientv3.Client, w *watcher) *testNode {
	t.Helper()
	own, err := clientv3.New(clientv3.Config{Endpoints: client.Endpoints()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = own.Close() })
	w.Watcher = own.Watcher
	own.Watcher = w
	return newNode(t, own, "node")
}

// TestCommitWhoseEventIsCompacted has etcd forget a commit before the node's copy has it. The commit ends, and is made
// once only. This holds with and without etcd's answer.
func TestCommitWhoseEventIsCompacted(t *testing.T) {
	t.Parallel()
	for name, lost := range map[string]bool{"answered": false, "answer lost": true} {
		t.Run(name, func(t *testing.T) {
			w := &watcher{}
			n := newWatching(t, parallelWithEtcd(t), w)
			n.count(t)
			n.kv = losing(n.kv, func() bool { was := lost; lost = false; return was })
			uncertain := lost
			w.compact.Store(true)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			at, err := n.Commit(ctx, counting)
			if uncertain != errors.Is(err, registry.ErrUncertain) || !uncertain && (err != nil || at == 0) {
				t.Errorf("the commit ends with %d, %v", at, err)
			}
			look(t, n, func(v registry.View) {
				if counter, _ := v.Volume(counterName); counter.Capacity != 2 {
					t.Errorf("counted to %d", counter.Capacity)
				}
				if !missed(v) {
					t.Error("no event says that events are missing")
				}
			})
		})
	}
}

func missed(v registry.View) bool {
	events, _ := v.Events(0, registry.MaxEvents)
	return slices.ContainsFunc(events, func(e registry.Event) bool { return e.Kind == registry.EventMissed })
}

// TestCopyIsLoadedAnew starts a node whose copy lacks a record, although the copy has a later revision.
func TestCopyIsLoadedAnew(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*registry.Copy){
		"the release before did not know the bucket": func(c *registry.Copy) { c.Buckets = c.Buckets[1:] },
		"etcd was restored from a backup":            func(c *registry.Copy) { c.Revision += 1e6 },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, parallelWithEtcd(t), "node")
			registrytest.Put(t, n, claim("v", "a"))
			n.stop()
			n.offline(t, func(s registry.State) {
				_, err := s.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
					c := v.Copies()[0]
					change(&c)
					return registry.Change{
						Put: []registry.Record{c}, Delete: []registry.Key{claim("v", "a").Key()},
					}, nil
				})
				if err != nil {
					t.Fatal(err)
				}
			})
			n.start(t)
			look(t, n, func(v registry.View) {
				if len(v.AllClaims()) != 1 || !missed(v) {
					t.Errorf("claims: %v; events are missing: %v", v.AllClaims(), missed(v))
				}
			})
		})
	}
}

// TestEtcdIsRestoredFromABackup commits at a node whose copy is ahead of etcd. The node loads its copy again.
func TestEtcdIsRestoredFromABackup(t *testing.T) {
	n := newNode(t, parallelWithEtcd(t), "node")
	if err := n.awaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	look(t, n, func(v registry.View) { registrytest.Put(t, n.local, n.copyAt(v, 1e6)) })
	_, err := registrytest.Write(t.Context(), n, registry.Change{Put: []registry.Record{claim("v", "a")}})
	if !errors.Is(err, registry.ErrUncertain) {
		t.Errorf("a commit: %v", err)
	}
	select {
	case <-n.copy.ended:
	case <-time.After(time.Minute):
		t.Error("the copy still follows etcd")
	}
}

// TestWatchesWithoutALeader has etcd end each watch at once. The node begins the next watch only after a pause.
func TestWatchesWithoutALeader(t *testing.T) {
	w := &watcher{fail: 3}
	n := newWatching(t, parallelWithEtcd(t), w)
	registrytest.Put(t, n, claim("v", "a"))
	n.stop()
	if took := w.calls[3].Sub(w.calls[0]); took < 3*retryPause {
		t.Errorf("three watches have ended within %v", took)
	}
}

// fullDisk is a store whose disk is full at times.
type fullDisk struct {
	registry.State
	full    atomic.Bool
	refused chan struct{} // of capacity 1
}

func (s *fullDisk) Commit(ctx context.Context, decisions ...registry.Decision) (registry.Seq, error) {
	if !s.full.Load() {
		return s.State.Commit(ctx, decisions...)
	}
	select {
	case s.refused <- struct{}{}:
	default:
	}
	return 0, registry.ErrExhausted
}

// TestFullDiskDelaysTheCopy fills the disk of a node while another node changes records.
func TestFullDiskDelaysTheCopy(t *testing.T) {
	client := parallelWithEtcd(t)
	other := newNode(t, client, "other")
	disk := &fullDisk{refused: make(chan struct{}, 1)}
	n := newOffline(t, client, "node")
	n.wrap = func(s registry.State) registry.State { disk.State = s; return disk }
	n.start(t)
	disk.full.Store(true)
	registrytest.Put(t, other, claim("v", "a"))
	for range 2 { // at the second refusal, the reason of the first is known
		<-disk.refused
	}
	if why := n.Problem(); !strings.Contains(why, "its disk is full: "+registry.ErrExhausted.Error()) {
		t.Errorf("problem of a node with a full disk: %q", why)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := n.Commit(ctx, deciding(claim("other", "b"))); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("a commit by an old copy: %v", err)
	}
	disk.full.Store(false)
	n.catchUp(t)
	if why := n.Problem(); why != "" {
		t.Errorf("the disk has room again, and the problem is %q", why)
	}
}

// TestNodeJoinsOnAFullDisk starts a node whose disk is full.
func TestNodeJoinsOnAFullDisk(t *testing.T) {
	disk := &fullDisk{refused: make(chan struct{}, 1)}
	disk.full.Store(true)
	n := newOffline(t, parallelWithEtcd(t), "node")
	n.wrap = func(s registry.State) registry.State { disk.State = s; return disk }
	go func() { <-disk.refused; disk.full.Store(false) }()
	n.start(t)
	n.stop()
}

// TestLeaseOfTombstonesHasEnded deletes a record, ends the lease of its tombstone in etcd, and does both once more.
func TestLeaseOfTombstonesHasEnded(t *testing.T) {
	n := newNode(t, parallelWithEtcd(t), "node")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, alloc := range []string{"a", "b"} {
		c := claim("v", alloc)
		registrytest.Put(t, n, c)
		if _, err := registrytest.Write(ctx, n, registry.Change{Delete: []registry.Key{c.Key()}}); err != nil {
			t.Fatalf("delete the claim of %s: %v", alloc, err)
		}
		_, err := n.etcd.Revoke(ctx, n.tombstones.current.Load().id)
		if err != nil && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			t.Fatal(err)
		}
	}
}

// TestFrozenCommitMissesNoDeletion delays a transaction until its node has lost its lease. Meanwhile the claim that the
// decision has read is deleted, and etcd has forgotten the deletion. The decision is made again.
func TestFrozenCommitMissesNoDeletion(t *testing.T) {
	client := parallelWithEtcd(t)
	n, other := newNode(t, client, "node"), newNode(t, client, "other")
	granted, err := client.Grant(t.Context(), 600)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(registry.NodeLease{Node: "node", Lease: int64(granted.ID)})
	if err == nil {
		_, err = client.Put(t.Context(), n.ownLease(), string(text), clientv3.WithLease(granted.ID))
	}
	if err != nil {
		t.Fatal(err)
	}
	c := claim("v", "a")
	registrytest.Put(t, n, c) // its revision is after that of the lease
	other.catchUp(t)
	n.kv = calling(n.kv, func() {
		change := registry.Change{Delete: []registry.Key{c.Key()}}
		if _, err := registrytest.Write(t.Context(), other, change); err != nil {
			t.Error(err)
		}
		for _, lease := range []clientv3.LeaseID{other.tombstones.current.Load().id, granted.ID} {
			if _, err := client.Revoke(t.Context(), lease); err != nil {
				t.Error(err)
			}
		}
	})
	found, decided := false, 0
	if _, err := n.State.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
		_, found = v.Get(c.Key()).(registry.Claim)
		decided++
		return registry.Change{Put: []registry.Record{volumeOf("vol", "vol")}}, nil
	}); err != nil || found || decided < 2 {
		t.Errorf("decided %d times, the last time with a deleted claim: %v; %v", decided, found, err)
	}
}

// TestLeaseLostAndBackInOneBatch has a node lose its lease and get another one, or the reverse, in one batch of events.
func TestLeaseLostAndBackInOneBatch(t *testing.T) {
	s := &State{keys: keys{"/holdfast/c/"}}
	lease := registry.NodeLease{Node: "b", Lease: 7}
	text, err := json.Marshal(lease)
	if err != nil {
		t.Fatal(err)
	}
	key := []byte(s.record(lease.Key()))
	lost := &clientv3.Event{Type: clientv3.EventTypeDelete, Kv: &mvccpb.KeyValue{Key: key}}
	back := &clientv3.Event{Type: clientv3.EventTypePut, Kv: &mvccpb.KeyValue{Key: key, Value: text, Lease: 7}}
	for _, test := range []struct {
		alive  bool
		events []*clientv3.Event
		want   []registry.EventKind
	}{
		{true, []*clientv3.Event{lost, back}, []registry.EventKind{registry.EventNodeSuspect, registry.EventNodeBack}},
		{true, []*clientv3.Event{back}, nil},
		{false, []*clientv3.Event{back, lost}, []registry.EventKind{registry.EventNodeBack, registry.EventNodeSuspect}},
	} {
		store := openStore(t, nil)
		if test.alive {
			registrytest.Put(t, store, lease)
		}
		var got []registry.EventKind
		look(t, store, func(v registry.View) {
			for _, e := range s.leaseEvents(v, test.events) {
				got = append(got, e.Kind)
			}
		})
		if !slices.Equal(got, test.want) {
			t.Errorf("alive %v, %d changes: %v, want %v", test.alive, len(test.events), got, test.want)
		}
	}
}
