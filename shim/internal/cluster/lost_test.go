package cluster

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/controller"
)

// testRelease deletes the claims of lost nodes, and this node's records of published volumes.
type testRelease struct {
	*member
	t    *testing.T
	mu   sync.Mutex
	why  string // the reason given to Lose
	busy bool   // mounts cannot be taken down
}

func (r *testRelease) ReleaseLost(ctx context.Context, k registry.AttachmentKey) error {
	_, err := r.Commit(ctx, func(v registry.View) (change registry.Change, err error) {
		for _, c := range v.Claims(k.Volume) {
			if c.Node == k.Node {
				change.Delete = append(change.Delete, c.Key())
			}
		}
		return change, nil
	})
	return err
}

func (r *testRelease) Lose(ctx context.Context, why string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.why = why; r.busy {
		return nil
	}
	_, err := r.Commit(ctx, func(v registry.View) (change registry.Change, err error) {
		for _, ref := range v.AllRefs() {
			change.Delete = append(change.Delete, ref.Key())
		}
		return change, nil
	})
	return err
}

// TestLostNodeComesBack follows a lost node. While the node is suspect, it keeps its claims; out of service, it loses
// them. When it is back, it uses no volume and executes no plugin before its mounts are gone. It comes back with a new
// shim, or with the same shim after a partition. If it was drained before, it is drained again.
func TestLostNodeComesBack(t *testing.T) {
	t.Parallel()
	restart := func(t *testing.T, a *member) *member { return a.restart(t) }
	same := func(t *testing.T, a *member) *member { a.run(t, a.session.Run); return a }
	t.Run("a new shim", func(t *testing.T) { comeBack(t, false, restart) })
	t.Run("the same one", func(t *testing.T) { comeBack(t, false, same) })
	t.Run("drained", func(t *testing.T) { comeBack(t, true, restart) })
}

func comeBack(t *testing.T, drained bool, back func(*testing.T, *member) *member) {
	client := parallelWithEtcd(t)
	a, b := newMember(t, client, "a"), newMember(t, client, "b")
	a.await(t, true)()
	b.run(t, NewReaper(b.Node, &testRelease{member: b, t: t}, nil).Run)
	held := claimOf("a", "vol", "alloc")
	registrytest.Put(t, a, held)
	ref := refOf(held)
	registrytest.Put(t, a, ref)
	use := registry.EndpointUse{
		Volume: claim("of a client", "").Volume, Node: "a", Call: registry.NodePublishRPC, Target: "/mnt",
	}
	attached, other := use, use
	attached.Call, attached.Target = registry.ControllerPublishRPC, "a-id"
	other.Node = "b"
	registrytest.Put(t, a, use, attached, other)
	look(t, a, func(v registry.View) {
		if err := a.Admitted(v); err != nil {
			t.Errorf("a node with a lease is not admitted: %v", err)
		}
	})
	deadline := time.Unix(1e9, 0).UTC()
	state := registry.NodeReady // of node a in the end
	if drained {
		state = registry.NodeDraining
		if _, err := a.Drain(t.Context(), "a", true, deadline, "bob", "disks"); err != nil {
			t.Fatal(err)
		}
	}
	a.die(t, b)
	b.await(t, true)() // b executes the plugin now
	look(t, b, func(v registry.View) {
		if len(v.Claims(held.Volume)) != 1 {
			t.Error("a suspect node has lost its claim")
		}
	})
	if _, err := b.OutOfService(t.Context(), "a", "alice", "dead"); err != nil {
		t.Fatal(err)
	}
	b.see(t, "the claim is gone", func(v registry.View) bool { return len(v.Claims(held.Volume)) == 0 })
	b.see(t, "the client's mount is forgotten", func(v registry.View) bool {
		return len(v.EndpointUses(use.Volume)) == 2
	})
	look(t, b, func(v registry.View) {
		for _, left := range v.EndpointUses(use.Volume) {
			if left.Key() == use.Key() {
				t.Errorf("a use of a lost node is left: %s", left)
			}
		}
	})

	a = back(t, a)
	release := &testRelease{member: a, t: t, busy: true}
	a.run(t, NewReaper(a.Node, release, release).Run)
	b.setHealthy(false) // so no other node executes the plugin
	b.await(t, false)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if err := a.AwaitAdmitted(ctx, func(what string) {
		if strings.Contains(what, "out-of-service by alice: dead") {
			cancel()
		}
	}); !errors.Is(err, context.Canceled) {
		t.Errorf("a node with mounts of its last epoch: %v", err)
	}
	if e := a.executor(t); e.Holder == "a" {
		t.Errorf("it executes the plugin: %s", e)
	}
	release.mu.Lock()
	release.busy = false
	if !strings.Contains(release.why, "out-of-service by alice") {
		t.Errorf("the allocs were told %q", release.why)
	}
	release.mu.Unlock()
	a.changes.fire()
	a.seeState(t, "a", state)
	look(t, a, func(v registry.View) {
		r, _ := v.Node("a")
		if drained && (r.By != "bob" || r.Reason != "disks" || !r.Deadline.Equal(deadline) ||
			r.Drain != registry.Drain{}) {
			t.Errorf("the drain has become %+v", r)
		}
	})
	if err := a.AwaitAdmitted(t.Context(), func(string) {}); err != nil {
		t.Error(err)
	}
	a.await(t, true)()
}

