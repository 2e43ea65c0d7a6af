package cluster

import (
	"context"
	"errors"
	"maps"
	"sync"

	"holdfast/registry"
)

const (
	maxOperations = 128       // conditions or writes of a transaction; the default limit of etcd
	maxGroupSize  = 256 << 10 // bytes that a group writes, unless it is a single decision
)

// groups collects the decisions of commits while etcd has yet to answer the transaction of an earlier group.
type groups struct {
	turn chan struct{} // of capacity 1; full while etcd has yet to answer the transaction of a group
	mu   sync.Mutex    // guards next, and the fields of each group except its outcome
	next *group        // the group that decisions can join; nil: there is none
}

// group is a set of decisions that one transaction writes. They are independent: no decision reads or writes what
// another one writes.
type group struct {
	decision
	size    int // of the values written, in bytes
	joined  int // commits that have joined
	waiting int // commits that wait for the outcome
	ctx     context.Context
	cancel  context.CancelCauseFunc // called once no commit waits
	ended   chan struct{}           // closed once the outcome is known

	// the outcome of each decision, as State.commitShared returns it
	at   registry.Seq
	done bool
	err  error
}

// commitGrouped writes the decision in one transaction with decisions of other commits, and returns what commitShared
// returns. If etcd refuses a transaction of several decisions, the decision is written again alone.
func (s *State) commitGrouped(ctx context.Context, d decision) (at registry.Seq, done bool, err error) {
	g := s.joinGroup(ctx, d)
	select {
	case <-g.ended:
	case <-ctx.Done():
		if s.groups.leave(g) > 0 {
			s.doubts.Add(1)
			return 0, false, registry.Errorf(registry.ErrUncertain, "write to etcd: %s: %w",
				s.silence(), context.Cause(ctx))
		}
		g.cancel(context.Cause(ctx))
		<-g.ended
	}
	if errors.Is(g.err, errRefused) && g.joined > 1 { // another decision may be the cause
		return s.write(ctx, d, func() {})
	}
	return g.at, g.done, g.err
}

// joinGroup adds the decision to the group that is open. If there is none, or the decision does not fit, joinGroup
// opens a new group and starts writeGroup for it.
func (s *State) joinGroup(ctx context.Context, d decision) *group {
	s.groups.mu.Lock()
	defer s.groups.mu.Unlock()
	size := 0
	for _, value := range d.values {
		size += len(value)
	}
	if g := s.groups.next; g != nil && g.size+size <= maxGroupSize && s.independent(g.decision, d) {
		g.add(d)
		g.size += size
		g.joined++
		g.waiting++
		return g
	}
	g := &group{decision: d, size: size, joined: 1, waiting: 1, ended: make(chan struct{})}
	g.change, g.values, g.guards = registry.Change{}.And(d.change), maps.Clone(d.values), maps.Clone(d.guards)
	g.ctx, g.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	s.groups.next = g
	go s.writeGroup(g)
	return g
}

// independent reports whether one transaction can write both decisions.
func (s *State) independent(a, b decision) bool {
	const own = 2 // State.alive has up to two conditions, and the log takes a write
	if a.lease != b.lease || len(a.guards)+len(b.guards)+own > maxOperations ||
		len(a.values)+len(b.values)+own > maxOperations {
		return false
	}
	for key := range a.values {
		if b.guards.covers(s.record(key)) {
			return false
		}
	}
	for key := range b.values {
		if a.guards.covers(s.record(key)) {
			return false
		}
	}
	return true
}

// add adds an independent decision.
func (d *decision) add(other decision) {
	d.change = d.change.And(other.change)
	d.since = max(d.since, other.since)
	maps.Copy(d.values, other.values)
	for at, since := range other.guards {
		d.guards.add(at, since)
	}
}

// leave records that a commit has stopped waiting for the group, and returns how many commits still wait.
func (g *groups) leave(from *group) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	if from.waiting--; from.waiting == 0 && g.next == from {
		g.next = nil
	}
	return from.waiting
}

// close keeps further decisions from joining a group.
func (g *groups) close(this *group) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.next == this {
		g.next = nil
	}
}

// writeGroup waits until etcd has answered the transaction of the earlier group, and then writes the group.
func (s *State) writeGroup(g *group) {
	defer close(g.ended)
	defer g.cancel(nil)
	select {
	case s.groups.turn <- struct{}{}:
	case <-g.ctx.Done():
		g.err = registry.Errorf(registry.ErrUnavailable, "%s: %w", s.silence(), context.Cause(g.ctx))
		return
	}
	s.groups.close(g)
	answered := sync.OnceFunc(func() { <-s.groups.turn })
	defer answered()
	g.at, g.done, g.err = s.write(g.ctx, g.decision, answered)
}
