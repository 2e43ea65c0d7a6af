package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

const (
	tombstoneTTL = 15 * time.Minute       // of a deleted key; 4/5 of it (leaseOf) is more than the longest lease_ttl
	answerTTL    = time.Hour              // of the answer to a remote call, whose caller may never fetch it
	tryTimeout   = 5 * time.Second        // of one request to etcd
	retryPause   = 100 * time.Millisecond // before a request is repeated
)

// State is the state of one node of a cluster. Its store has the records of the node, and a copy of those that nodes
// share.
type State struct {
	local  registry.State
	client *clientv3.Client
	kv     clientv3.KV // of the client
	keys
	id       string // of the cluster
	node     registry.NodeName
	expect   int                   // the number of nodes that form the cluster, as configured; 0: not known
	ready    chan struct{}         // closed once own is set and the copy has that revision
	own      int64                 // the revision at which this shim became the active one of its node
	notReady atomic.Pointer[error] // why the node is not ready; nil: it is not known
	copy     copyProgress
	health   *etcdHealth
	abandon  context.CancelCauseFunc // ends Run; set before ready is closed
	sending  func(registry.Change)   // see Options
	groups   groups
	lastView atomic.Pointer[viewRevision] // of the last decision

	doubts     atomic.Int64 // counts the commits that have ended and may still be carried out
	settled    atomic.Int64 // how many of them are certainly carried out or never will be
	tombstones expiry       // of deleted keys
	answers    expiry       // of answered remote calls
}

// expiry has a lease for keys that have to expire after about ttl, and replaces it in time (leaseOf).
type expiry struct {
	ttl      time.Duration
	current  atomic.Pointer[leased]
	granting chan struct{} // of capacity 1; full: a lease is being granted
}

func newExpiry(ttl time.Duration) expiry { return expiry{ttl: ttl, granting: make(chan struct{}, 1)} }

// leased is a lease of an expiry. nil: there is none.
type leased struct {
	id clientv3.LeaseID
	at time.Time // when it was requested
}

// viewRevision is the revision of the copy in the views of an index.
type viewRevision struct {
	index    registry.Seq
	revision int64
}

var _ registry.State = (*State)(nil)

// New returns the state of a node. local is the node's store. Commits of shared records wait for Run.
func New(local registry.State, client *clientv3.Client, cluster string, node registry.NodeName) *State {
	s := &State{
		local: local, client: client, kv: client, keys: keys{"/holdfast/" + cluster + "/"}, id: cluster, node: node,
		ready: make(chan struct{}), health: &etcdHealth{began: time.Now()}, sending: func(registry.Change) {},
	}
	s.copy.ended = make(chan struct{})
	s.copy.waiting = map[string]chan registry.Seq{}
	s.groups.turn = make(chan struct{}, 1)
	s.tombstones, s.answers = newExpiry(tombstoneTTL), newExpiry(answerTTL)
	return s
}

// awaitReady waits until Run has joined the cluster and has a copy of the records.
func (s *State) awaitReady(ctx context.Context) error {
	select {
	case <-s.ready:
		return nil
	case <-s.copy.ended:
		return s.copy.endedError()
	case <-ctx.Done():
		if s.copy.full.Load() != nil {
			return registry.Errorf(registry.ErrUnavailable, "%w", s.copy.behind(ctx))
		}
		if why := s.notReady.Load(); why != nil {
			return notJoined(*why)
		}
		return registry.Errorf(registry.ErrUnavailable, "%s: %w", s.silence(), context.Cause(ctx))
	}
}

func notJoined(why error) error {
	return registry.Errorf(registry.ErrUnavailable, "this node has not joined the cluster: %w", why)
}

// active returns the condition that no later shim of the node has become active.
func (s *State) active() clientv3.Cmp {
	return clientv3.Compare(clientv3.ModRevision(s.keys.node(s.node)), "=", s.own)
}

func (s *State) fencedError() error {
	return registry.Errorf(registry.ErrFenced, "another shim is active for node %s, or etcd has lost the node's record",
		s.node)
}

// View implements registry.State. It reads the copy of this node, also without etcd.
func (s *State) View(ctx context.Context, read func(registry.View) error) error {
	return s.local.View(ctx, read)
}

// Commit implements registry.State. A change of this node's own records does not need etcd. A decision is made again if
// something that it has read was changed in etcd before its change was written. A refusal, too, is returned only if
// nothing that the decision has read was changed. Each decision is written by a transaction of its own, or together
// with independent decisions of other commits.
func (s *State) Commit(ctx context.Context, decisions ...registry.Decision) (at registry.Seq, err error) {
	for _, decide := range decisions {
		if at, err = s.commit(ctx, decide); err != nil {
			return 0, err
		}
	}
	return at, nil
}