// TestFenceIsRepeatedUntilItSucceeds has a fence callback fail twice. Only one node at a time calls it. The lost node
// keeps its state until the callback succeeds.
func TestFenceIsRepeatedUntilItSucceeds(t *testing.T) {
	client := parallelWithEtcd(t)
	a, b, c := newMember(t, client, "a"), newMember(t, client, "b"), newMember(t, client, "c")
	var mu sync.Mutex
	calls := map[string]int{}
	fence := func(m *member) func(context.Context, registry.NodeName) error {
		return func(_ context.Context, node registry.NodeName) error {
			mu.Lock()
			defer mu.Unlock()
			look(t, m, func(v registry.View) {
				if r, _ := v.Node(node); node != "a" || r.State != registry.NodeReady || r.Epoch != 0 {
					t.Errorf("fence %s, which is %+v", node, r)
				}
			})
			if calls[m.name]++; calls[m.name] < 3 {
				return errors.New("no route to the power switch")
			}
			return nil
		}
	}
	for _, m := range []*member{b, c} {
		m.fence = fence(m)
		m.run(t, m.fenceLost)
	}
	a.die(t, b)
	b.see(t, "the failure", func(v registry.View) bool {
		r, _ := v.Node("a")
		return strings.Contains(v.NodeStatus(r, nil, nil).Reason, "no route to the power switch")
	})
	b.seeState(t, "a", registry.NodeFenced)
	look(t, b, func(v registry.View) {
		if r, _ := v.Node("a"); r.Epoch != 1 || r.Fencing != (registry.Fencing{}) {
			t.Errorf("%+v", r)
		}
	})
	mu.Lock()
	defer mu.Unlock()
	if len(calls) != 1 || calls["b"]+calls["c"] != 3 {
		t.Errorf("calls by node: %v", calls)
	}
}

// TestNextShimDoesNotWaitAgainToFence asks a shim how long it waits before it fences a suspect node, and before it
// retries a fence. The waits and tries of an earlier shim count.
func TestNextShimDoesNotWaitAgainToFence(t *testing.T) {
	client := parallelWithEtcd(t)
	a, b := newMember(t, client, "a"), newMember(t, client, "b")
	a.die(t, b)
	look(t, b, func(v registry.View) {
		since := v.SuspectSince("a")
		f := fencer{Node: &Node{session: b.session, Executors: &Executors{}}}
		for waited, want := range map[time.Duration]time.Duration{
			-time.Hour: b.session.ttl, 0: b.session.ttl, time.Second: b.session.ttl - time.Second, time.Hour: 0,
		} {
			f.Executors.now = func() time.Time { return since.Add(waited) }
			if got := f.grace(v, "a"); got != want {
				t.Errorf("after %s: %s more, want %s", waited, got, want)
			}
		}
		f.Executors.now = func() time.Time { return since }
		for tries, limits := range map[uint64][2]time.Duration{0: {0, 0}, 1: {time.Second / 2, time.Second},
			20: {30 * time.Second, time.Minute}} {
			got := f.pause(registry.Fencing{Tries: tries, Tried: since})
			if later := f.pause(registry.Fencing{Tries: tries, Tried: since.Add(-time.Hour)}); later != 0 ||
				got < limits[0] || got > limits[1] {
				t.Errorf("after %d tries: %s at once, %s an hour later", tries, got, later)
			}
		}
		if got := f.grace(v, "b"); got != b.session.ttl {
			t.Errorf("a node without an event: %s", got)
		}
	})
}

