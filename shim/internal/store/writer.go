package store

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
)

// request is a Commit in progress. The goroutine that changes its state from waiting also answers it.
type request struct {
	decisions []registry.Decision
	state     atomic.Int32 // waiting, taken (by the writer) or withdrawn (by the caller)
	answer    chan answer  // of capacity 1
}

type answer struct {
	index registry.Seq
	err   error
}

const (
	waiting = iota
	taken
	withdrawn
)

// queue holds the requests that wait for the writer.
type queue struct {
	mu       sync.Mutex
	requests []*request
	refusal  error         // answer to all requests from now on; nil: none is refused
	ready    chan struct{} // of capacity 1
}

func newQueue() *queue { return &queue{ready: make(chan struct{}, 1)} }

func (q *queue) add(r *request) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.refusal != nil {
		return q.refusal
	}
	q.requests = append(q.requests, r)
	select {
	case q.ready <- struct{}{}:
	default:
	}
	return nil
}

// take removes all requests from the queue, and returns those that are not withdrawn.
func (q *queue) take() (batch []*request) {
	q.mu.Lock()
	all := q.requests
	q.requests = nil
	q.mu.Unlock()
	for _, r := range all {
		if r.state.CompareAndSwap(waiting, taken) {
			batch = append(batch, r)
		}
	}
	return batch
}

// refuse answers all waiting and all later requests with err.
func (q *queue) refuse(err error) {
	q.mu.Lock()
	if q.refusal == nil {
		q.refusal = err
	}
	q.mu.Unlock()
	for _, r := range q.take() {
		r.answer <- answer{0, err}
	}
}

// Commit implements registry.State. It waits until Run is called. If ctx ends before the writer takes the request,
// nothing is decided, and Commit returns the cause. If ctx ends later, Commit returns ErrUncertain.
func (s *Store) Commit(ctx context.Context, decisions ...registry.Decision) (registry.Seq, error) {
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	r := &request{decisions: decisions, answer: make(chan answer, 1)}
	if err := s.queue.add(r); err != nil {
		return 0, err
	}
	select {
	case a := <-r.answer:
		return a.index, a.err
	case <-ctx.Done():
	}
	if r.state.CompareAndSwap(waiting, withdrawn) {
		return 0, context.Cause(ctx)
	}
	select {
	case a := <-r.answer:
		return a.index, a.err
	default:
		return 0, registry.Errorf(registry.ErrUncertain, "commit under way: %w", context.Cause(ctx))
	}
}

// Run writes commits until ctx ends, the store is closed or the file fails, and returns the reason. After any error but
// that of ctx, the process must not continue with this state.
func (s *Store) Run(ctx context.Context) error {
	s.reserveAtStart()
	for {
		select {
		case <-ctx.Done():
			s.fail(registry.Errorf(registry.ErrUnavailable, "the store has stopped: %v", context.Cause(ctx)))
			return context.Cause(ctx)
		case <-s.stopped:
			return s.reason
		case <-s.queue.ready:
			s.writing.Lock()
			s.commit(s.queue.take())
			s.writing.Unlock()
		}
	}
}

// fail stops all writing. If it is called again, the first reason stays.
func (s *Store) fail(reason error) {
	s.stop.Do(func() {
		s.reason = reason
		close(s.stopped)
	})
	s.queue.refuse(stoppedError(s.reason))
}

// stoppedError returns the error of a commit that was not begun. Unlike the reason, it is never ErrUncertain.
func stoppedError(reason error) error {
	for _, kind := range []error{registry.ErrFenced, registry.ErrDamaged} {
		if errors.Is(reason, kind) {
			return registry.Errorf(kind, "the store has stopped: %v", reason)
		}
	}
	return registry.Errorf(registry.ErrUnavailable, "the store has stopped: %v", reason)
}

