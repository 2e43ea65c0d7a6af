package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/internal/proc"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// session keeps the lease of this node's shim. The end of a lease never frees a claim: it makes the node suspect, and
// lets other nodes become the executors of its plugins.
type session struct {
	state *State
	ttl   time.Duration        // how long the node counts as alive after etcd has last heard from it
	boot  func() time.Duration // CLOCK_BOOTTIME, which also advances while the machine is suspended
	valid broadcast            // fires when the lease becomes valid again

	renewed func()        // closes first
	first   chan struct{} // closed once this shim has renewed the lease

	mu    sync.Mutex // guards the fields below
	lease clientv3.LeaseID
	until time.Duration // the lease is certainly valid before this time
}

func newSession(s *State, ttl time.Duration) *session {
	first := make(chan struct{})
	return &session{state: s, ttl: ttl, boot: proc.BootTime, first: first,
		renewed: sync.OnceFunc(func() { close(first) })}
}

// awaitFirst waits until this shim has renewed the lease for the first time, or ctx ends.
func (s *session) awaitFirst(ctx context.Context) {
	select {
	case <-s.first:
	case <-ctx.Done():
	}
}

// Lease returns the ID of a lease that is certainly valid now; 0: there is none.
func (s *session) Lease() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.boot() >= s.until {
		return 0
	}
	return int64(s.lease)
}

// Run keeps the lease until ctx ends or this shim is fenced. The next shim of the node takes the lease over; without
// one the lease expires.
func (s *session) Run(ctx context.Context) error {
	if err := s.state.awaitReady(ctx); err != nil {
		return err
	}
	lease, err := viewed(ctx, s.state, s.state.leaseIn)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.lease = clientv3.LeaseID(lease)
	s.mu.Unlock()
	for {
		s.state.health.recordRequest()
		err := s.renew(ctx)
		s.state.health.recordFull(err)
		s.tryChange(ctx)
		wait := s.ttl / 3
		if errors.Is(err, registry.ErrFenced) {
			return err
		}
		if err != nil {
			wait = s.ttl / 20
		}
		if !intent.Sleep(ctx, wait) {
			return context.Cause(ctx)
		}
	}
}

// tryChange makes a change in etcd if etcd has refused one because it was full, to find out whether it still is full. A
// member that is being defragmented may renew leases but not answer a change for a long time, so the try is short.
func (s *session) tryChange(ctx context.Context) {
	if s.state.health.fullError() == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, s.ttl/20)
	defer cancel()
	_, _ = s.state.changeBarrier(ctx)
}

// renew renews the lease. If there is none, or etcd has ended it, it gets a new one. It returns an ErrFenced if another
// shim of this node is active.
func (s *session) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.ttl/3)
	defer cancel()
	s.mu.Lock()
	lease := s.lease
	s.mu.Unlock()
	if lease == 0 {
		return s.grant(ctx)
	}
	sent := s.boot()
	_, err := s.state.client.KeepAliveOnce(ctx, lease)
	if errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return s.grant(ctx)
	}
	if err == nil {
		s.extend(lease, sent)
	}
	return err
}

// grant gets a new lease, and binds the record of this node's lease to it.
func (s *session) grant(ctx context.Context) error {
	sent := s.boot()
	granted, err := s.state.client.Grant(ctx, int64(s.ttl/time.Second))
	if err != nil {
		return err
	}
	record := registry.NodeLease{Node: s.state.node, Lease: int64(granted.ID), Since: time.Now()}
	text, err := json.Marshal(record)
	if err != nil {
		return err
	}
	// A try whose answer was lost may arrive after the next try, which has another lease. Then the late try does
	// nothing.
	unchanged := clientv3.Compare(clientv3.ModRevision(s.state.ownLease()), "<", granted.ResponseHeader.GetRevision()+1)
	answer, err := s.state.kv.Txn(ctx).If(s.state.active(), unchanged).
		Then(clientv3.OpPut(s.state.ownLease(), string(text), clientv3.WithLease(granted.ID))).
		Else(clientv3.OpGet(s.state.keys.node(s.state.node))).Commit()
	switch {
	case err != nil:
		return err
	case !answer.Succeeded:
		if own := answer.Responses[0].GetResponseRange().Kvs; len(own) == 0 || own[0].ModRevision != s.state.own {
			return s.state.fencedError()
		}
		return errors.New("an earlier request for a lease has arrived just now")
	}
	s.extend(granted.ID, sent)
	return nil
}

// extend records that a request sent at that time has renewed the lease. It counts on 9/10 of the time to live, because
// the clock of etcd may run a little faster.
func (s *session) extend(lease clientv3.LeaseID, sent time.Duration) {
	s.state.health.recordAnswer()
	s.mu.Lock()
	wasValid := s.boot() < s.until && s.lease == lease
	s.lease, s.until = lease, sent+s.ttl*9/10
	s.renewed()
	s.mu.Unlock()
	if !wasValid {
		s.valid.fire()
	}
}

// ownLease returns the key of this node's lease in etcd.
func (s *State) ownLease() string { return s.record(registry.LeaseRecord(s.node)) }

// leaseIn returns the lease of this node in a view; 0: none.
func (s *State) leaseIn(v registry.View) int64 {
	own, _ := v.NodeLease(s.node)
	return own.Lease
}

// alive returns two conditions: no later shim of the node has become active, and the node has the same lease as when it
// decided. A process that was frozen for long has lost that lease. Its guards alone would not notice deletions that
// etcd has forgotten meanwhile.
func (s *State) alive(d decision) []clientv3.Cmp {
	conditions := []clientv3.Cmp{s.active()}
	if d.lease != 0 { // a node decides without a lease only until it gets one
		conditions = append(conditions, clientv3.Compare(clientv3.LeaseValue(s.ownLease()), "=", d.lease))
	}
	return conditions
}

// awaitLease returns at once if etcd still has the lease of the decision. If not, it waits until the copy knows that.
func (s *State) awaitLease(ctx context.Context, d decision, now []*mvccpb.KeyValue) error {
	if d.lease == 0 || len(now) > 0 && now[0].Lease == d.lease {
		return nil
	}
	var failed error
	err := s.copy.until(ctx, func() bool {
		var lease int64
		lease, failed = viewed(ctx, s, s.leaseIn)
		return failed != nil || lease != d.lease
	})
	return cmp.Or(failed, err)
}