// TestNextNodeFinishesForADeadOne has one node die while it fences a lost node, and another node die while it releases
// the volumes of the lost node. The next node finishes both.
func TestNextNodeFinishesForADeadOne(t *testing.T) {
	client := parallelWithEtcd(t)
	a, b, c := newMember(t, client, "a"), newMember(t, client, "b"), newMember(t, client, "c")
	c.setHealthy(false)
	a.setHealthy(false)
	b.await(t, true)()
	for _, volume := range []string{"vol-1", "vol-2"} {
		held := claimOf("a", volume, "alloc")
		registrytest.Put(t, a, held)
	}
	fencing := make(chan struct{})
	b.fence = func(ctx context.Context, _ registry.NodeName) error {
		close(fencing)
		<-ctx.Done()
		return context.Cause(ctx)
	}
	b.run(t, b.fenceLost)
	a.die(t, c)
	<-fencing
	b.die(t, c)
	c.fence = func(_ context.Context, node registry.NodeName) error {
		if node == "b" {
			return errors.New("it is alive")
		}
		return nil
	}
	c.run(t, c.fenceLost)
	c.seeState(t, "a", registry.NodeFenced)

	d := newMember(t, client, "d")
	d.await(t, true)()
	released := make(chan struct{})
	first := sync.OnceFunc(func() { close(released) })
	d.run(t, NewReaper(d.Node, releaseFunc(func(ctx context.Context, k registry.AttachmentKey) error {
		if k.Volume.External == "vol-2" {
			<-ctx.Done()
			return context.Cause(ctx)
		}
		defer first()
		return (&testRelease{member: d, t: t}).ReleaseLost(ctx, k)
	}), nil).Run)
	<-released
	d.die(t, c)
	c.run(t, NewReaper(c.Node, &testRelease{member: c, t: t}, nil).Run)
	c.setHealthy(true)
	c.see(t, "both claims are gone", func(v registry.View) bool { return len(v.AllClaims()) == 0 })
}

type releaseFunc func(context.Context, registry.AttachmentKey) error

func (f releaseFunc) ReleaseLost(ctx context.Context, k registry.AttachmentKey) error {
	return f(ctx, k)
}

// TestNodeThatIsBackAwaitsItsFence starts a node again while another node fences it. The node uses no volume before the
// outcome is known. Otherwise its claims could be released during the use.
func TestNodeThatIsBackAwaitsItsFence(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		outcome error
		dies    bool // the other node dies
		epoch   uint64
	}{
		"success": {epoch: 1}, "failure": {outcome: errors.New("no route to the power switch")},
		"the other node dies": {outcome: context.Canceled, dies: true},
	} {
		t.Run(name, func(t *testing.T) {
			client := parallelWithEtcd(t)
			a, b := newMember(t, client, "a"), newMember(t, client, "b")
			answer := make(chan struct{})
			end := sync.OnceFunc(func() { close(answer) })
			b.fence = func(context.Context, registry.NodeName) error { <-answer; return c.outcome }
			b.run(t, b.fenceLost)
			t.Cleanup(end)
			a.die(t, b)
			b.see(t, "the mark", func(v registry.View) bool { r, _ := v.Node("a"); return r.Fencing.By == "b" })
			a = a.restart(t)
			release := &testRelease{member: a, t: t}
			a.run(t, NewReaper(a.Node, release, release).Run)
			waited := false
			if err := a.AwaitAdmitted(t.Context(), func(what string) {
				if !strings.Contains(what, "is being fenced by node b") {
					return
				}
				if waited = true; c.dies {
					b.die(t, a)
				} else {
					end()
				}
			}); err != nil || !waited {
				t.Errorf("a node that is being fenced has waited: %v; %v", waited, err)
			}
			look(t, a, func(v registry.View) {
				r, _ := v.Node("a")
				if r.Epoch != c.epoch || r.State != registry.NodeReady || r.Fencing != (registry.Fencing{}) {
					t.Errorf("%+v", r)
				}
			})
		})
	}
}