// commit writes one batch and answers each of its requests. If the batch fails, each request that was decided after the
// first change of the batch fails too, even if it has changed nothing: it may have read changes that were not stored.
func (s *Store) commit(requests []*request) {
	if len(requests) == 0 {
		return
	}
	select {
	case <-s.stopped:
		for _, r := range requests {
			r.answer <- answer{0, stoppedError(s.reason)}
		}
		return
	default:
	}
	out := &batchOutcome{answers: make([]answer, len(requests)), shared: make([]bool, len(requests))}
	failed := catchDamage(func() error { return s.write(out, requests) })
	if failed != nil && !errors.Is(failed, registry.ErrExhausted) {
		s.fail(failed)
		if out.sent {
			failed = registry.Errorf(registry.ErrUncertain, "%w", failed)
		} else {
			failed = stoppedError(failed)
		}
	}
	for i, r := range requests {
		if failed != nil && (out.shared[i] || i >= out.decided) {
			r.answer <- answer{0, failed}
		} else {
			r.answer <- out.answers[i]
		}
	}
}

// batchOutcome holds the answers to the requests of a batch, by their position in it, and how far the batch has come.
type batchOutcome struct {
	answers []answer
	shared  []bool // whether the answer depends on the transaction
	decided int    // number of requests that have made their decisions
	sent    bool   // the transaction was handed to the disk
	applied []registry.Applied
}

// write runs the decisions of all requests and writes the changes, in one transaction. Of each request it runs the
// decisions until one fails. It returns errors of the transaction, not of a request.
func (s *Store) write(out *batchOutcome, requests []*request) error {
	tx, err := s.db.Begin(true)
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "begin: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // of no effect after Commit
	if err := s.checkOwnership(tx); err != nil {
		return err
	}
	t := newTransaction(tx)
	b := &batch{
		transaction: t, reader: s.reader(tx, readHead(tx)), generation: s.generation, eventLimit: s.options.EventLimit,
		now: s.options.Now,
	}
	for i, r := range requests {
		for _, decide := range r.decisions {
			if err := s.decide(out, b, i, decide); err != nil {
				return err
			}
			if out.answers[i].err != nil {
				break
			}
		}
		out.decided++
	}
	if !b.dirty {
		return nil
	}
	if err := b.finish(); err != nil {
		return err
	}
	return s.publish(out, tx)
}

// decide runs one decision of the i-th request, and writes its change. If the decision is refused or its change cannot
// be written for lack of space, the answer to the request has the error. decide returns only errors that end the whole
// transaction.
func (s *Store) decide(out *batchOutcome, b *batch, i int, decide registry.Decision) error {
	out.shared[i] = b.dirty
	change, err := decide(registry.View{Reader: b.reader})
	if err != nil || change.Empty() {
		out.answers[i] = answer{b.seq, err}
		return nil
	}
	d, err := b.draft(change)
	if err != nil {
		out.answers[i] = answer{0, err}
		return nil
	}
	if s.readOnly {
		out.answers[i] = answer{0, errReadOnly}
		return s.checkStillReadOnly()
	}
	if d.grows {
		switch err := s.reserve(b.transaction.tx.Size()); {
		case errors.Is(err, registry.ErrExhausted):
			out.answers[i] = answer{0, err}
			return nil
		case err != nil:
			return err
		}
	}
	out.shared[i] = true
	out.answers[i] = answer{index: d.applied.Index}
	out.applied = append(out.applied, d.applied)
	return b.write(d)
}

// publish commits the transaction, then shows it to views, then passes it to Options.Applied.
func (s *Store) publish(out *batchOutcome, tx *bolt.Tx) error {
	before, err := s.metas()
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "read meta pages: %w", err)
	}
	for _, applied := range out.applied {
		s.options.Committing(applied.Change)
	}
	out.sent = true
	if err := tx.Commit(); err != nil {
		return s.commitError(before, err)
	}
	if err := s.readers.publish(s.db); err != nil {
		return err
	}
	for _, applied := range out.applied {
		s.options.Applied(applied)
	}
	return nil
}
