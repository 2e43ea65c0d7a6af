package cluster

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/internal/etcdtest"
	"holdfast/internal/proc"
	"holdfast/registry"
)

var testKey = registry.ExecutorKey{Plugin: "p"}

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

// executing is a node that becomes the executor of plugin p whenever it can.
type executing struct {
	*testNode
	*Executors
	plugins testPlugins
	boot    atomic.Int64 // added to CLOCK_BOOTTIME
	busy    atomic.Bool  // the plugin answers repeated calls with ABORTED
	asked   atomic.Int64 // how often a call was repeated
	cut     func()       // stops the renewal of the lease
}

func newExecuting(t *testing.T, n *testNode) *executing {
	x := &executing{testNode: n}
	state := n.State // keep it, as a later start replaces it
	s := newSession(state)
	s.ttl = 2 * time.Second
	s.boot = func() time.Duration { return proc.BootTime() + time.Duration(x.boot.Load()) }
	x.Executors = newExecutors(s, &x.plugins, time.Now, hclog.NewNullLogger())
	x.repeat = func(ctx context.Context, at registry.Instance, call registry.LateCall) error {
		defer x.asked.Add(1)
		if at.Plugin == "a" {
			<-ctx.Done()
			return context.Cause(ctx)
		}
		if x.busy.Load() || call.Failed {
			return &registry.CallError{Code: "ABORTED", Outcome: registry.OutcomeUncertain}
		}
		return nil
	}
	ctx, cancel := context.WithCancel(t.Context())
	renewing, cut := context.WithCancel(ctx)
	x.cut = cut
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Run(renewing) })
	wg.Go(func() { _ = x.Run(ctx) })
	wg.Go(func() { _ = x.HandOver(ctx) })
	wg.Go(func() { // stands for the store's listener
		for ctx.Err() == nil {
			changed := state.copy.next()
			x.Executors.changed.fire()
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait() })
	return x
}

// setHealthy changes the health of plugin p on the node.
func (x *executing) setHealthy(healthy bool) {
	x.plugins.sick.Store(!healthy)
	x.Executors.changed.fire()
}

func (x *executing) Run(ctx context.Context) error { return x.Executors.Run(ctx) }

// await waits until the node may send calls of plugin p or, if may is false, until it may not.
func (x *executing) await(t *testing.T, may bool) (done func()) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; {
		done, err := x.Sending(t.Context(), testKey)
		if may == (err == nil) {
			return done
		}
		if err == nil {
			done()
		}
		if time.Now().After(end) {
			t.Fatalf("node %s may send: %v, wanted %v", x.name, err, may)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (x *executing) executor(t *testing.T) (e registry.Executor) {
	look(t, x.testNode.State, func(v registry.View) { e, _ = v.Executor("p") })
	return e
}

// TestExecutorIsOneNode moves the execution of a plugin from a node that has lost its lease to another node, on which
// the plugin then fails.
func TestExecutorIsOneNode(t *testing.T) {
	client := etcdtest.Start(t)
	a := newExecuting(t, newNode(t, client, "a"))
	a.await(t, true)()
	b := newExecuting(t, newNode(t, client, "b"))
	if _, err := b.Sending(t.Context(), testKey); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("a second executor: %v", err)
	}
	done := a.await(t, true) // a call under way
	a.cut()
	b.await(t, true)()
	if _, err := a.Sending(t.Context(), testKey); err == nil {
		t.Error("the first executor still sends")
	}
	if e := b.executor(t); len(e.Former) != 1 || e.Former[0] != "a" {
		t.Errorf("former executors are %v while a call of a is under way", e.Former)
	}
	done()
	for end := time.Now().Add(time.Minute); len(b.executor(t).Former) > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("former executors are %v after the call", b.executor(t).Former)
		}
	}
	b.setHealthy(false)
	b.await(t, false)
	if e := b.executor(t); e.Holder != "" {
		t.Errorf("%s, whose plugin is unhealthy", e)
	}
}

// TestExecutorStopsBeforeItsLeaseEnds suspends the machine of an executor. When the machine wakes up, it sends nothing,
// although its copy still names it as the executor.
func TestExecutorStopsBeforeItsLeaseEnds(t *testing.T) {
	a := newExecuting(t, newNode(t, etcdtest.Start(t), "a"))
	a.await(t, true)()
	a.cut()
	a.boot.Add(int64(2 * time.Second))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := a.Sending(ctx, testKey); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("it sends: %v", err)
	}
}

// TestExecutorGoesOnWithItsLease has a plugin become healthy, and a call made, while the lease was not renewed in time.
// Once etcd has renewed the lease, the node is the executor, and sends the call.
func TestExecutorGoesOnWithItsLease(t *testing.T) {
	a := newExecuting(t, newNode(t, etcdtest.Start(t), "a"))
	a.await(t, true)()
	a.setHealthy(false)
	a.await(t, false)
	a.boot.Add(int64(2 * time.Second))
	a.setHealthy(true)
	a.await(t, true)()
	a.boot.Add(int64(2 * time.Second))
	done, err := a.Sending(t.Context(), testKey)
	if err != nil {
		t.Fatal(err)
	}
	done()
}

// waitingPlugins is an empty table of plugins. Await returns only at the end of ctx.
type waitingPlugins struct{ noPlugins }

func (waitingPlugins) Await(
	ctx context.Context, _ registry.Role, _ registry.PluginID,
) (i registry.Instance, err error) {
	<-ctx.Done()
	return i, context.Cause(ctx)
}

// TestWaitForAControllerEndsAtTheNextExecutor waits for a controller on a node whose own one has failed. The wait ends
// once another node is the executor.
func TestWaitForAControllerEndsAtTheNextExecutor(t *testing.T) {
	client := etcdtest.Start(t)
	a := newExecuting(t, newNode(t, client, "a"))
	a.await(t, true)()
	a.setHealthy(false)
	waited := make(chan error)
	go func() {
		_, err := a.Table(waitingPlugins{}).Await(t.Context(), registry.RoleController, "p")
		waited <- err
	}()
	newExecuting(t, newNode(t, client, "b"))
	if err := <-waited; err == nil || !strings.Contains(err.Error(), "node b is the executor") {
		t.Errorf("the wait has ended: %v", err)
	}
}