// commit is Commit for one decision.
func (s *State) commit(ctx context.Context, decide registry.Decision) (registry.Seq, error) {
	for first := true; ; first = false {
		d, err := s.decide(ctx, decide)
		if err != nil {
			return 0, err
		}
		if d.local() {
			if at, err := s.commitLocal(ctx, decide); !errors.Is(err, errShared) {
				return at, err
			}
			continue
		}
		// a decision that is made again is written alone
		at, done, err := s.commitShared(ctx, d, first && !d.change.Empty())
		if done || err != nil {
			return at, err
		}
	}
}

// decision is the result of one call of decide.
type decision struct {
	change  registry.Change
	refused error
	index   registry.Seq // of the view
	since   int64        // the revision of the copy in the view
	lease   int64        // of this node in the view; 0: none
	reads   *reads
	guards  guards                  // of a decision that needs etcd
	values  map[registry.Key]string // see valuesOf
}

// local reports whether the decision does not need etcd: it changes no shared records, and is no refusal that depends
// on shared records.
func (d decision) local() bool {
	return !d.change.WritesShared() && (d.refused == nil || !d.reads.any())
}

// decide calls the caller's function with a view of the copy. If the decision needs etcd, it also sets guards and
// values. A refusal is no error of decide.
func (s *State) decide(ctx context.Context, decide registry.Decision) (d decision, err error) {
	err = s.local.View(ctx, func(v registry.View) (err error) {
		d.reads = newReads(v.Reader, s.keys)
		d.index, d.since, d.lease = v.Index(), s.revisionIn(v), s.leaseIn(v)
		if d.change, d.refused = decide(registry.View{Reader: d.reads}); d.refused != nil {
			d.change = registry.Change{}
		}
		if err := d.change.Check(); err != nil || d.local() {
			return err
		}
		d.guards = d.reads.guards(d.change, d.since)
		d.guards.add(guard{key: s.barrier(s.node)}, d.since) // see Settle
		d.values, err = valuesOf(v, d.change)
		return err
	})
	return d, err
}

// revisionIn returns the revision of the copy in a view of committed records.
func (s *State) revisionIn(v registry.View) int64 {
	if last := s.lastView.Load(); last != nil && last.index == v.Index() {
		return last.revision
	}
	at := viewRevision{v.Index(), s.copyIn(v).Revision}
	s.lastView.Store(&at)
	return at.revision
}

// errShared means that a decision changes shared records, although it did not when it was made on an earlier view.
var errShared = errors.New("the change has shared records")

// commitLocal commits a decision. It returns errShared if the decision changes shared records.
func (s *State) commitLocal(ctx context.Context, decide registry.Decision) (registry.Seq, error) {
	return s.local.Commit(ctx, func(v registry.View) (registry.Change, error) {
		change, err := decide(v)
		if err == nil && change.WritesShared() {
			return registry.Change{}, errShared
		}
		return change, err
	})
}

// commitShared writes the decision if it still holds, grouped with those of other commits or alone. If done is false
// and there is no error, nothing was written and the caller decides again: the decision, or one of its group, does not
// hold any longer, or it was made on a copy that may be old.
func (s *State) commitShared(ctx context.Context, d decision, grouped bool) (at registry.Seq, done bool, err error) {
	select {
	case <-s.ready:
	default: // the copy from which it was decided may be old
		return 0, false, s.awaitReady(ctx)
	}
	if waited, err := s.copy.awaitRoom(ctx); waited || err != nil {
		return 0, false, err
	}
	if grouped {
		return s.commitGrouped(ctx, d)
	}
	return s.write(ctx, d, func() {})
}

