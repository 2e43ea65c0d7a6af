package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// copyProgress is the progress of the copy of the shared records.
type copyProgress struct {
	mu       sync.Mutex                   // guards revision and waiting
	revision int64                        // the revision of etcd that the copy has reached
	waiting  map[string]chan registry.Seq // by the ID of a commit. Closed if the copy is loaded again
	changed  broadcast                    // fires when the copy has changed
	ended    chan struct{}                // closed when Run has ended
	why      error                        // why Run has ended; set before ended is closed
	full     atomic.Pointer[error]        // why the node's disk refuses changes of the copy; nil: it does not
}

// endedError returns the error for callers that find ended closed.
func (c *copyProgress) endedError() error {
	return registry.Errorf(registry.ErrUnavailable, "the copy of the cluster's records has ended: %v", c.why)
}

// behind returns why ctx has ended before the copy had a revision: the disk is full, or the cause of ctx.
func (c *copyProgress) behind(ctx context.Context) error {
	if full := c.full.Load(); full != nil {
		return fmt.Errorf("%s: %w", fullText(*full), context.Cause(ctx))
	}
	return context.Cause(ctx)
}

// fullText says that this node does not see changes of the cluster, because its disk is full. refused is the error of
// the write.
func fullText(refused error) string {
	return fmt.Sprintf("this node does not see changes of the cluster, because its disk is full: %v", refused)
}

// expect returns a new ID for a commit, and a channel that gets the commit's index once the copy has the commit. The
// channel is closed if the copy is loaded anew before that. The caller must call forget when it no longer waits.
func (c *copyProgress) expect() (id string, applied <-chan registry.Seq, forget func()) {
	id = uuid.NewString()
	ch := make(chan registry.Seq, 1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting[id] = ch
	return id, ch, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.waiting, id)
	}
}

// until waits until holds returns true. It calls holds at once, and after each change of the copy.
func (c *copyProgress) until(ctx context.Context, holds func() bool) error {
	for {
		changed := c.changed.next()
		if holds() {
			return nil
		}
		select {
		case <-changed:
		case <-c.ended:
			return c.endedError()
		case <-ctx.Done():
			return registry.Errorf(registry.ErrUnavailable, "this node's copy of the cluster's records is behind: %w",
				c.behind(ctx))
		}
	}
}

// wait waits until the copy has reached a revision.
func (c *copyProgress) wait(ctx context.Context, revision int64) error {
	return c.until(ctx, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.revision >= revision
	})
}

// awaitRoom waits while the node's disk is full, and reports whether it has waited. The copy is then behind etcd, and
// etcd may already have forgotten deletions that the copy lacks. So nothing may be decided on the copy.
func (c *copyProgress) awaitRoom(ctx context.Context) (waited bool, err error) {
	err = c.until(ctx, func() bool {
		full := c.full.Load() != nil
		waited = waited || full
		return !full
	})
	return waited, err
}

// forgetWaiting closes the channels of all waiting commits: after the copy is loaded anew, the shim cannot find out
// whether the copy has them.
func (c *copyProgress) forgetWaiting() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ch := range c.waiting {
		close(ch)
	}
	clear(c.waiting)
}

// reach records that the copy has reached a revision, and passes the index to the waiting commits that it now has.
func (c *copyProgress) reach(revision int64, commits []string, at registry.Seq) {
	defer c.changed.fire()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.revision = revision
	for _, id := range commits {
		if ch := c.waiting[id]; ch != nil {
			ch <- at
			delete(c.waiting, id)
		}
	}
}

// copyIn returns the copy record of this cluster in a view.
func (s *State) copyIn(v registry.View) registry.Copy {
	c, _ := v.Get(registry.CopyRecord(s.id)).(registry.Copy)
	c.Cluster = s.id
	return c
}

// copyAt returns the copy record of this cluster with another revision.
func (s *State) copyAt(v registry.View, revision int64) registry.Copy {
	c := s.copyIn(v)
	c.Revision = revision
	return c
}

// Run joins the cluster, and keeps the copy up to date until ctx ends, the node's store fails, a record cannot be
// decoded or s.abandon is called. It returns the cause.
func (s *State) Run(ctx context.Context) (err error) {
	defer func() { s.copy.why = err; close(s.copy.ended) }()
	ctx, s.abandon = context.WithCancelCause(ctx)
	defer s.abandon(nil)
	if err := s.join(ctx); err != nil {
		return err
	}
	for first := true; ; first = false {
		err := s.follow(ctx, first)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case !errors.Is(err, errInterrupted):
			return err
		}
		s.notReady.Store(&err) // shown only until the state is ready
		// a member of etcd without a leader ends each watch at once
		if !intent.Sleep(ctx, retryPause) {
			return context.Cause(ctx)
		}
	}
}

// errInterrupted means that etcd ended a watch or could not be read.
var errInterrupted = errors.New("interrupted")

// sharedBuckets are the buckets of records in etcd.
var sharedBuckets = func() (all []registry.Bucket) {
	for _, t := range registry.RecordTypes {
		if t.Shared && t.Bucket != registry.BucketCopies {
			all = append(all, t.Bucket)
		}
	}
	return all
}()