// TestFencedNodeThatIsBackEndsItsCalls declares a node fenced that is alive again and has a controller call under way.
// The next executor may send other calls only after this call has ended.
func TestFencedNodeThatIsBackEndsItsCalls(t *testing.T) {
	client := parallelWithEtcd(t)
	a, b := newMember(t, client, "a"), newMember(t, client, "b")
	done := a.await(t, true)
	held := claim("vol", "alloc")
	registrytest.Put(t, a, refOf(held)) // while a volume is mounted, the node executes nothing
	if _, err := b.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
		r, _ := v.Node("a")
		return b.lostChange(v, r, registry.NodeFenced, registry.EventNodeFenced, "", "power off"), nil
	}); err != nil {
		t.Fatal(err)
	}
	b.await(t, true)()
	if former := b.executor(t).Former; !slices.Equal(former, []registry.NodeName{"a"}) {
		t.Errorf("former executors are %v during the call", former)
	}
	done()
	b.see(t, "the end of the call", func(v registry.View) bool { e, _ := v.Executor("p"); return len(e.Former) == 0 })
}

// TestSilentEtcdDelaysOnlyDecisions loses every answer of etcd. A commit of the node's own records succeeds, and all
// records can be read. A commit of shared records, or its refusal, ends with its caller's deadline, and says since when
// etcd has not answered.
func TestSilentEtcdDelaysOnlyDecisions(t *testing.T) {
	n := newNode(t, parallelWithEtcd(t), "n")
	registrytest.Put(t, n, claim("vol", "earlier"))
	var silent atomic.Bool
	silent.Store(true)
	n.kv = losing(n.kv, silent.Load)
	commit := func(ctx context.Context, r registry.Record) error {
		_, err := n.Commit(ctx, deciding(r))
		return err
	}
	c := claim("vol", "alloc")
	if err := commit(t.Context(), refOf(c)); err != nil {
		t.Errorf("a record of the node: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := n.Commit(ctx, func(v registry.View) (registry.Change, error) {
		return registry.Change{}, errors.Join(errTaken, fmt.Errorf("%d claims", len(v.AllClaims())))
	})
	if !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("a refusal that could not be confirmed: %v", err)
	}
	look(t, n, func(v registry.View) {
		if len(v.AllClaims()) != 1 || len(v.AllRefs()) != 1 {
			t.Errorf("claims %v, refs %v", v.AllClaims(), v.AllRefs())
		}
	})
	ctx, cancel = context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := commit(ctx, c); err == nil || !strings.Contains(err.Error(), "etcd has not answered since 20") {
		t.Errorf("a shared record: %v", err)
	}
	silent.Store(false)
	if err := commit(t.Context(), c); err != nil {
		t.Errorf("etcd is back: %v", err)
	}
}

// counted is a state that counts how often all claims are listed.
type counted struct {
	registry.State
	lists atomic.Int32
}

type countedReader struct {
	registry.Reader
	lists *atomic.Int32
}

func (s *counted) View(ctx context.Context, read func(registry.View) error) error {
	return s.State.View(ctx, func(v registry.View) error {
		return read(registry.View{Reader: countedReader{v.Reader, &s.lists}})
	})
}

func (r countedReader) Paths(b registry.Bucket, prefix string) iter.Seq[string] {
	if b == registry.BucketClaims {
		r.lists.Add(1)
	}
	return r.Reader.Paths(b, prefix)
}

// TestManyClaimsOfALostNode releases more claims of a volume than etcd deletes in one transaction. After that, the
// reaper does not list the claims again for the same lost node.
func TestManyClaimsOfALostNode(t *testing.T) {
	client := parallelWithEtcd(t)
	n := newNode(t, client, "n")
	held := claimOf("gone", "vol", "alloc")
	records := []registry.Record{registry.Node{Name: "gone", State: registry.NodeFenced, Epoch: 1}}
	for i := range 300 {
		held.Alloc = registry.AllocID(fmt.Sprint("alloc-", i))
		records = append(records, held)
	}
	registrytest.Put(t, n, records...)
	calls := callsOf(n.State)
	lost := controller.New(calls, nil, nil, hclog.NewNullLogger())
	local := &counted{State: n.local}
	state := New(local, client, t.Name(), "n")
	x := &testPlugins{}
	executors := newExecutors(newSession(state, leaseTTL), x, time.Now, hclog.NewNullLogger())
	r := NewReaper(&Node{State: state, Executors: executors}, nil, nil)
	due := func() []registry.AttachmentKey {
		list, err := r.due(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	for i, want := range []int{1, 1, 0, 0} { // due until the claims are released
		list := due()
		if len(list) != want {
			t.Errorf("due: %v", list)
		}
		if i == 1 {
			if err := lost.ReleaseLost(t.Context(), list[0]); err != nil {
				t.Fatal(err)
			}
		}
	}
	if lists := local.lists.Load(); lists != 3 {
		t.Errorf("claims were listed %d times", lists)
	}
}