// write writes a decision, or several independent ones, if they still hold. It calls answered once etcd has answered.
func (s *State) write(ctx context.Context, d decision, answered func()) (at registry.Seq, done bool, err error) {
	if d.lease == 0 { // no condition notices deletions that etcd has forgotten: see alive
		limited, cancel := context.WithTimeout(ctx, tombstoneTTL/2)
		defer cancel()
		ctx = limited
	}
	commit, applied, forget := s.copy.expect()
	defer forget()
	writes, err := s.operations(ctx, d, commit)
	if err != nil {
		return 0, false, unavailable(err)
	}
	defer func() {
		if err != nil && len(writes) > 0 { // etcd may still carry out the transaction
			s.doubts.Add(1)
		}
	}()
	if len(writes) > 0 {
		s.sending(d.change)
	}
	var answer *clientv3.TxnResponse
	err = s.request(ctx, func(ctx context.Context) (err error) {
		answer, err = s.kv.Txn(ctx).If(append(d.guards.conditions(), s.alive(d)...)...).Then(writes...).
			Else(clientv3.OpGet(s.log(), clientv3.WithKeysOnly()), clientv3.OpGet(s.keys.node(s.node)),
				clientv3.OpGet(s.barrier(s.node)), clientv3.OpGet(s.ownLease())).Commit()
		return err
	})
	answered()
	switch {
	case errors.Is(err, rpctypes.ErrLeaseNotFound): // the lease of leaseOf has expired: the machine was suspended
		s.tombstones.current.Store(nil)
		s.answers.current.Store(nil)
		return 0, false, nil
	case err != nil && codeOf(err) == codes.InvalidArgument:
		return 0, false, registry.Errorf(registry.ErrInternal, "%w of %d writes: %w", errRefused, len(writes), err)
	case err != nil && len(writes) > 0:
		return 0, false, registry.Errorf(registry.ErrUncertain, "write to etcd: %w", err)
	case err != nil:
		return 0, false, unavailable(err)
	case answer.Header.Revision < d.since:
		err = registry.Errorf(registry.ErrUncertain,
			"etcd was restored from a backup: this node loads all records anew")
		s.abandon(err)
		return 0, false, err
	case !answer.Succeeded:
		return s.resolve(ctx, d, answer, applied)
	case len(writes) == 0:
		return d.index, true, d.refused
	}
	s.health.recordChange()
	at, err = s.awaitCopy(ctx, applied, answer.Header.Revision)
	return at, true, err
}

// errRefused means that etcd takes no such transaction, for example because it is too large.
var errRefused = errors.New("etcd refuses a transaction")

// operations returns the operations that write the decision, none if it is a refusal or writes nothing.
func (s *State) operations(ctx context.Context, d decision, commit string) (ops []clientv3.Op, err error) {
	if d.change.Empty() {
		return nil, nil
	}
	text, err := json.Marshal(logEntry{commit, d.change.Events})
	if err != nil {
		return nil, registry.Errorf(registry.ErrInternal, "encode events: %w", err)
	}
	ops = append(ops, clientv3.OpPut(s.log(), string(text)))
	answered := map[registry.Key]bool{} // remote calls, whose caller may be gone
	for _, r := range d.change.Put {
		call, is := r.(registry.RemoteCall)
		answered[r.Key()] = is && call.Done
	}
	for key, value := range d.values {
		var options []clientv3.OpOption
		// A deleted key gets an empty value, which expires: a condition on a range does not notice a key that is gone.
		if value == "" || answered[key] {
			expires := &s.tombstones
			if value != "" {
				expires = &s.answers
			}
			lease, err := s.leaseOf(ctx, expires)
			if err != nil {
				return nil, err
			}
			options = append(options, clientv3.WithLease(lease))
		}
		ops = append(ops, clientv3.OpPut(s.record(key), value, options...))
	}
	return ops, nil
}

// resolve handles the answer that the conditions of a commit do not hold. An earlier try of the same commit, whose
// answer was lost, may be the reason. The responses are those of the Else branch in write.
func (s *State) resolve(
	ctx context.Context, d decision, answer *clientv3.TxnResponse, applied <-chan registry.Seq,
) (at registry.Seq, done bool, err error) {
	log, node := answer.Responses[0].GetResponseRange(), answer.Responses[1].GetResponseRange()
	if len(node.Kvs) == 0 || node.Kvs[0].ModRevision != s.own {
		return 0, false, s.fencedError()
	}
	// wait until the copy has the possible reason: another change, this commit, or a new barrier
	for _, kv := range append(log.Kvs, answer.Responses[2].GetResponseRange().Kvs...) {
		if err := s.copy.wait(ctx, kv.ModRevision); err != nil {
			return 0, false, err
		}
	}
	select {
	case at, known := <-applied:
		if !known {
			return 0, false, registry.Errorf(registry.ErrUncertain, "this node has loaded all records anew, "+
				"and does not know whether they include this commit")
		}
		return at, true, nil
	default:
		return 0, false, s.awaitLease(ctx, d, answer.Responses[3].GetResponseRange().Kvs)
	}
}

