package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/internal/proc"
	"holdfast/registry"
)

// LeaseTTL is how long a node counts as alive after etcd has last heard of it.
const LeaseTTL = 10 * time.Second

// session is the lease of this node's shim. Its end never frees a claim: it makes the node suspect, and lets other
// nodes execute the controller calls of plugins.
type session struct {
	state *State
	ttl   time.Duration
	boot  func() time.Duration // CLOCK_BOOTTIME, which also advances while the machine is suspended
	valid broadcast            // there is a valid lease again

	renewed func() // closes first
	first   chan struct{}

	mu    sync.Mutex // guards the fields below
	lease clientv3.LeaseID
	until time.Duration // the lease is certainly valid before
}

func newSession(s *State) *session {
	first := make(chan struct{})
	return &session{state: s, ttl: LeaseTTL, boot: proc.BootTime, first: first,
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

// Run keeps the lease until ctx ends. The next shim of the node takes the lease over; without one the lease expires.
func (s *session) Run(ctx context.Context) error {
	if err := s.state.awaitReady(ctx); err != nil {
		return err
	}
	if err := s.state.View(ctx, func(v registry.View) error {
		record, _ := v.NodeLease(s.state.node)
		s.lease = clientv3.LeaseID(record.Lease)
		return nil
	}); err != nil {
		return err
	}
	for {
		s.state.heard.sent()
		err := s.renew(ctx)
		wait := s.ttl / 3
		if errors.Is(err, registry.ErrFenced) {
			return err
		}
		if err != nil {
			wait = s.ttl / 20
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// renew renews the lease. If there is none, or etcd has ended it, it gets a new one.
func (s *session) renew(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.ttl/3)
	defer cancel()
	s.mu.Lock()
	lease := s.lease
	s.mu.Unlock()
	sent := s.boot()
	if lease != 0 {
		_, err := s.state.client.KeepAliveOnce(ctx, lease)
		if err == nil {
			s.extend(lease, sent)
		}
		if !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			return err
		}
	}
	granted, err := s.state.client.Grant(ctx, int64(s.ttl/time.Second))
	if err != nil {
		return err
	}
	record := registry.NodeLease{Node: s.state.node, Lease: int64(granted.ID), Since: time.Now()}
	text, err := json.Marshal(record)
	if err != nil {
		return err
	}
	answer, err := s.state.client.Txn(ctx).If(s.state.active()).
		Then(clientv3.OpPut(s.state.record(record.Key()), string(text), clientv3.WithLease(granted.ID))).Commit()
	if err == nil && !answer.Succeeded {
		err = s.state.fenced()
	}
	if err != nil {
		return err
	}
	s.extend(granted.ID, sent)
	return nil
}

// extend records that the lease was renewed by a request sent at a time. The server's clock may run a little faster.
func (s *session) extend(lease clientv3.LeaseID, sent time.Duration) {
	s.state.heard.got()
	s.mu.Lock()
	was := s.boot() < s.until && s.lease == lease
	s.lease, s.until = lease, sent+s.ttl*9/10
	s.renewed()
	s.mu.Unlock()
	if !was {
		s.valid.fire()
	}
}