// sharedKeys lists the keys of the records in the copy.
func sharedKeys(v registry.View) iter.Seq[registry.Key] {
	return func(yield func(registry.Key) bool) {
		for _, bucket := range sharedBuckets {
			for path := range v.Paths(bucket, "") {
				if !yield(registry.Key{Bucket: bucket, Path: path}) {
					return
				}
			}
		}
	}
}

// follow watches etcd from the revision of the copy on, and applies the events. It first loads the copy if there is
// none, or if the copy lacks buckets that an earlier release did not know. The first follow of a shim also loads it if
// etcd was restored from a backup: then the copy is not behind the write with which this shim joined (s.own).
func (s *State) follow(ctx context.Context, first bool) error {
	c, err := viewed(ctx, s.local, s.copyIn)
	if err != nil {
		return err
	}
	revision := c.Revision
	if !slices.Equal(c.Buckets, sharedBuckets) || first && revision >= s.own {
		if revision, err = s.load(ctx); err != nil {
			return err
		}
	}
	s.reach(revision, nil, 0)
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	in := receive(s.client.Watch(ctx, s.prefix, clientv3.WithPrefix(), clientv3.WithRev(revision+1)))
	defer func() { cancel(); in.receiver.Wait() }()
	for {
		events, err := in.next()
		if err := s.apply(ctx, events); err != nil {
			return err
		}
		switch {
		case errors.Is(err, rpctypes.ErrCompacted):
			if _, err := s.load(ctx); err != nil {
				return err
			}
			return errInterrupted
		case err != nil:
			return fmt.Errorf("%w: %w", errInterrupted, err)
		}
	}
}

// received holds the events of a watch that are yet to be applied. Events collect while earlier ones are being applied,
// and then one commit of the copy applies them all.
type received struct {
	mu     sync.Mutex // guards events and ended
	events []*clientv3.Event
	ended  error
	more   chan struct{} // of capacity 1

	receiver sync.WaitGroup
}

// receive receives from a watch until it ends.
func receive(watch clientv3.WatchChan) *received {
	r := &received{more: make(chan struct{}, 1)}
	r.receiver.Go(func() {
		for answer := range watch {
			r.add(answer.Events, answer.Err())
		}
		r.add(nil, errors.New("the watch has ended"))
	})
	return r
}

func (r *received) add(events []*clientv3.Event, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, events...)
	if r.ended == nil {
		r.ended = err
	}
	select {
	case r.more <- struct{}{}:
	default:
	}
}

// next waits for events. A non-nil error says why the watch has ended after them.
func (r *received) next() ([]*clientv3.Event, error) {
	for {
		<-r.more
		r.mu.Lock()
		events, err := r.events, r.ended
		r.events = nil
		r.mu.Unlock()
		if len(events) > 0 || err != nil {
			return events, err
		}
	}
}

// apply commits to the copy the events of a watch, which come from one or more transactions.
func (s *State) apply(ctx context.Context, events []*clientv3.Event) error {
	if len(events) == 0 {
		return nil
	}
	var change registry.Change
	var commits []string
	last := map[registry.Key]registry.Record{}
	change.Texts = map[registry.Key][]byte{}
	for _, e := range events {
		switch key, isRecord := s.parse(e.Kv.Key); {
		case string(e.Kv.Key) == s.log():
			var entry logEntry
			if err := json.Unmarshal(e.Kv.Value, &entry); err != nil {
				return damaged(e.Kv, err)
			}
			change.Events = append(change.Events, entry.Events...)
			commits = append(commits, entry.Commit)
		case isRecord && key.Bucket.Shared():
			record, err := decode(key, e.Kv)
			if err != nil {
				return err
			}
			last[key], change.Texts[key] = record, e.Kv.Value
		}
	}
	for key, record := range last {
		if record == nil {
			change.Delete = append(change.Delete, key)
		} else {
			change.Put = append(change.Put, record)
		}
	}
	revision := events[len(events)-1].Kv.ModRevision
	at, err := s.writeCopy(ctx, func(v registry.View) (registry.Change, error) {
		more := registry.Change{Put: []registry.Record{s.copyAt(v, revision)}}
		more.Events = s.leaseEvents(v, events)
		return change.And(more), nil
	})
	if err != nil {
		return err
	}
	s.reach(revision, commits, at)
	return nil
}

// writeCopy commits a change of the copy. While the disk is full, it retries.
func (s *State) writeCopy(ctx context.Context, decide registry.Decision) (at registry.Seq, err error) {
	defer s.copy.full.Store(nil)
	for {
		if at, err = s.local.Commit(ctx, decide); !errors.Is(err, registry.ErrExhausted) {
			return at, err
		}
		full := err // a copy, because err changes while other goroutines read the stored error
		s.copy.full.Store(&full)
		if !intent.Sleep(ctx, time.Second) {
			return 0, err
		}
	}
}

// reach is copyProgress.reach. It also makes the state ready once the copy has reached s.own, and with it everything
// that earlier shims of this node have written.
func (s *State) reach(revision int64, commits []string, at registry.Seq) {
	s.copy.reach(revision, commits, at)
	select {
	case <-s.ready:
	default:
		if revision >= s.own {
			close(s.ready)
		}
	}
}