// Settle waits until each commit of this node that has ended is in the node's copy, or will never be carried out. This
// includes those of earlier shims.
func (s *State) Settle(ctx context.Context) error {
	if err := s.awaitReady(ctx); err != nil {
		return err
	}
	doubts, settled := s.doubts.Load(), s.settled.Load()
	if settled >= doubts {
		return nil
	}
	revision, err := s.changeBarrier(ctx)
	if err == nil {
		err = s.copy.wait(ctx, revision)
	}
	if err != nil {
		return unavailable(err)
	}
	s.settled.CompareAndSwap(settled, doubts) // if another Settle was faster, the next one changes the barrier again
	return nil
}

// changeBarrier changes the barrier of the node, and returns the revision. Commits that were decided before it fail.
func (s *State) changeBarrier(ctx context.Context) (revision int64, err error) {
	err = s.request(ctx, func(ctx context.Context) error {
		answer, err := s.kv.Txn(ctx).If(s.active()).Then(clientv3.OpPut(s.barrier(s.node), "")).Commit()
		if err != nil {
			return err
		}
		if revision = answer.Header.Revision; !answer.Succeeded {
			return s.fencedError()
		}
		s.health.recordChange()
		return nil
	})
	return revision, err
}

// awaitCopy waits until the copy of this node has a commit that etcd has at a revision.
func (s *State) awaitCopy(
	ctx context.Context, applied <-chan registry.Seq, revision int64,
) (at registry.Seq, err error) {
	select {
	case at, known := <-applied:
		if known {
			return at, nil
		}
		// the copy was loaded anew
		if err = s.copy.wait(ctx, revision); err == nil {
			at, err = viewed(ctx, s.local, registry.View.Index)
		}
		if err != nil {
			err = registry.Errorf(registry.ErrUncertain, "the commit is in etcd: %w", err)
		}
		return at, err
	case <-s.copy.ended:
		return 0, registry.Errorf(registry.ErrUncertain, "the commit is in etcd, but %v", s.copy.endedError())
	case <-ctx.Done():
		return 0, registry.Errorf(registry.ErrUncertain,
			"the commit is in etcd, but not yet in the copy of this node: %w", s.copy.behind(ctx))
	}
}

// leaseOf returns a lease of an expiry with at least 4/5 of its time to live left.
func (s *State) leaseOf(ctx context.Context, e *expiry) (clientv3.LeaseID, error) {
	fresh := func(l *leased) bool { return l != nil && time.Since(l.at) < e.ttl/5 }
	if l := e.current.Load(); fresh(l) {
		return l.id, nil
	}
	select {
	case e.granting <- struct{}{}:
		defer func() { <-e.granting }()
	case <-ctx.Done():
		return 0, fmt.Errorf("%s: %w", s.silence(), context.Cause(ctx))
	}
	if l := e.current.Load(); fresh(l) { // granted meanwhile
		return l.id, nil
	}
	next := &leased{}
	err := s.request(ctx, func(ctx context.Context) error {
		next.at = time.Now()
		lease, err := s.client.Grant(ctx, int64(e.ttl/time.Second))
		if err == nil {
			next.id = lease.ID
			e.current.Store(next)
		}
		return err
	})
	return next.id, err
}

// request repeats a request to etcd until it is answered, ctx ends or repeating is useless.
func (s *State) request(ctx context.Context, request func(context.Context) error) error {
	for {
		s.health.recordRequest()
		try, cancel := context.WithTimeout(ctx, tryTimeout)
		err := request(try)
		cancel()
		if err == nil || !repeatable(err) {
			s.health.recordAnswer()
			s.health.recordFull(err)
			return err
		}
		if !intent.Sleep(ctx, retryPause) {
			return fmt.Errorf("%s: %w", s.silence(), context.Cause(ctx))
		}
	}
}

// repeatable reports whether a request that failed with err may succeed later.
func repeatable(err error) bool {
	if errors.Is(err, registry.ErrFenced) {
		return false
	}
	switch codeOf(err) {
	case codes.InvalidArgument, codes.Unauthenticated, codes.PermissionDenied, codes.OutOfRange,
		codes.ResourceExhausted, codes.NotFound:
		return false
	}
	return true
}

// codeOf returns the gRPC code of an error of the client.
func codeOf(err error) codes.Code {
	if e, is := errors.AsType[rpctypes.EtcdError](err); is {
		return e.Code()
	}
	return status.Code(err)
}

// unavailable returns the error of a request that wrote nothing.
func unavailable(err error) error {
	switch {
	case slices.ContainsFunc(registry.Kinds, func(kind error) bool { return errors.Is(err, kind) }):
		return err
	case codeOf(err) == codes.ResourceExhausted:
		return registry.Errorf(registry.ErrExhausted, "etcd: %w", err)
	}
	return registry.Errorf(registry.ErrUnavailable, "etcd: %w", err)
}
