package cluster

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/registry"
)

const leaseTTL = 10 * time.Second

// TestLateRequestDoesNotBindAnotherLease delays the request that binds a node's key to a lease. Meanwhile the next
// request binds the key to another lease. The key stays with that lease, which is renewed.
func TestLateRequestDoesNotBindAnotherLease(t *testing.T) {
	client := parallelWithEtcd(t)
	n := newNode(t, client, "node")
	kv, sendFirst := delayingFirst(n.kv, func() {})
	n.kv = kv
	s := newSession(n.State, leaseTTL)
	if err := s.renew(t.Context()); err == nil {
		t.Fatal("the lost request succeeded")
	}
	for range 2 {
		if err := s.renew(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if late, err := sendFirst(); err != nil || late.Succeeded {
		t.Errorf("the late request: %+v, %v", late, err)
	}
	answer, err := client.Get(t.Context(), n.ownLease())
	if err != nil || len(answer.Kvs) != 1 || answer.Kvs[0].Lease != s.Lease() {
		t.Errorf("the key is bound to %v, not to %d: %v", answer.Kvs, s.Lease(), err)
	}
	newShim(t, n)
	if err := s.renew(t.Context()); err != nil { // a renewal needs no transaction
		t.Error(err)
	}
	if _, err := client.Revoke(t.Context(), s.lease); err != nil {
		t.Fatal(err)
	}
	if err := s.renew(t.Context()); !errors.Is(err, registry.ErrFenced) {
		t.Errorf("an earlier shim gets a lease: %v", err)
	}
}

// TestTombstoneWaitsNoLongerThanItsCaller has a deletion wait for the lease of tombstones, which etcd has yet to grant
// to another deletion. The wait ends with the caller's deadline.
func TestTombstoneWaitsNoLongerThanItsCaller(t *testing.T) {
	n := newNode(t, parallelWithEtcd(t), "node")
	n.tombstones.granting <- struct{}{}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := n.leaseOf(ctx, &n.tombstones); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no lease: %v", err)
	}
	<-n.tombstones.granting
	first, err := n.leaseOf(t.Context(), &n.tombstones)
	if again, err2 := n.leaseOf(ctx, &n.tombstones); err != nil || err2 != nil || first != again {
		t.Errorf("leases %d, %d: %v, %v", first, again, err, err2)
	}
}

// TestFullEtcdThatIsDefragmentedHearsFromTheNode runs with a full etcd that renews leases, but answers no change.
func TestFullEtcdThatIsDefragmentedHearsFromTheNode(t *testing.T) {
	n := newNode(t, parallelWithEtcd(t), "node")
	s := newSession(n.State, 2*time.Second)
	if err := s.renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.kv = withCommit(n.kv, func(ctx context.Context, _ sendTxn) (*clientv3.TxnResponse, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
	n.health.recordFull(rpctypes.ErrNoSpace)
	s.tryChange(t.Context())
	if s.Lease() == 0 {
		t.Error("the lease was not renewed in time, because a change was not answered")
	}
}