// leaseEvents returns the events of nodes that have lost or regained their leases. A node may have both events in one
// batch.
func (s *State) leaseEvents(v registry.View, events []*clientv3.Event) (list []registry.Event) {
	leases := map[registry.Key]registry.Record{} // nil: none
	for _, e := range events {
		key, _ := s.parse(e.Kv.Key)
		if key.Bucket != registry.BucketNodeLeases {
			continue
		}
		if _, known := leases[key]; !known {
			leases[key] = v.Get(key)
		}
		before, alive := leases[key].(registry.NodeLease)
		leases[key], _ = decode(key, e.Kv)
		switch lease, has := leases[key].(registry.NodeLease); {
		case has && !alive:
			list = append(list, registry.Event{Kind: registry.EventNodeBack, Node: lease.Node, At: time.Now()})
		case alive && e.Type == clientv3.EventTypeDelete:
			list = append(list, registry.Event{Kind: registry.EventNodeSuspect, Node: before.Node, At: time.Now(),
				Detail: "etcd has not heard from it for lease_ttl; its claims stay"})
		}
	}
	return list
}

// decode returns the record of a key and value, nil if it was deleted.
func decode(key registry.Key, kv *mvccpb.KeyValue) (registry.Record, error) {
	if len(kv.Value) == 0 {
		return nil, nil
	}
	record, err := key.Bucket.Type().Decode(kv.Value)
	if err != nil {
		return nil, damaged(kv, err)
	}
	return record, nil
}

func damaged(kv *mvccpb.KeyValue, err error) error {
	return registry.Errorf(registry.ErrDamaged, "etcd key %q at revision %d: %w", kv.Key, kv.ModRevision, err)
}

// pageSize is how many keys load reads at a time.
const pageSize = 1000

// load replaces the copy by the records of etcd, and returns their revision. The events between the old copy and that
// revision are lost. It returns an ErrConflict if etcd has lost the cluster.
func (s *State) load(ctx context.Context) (revision int64, err error) {
	found, texts := map[registry.Key]registry.Record{}, map[registry.Key][]byte{}
	revision, err = s.readAll(ctx, func(key registry.Key, kv *mvccpb.KeyValue) error {
		if !key.Bucket.Shared() {
			return nil
		}
		record, err := decode(key, kv)
		if record != nil {
			found[key], texts[key] = record, kv.Value
		}
		return err
	})
	switch {
	case errors.Is(err, registry.ErrDamaged):
		return 0, err
	case err != nil:
		return 0, fmt.Errorf("%w: %w", errInterrupted, err)
	}
	at, err := s.writeCopy(ctx, func(v registry.View) (registry.Change, error) {
		if err := s.checkLost(v, found[registry.Formation{Cluster: s.id}.Key()]); err != nil {
			return registry.Change{}, err
		}
		change := s.replaceChange(v, found, revision)
		change.Texts = texts
		return change, nil
	})
	if err == nil {
		s.copy.forgetWaiting()
		s.reach(revision, nil, at)
	}
	return revision, err
}

// readAll passes the records and index entries of etcd to visit, and returns their revision. It also passes deleted
// keys, with an empty value.
func (s *State) readAll(
	ctx context.Context, visit func(registry.Key, *mvccpb.KeyValue) error,
) (revision int64, err error) {
	from, end := s.records(), clientv3.GetPrefixRangeEnd(s.records())
	for more := true; more; {
		var page *clientv3.GetResponse
		err := s.request(ctx, func(ctx context.Context) (err error) {
			page, err = s.client.Get(ctx, from,
				clientv3.WithRange(end), clientv3.WithLimit(pageSize), clientv3.WithRev(revision))
			return err
		})
		if errors.Is(err, rpctypes.ErrCompacted) {
			return 0, errInterrupted
		}
		if err != nil {
			return 0, err
		}
		revision, more = max(revision, page.Header.Revision), page.More
		for _, kv := range page.Kvs {
			from = string(kv.Key) + "\x00"
			if key, ok := s.parse(kv.Key); ok {
				if err := visit(key, kv); err != nil {
					return 0, err
				}
			}
		}
	}
	return revision, nil
}

// replaceChange returns the change after which the copy has exactly the records found. If there was a copy before, the
// change has an event, because events are lost.
func (s *State) replaceChange(
	v registry.View, found map[registry.Key]registry.Record, revision int64,
) (change registry.Change) {
	for key := range sharedKeys(v) {
		if found[key] == nil {
			change.Delete = append(change.Delete, key)
		}
	}
	for _, record := range found {
		change.Put = append(change.Put, record)
	}
	next := s.copyAt(v, revision)
	next.Buckets = sharedBuckets
	if s.copyIn(v).Revision > 0 {
		change.Events = []registry.Event{{Kind: registry.EventMissed, Node: s.node, At: time.Now(),
			Detail: "all records were loaded anew: events of other nodes since the last one here may be missing"}}
	}
	change.Put = append(change.Put, next)
	return change
}
