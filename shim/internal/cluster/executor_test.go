package cluster

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"holdfast/registry"
)

// TestExecutorIsOneNode moves the execution of a plugin from a node that has lost its lease to another node, on which
// the plugin then fails.
func TestExecutorIsOneNode(t *testing.T) {
	client := parallelWithEtcd(t)
	a := newMember(t, client, "a")
	a.await(t, true)()
	b := newMember(t, client, "b")
	if _, err := b.Executors.Sending(t.Context(), testKey); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("a second executor: %v", err)
	}
	done := a.await(t, true) // a call under way
	a.cut()
	b.await(t, true)()
	if _, err := a.Executors.Sending(t.Context(), testKey); err == nil {
		t.Error("the first executor still sends")
	}
	if e := b.executor(t); len(e.Former) != 1 || e.Former[0] != "a" {
		t.Errorf("former executors are %v while a call of a is under way", e.Former)
	}
	done()
	until(t, "the end of the call is known", func() bool { return len(b.executor(t).Former) == 0 })
	b.setHealthy(false)
	b.await(t, false)
	if e := b.executor(t); e.Holder != "" {
		t.Errorf("%s, whose plugin is unhealthy", e)
	}
}

// TestExecutorStopsBeforeItsLeaseEnds suspends the machine of an executor. When the machine wakes up, it sends nothing,
// although its copy still names it as the executor.
func TestExecutorStopsBeforeItsLeaseEnds(t *testing.T) {
	a := newMember(t, parallelWithEtcd(t), "a")
	a.await(t, true)()
	a.cut()
	a.boot.Add(int64(2 * time.Second))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := a.Executors.Sending(ctx, testKey); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("it sends: %v", err)
	}
}

// TestExecutorGoesOnWithItsLease has a plugin become healthy, and a call made, while the lease was not renewed in time.
// Once etcd has renewed the lease, the node is the executor, and sends the call.
func TestExecutorGoesOnWithItsLease(t *testing.T) {
	a := newMember(t, parallelWithEtcd(t), "a")
	a.makeFormer(t)
	a.boot.Add(int64(2 * time.Second))
	a.setHealthy(true)
	a.await(t, true)()
	a.boot.Add(int64(2 * time.Second))
	done, err := a.Executors.Sending(t.Context(), testKey)
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
	client := parallelWithEtcd(t)
	a := newMember(t, client, "a")
	a.await(t, true)()
	a.setHealthy(false)
	waited := make(chan error)
	go func() {
		_, err := a.Executors.Table(waitingPlugins{}).Await(t.Context(), registry.RoleController, "p")
		waited <- err
	}()
	newMember(t, client, "b")
	if err := <-waited; err == nil || !strings.Contains(err.Error(), "node b is the executor") {
		t.Errorf("the wait has ended: %v", err)
	}
}
