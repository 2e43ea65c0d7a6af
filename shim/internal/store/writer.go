package store

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"

	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
)

// request is one Commit on its way. Whoever moves it on from waiting owns its fate.
type request struct {
	decide func(registry.View) (registry.Change, error)
	state  atomic.Int32 // waiting, taken by the writer or withdrawn by the caller
	answer chan answer  // of capacity 1
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

// queue holds what waits for the writer.
type queue struct {
	mu       sync.Mutex
	requests []*request
	refusal  error         // of all that comes now
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

// take is all that waits and has not been withdrawn.
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

// refuse answers all that waits, and all that comes, with err.
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

// Commit is registry.Log's. It waits for Run to be going. When ctx ends while the change is being written its outcome is not
// known to the caller.
func (s *Store) Commit(ctx context.Context, decide func(registry.View) (registry.Change, error)) (registry.Seq, error) {
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	r := &request{decide: decide, answer: make(chan answer, 1)}
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

// Run writes what is committed, until ctx ends, the store is closed or something is wrong with the file. It returns why. After
// an error other than ctx's the process must not go on with this state.
func (s *Store) Run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			s.halt(registry.Errorf(registry.ErrUnavailable, "the store has stopped: %v", context.Cause(ctx)))
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

// halt lets nothing be written from now on. The first reason stands.
func (s *Store) halt(reason error) {
	s.stop.Do(func() {
		s.reason = reason
		close(s.stopped)
	})
	s.queue.refuse(refusal(s.reason))
}

// fail is halt for what ends the process.
func (s *Store) fail(err error) { s.halt(err) }

// refusal is what callers get whose commit was not even begun: unlike the reason it is never uncertain.
func refusal(reason error) error {
	for _, kind := range []error{registry.ErrFenced, registry.ErrDamaged} {
		if errors.Is(reason, kind) {
			return registry.Errorf(kind, "the store has stopped: %v", reason)
		}
	}
	return registry.Errorf(registry.ErrUnavailable, "the store has stopped: %v", reason)
}

// commit writes one batch and answers everybody in it. A caller who decided on what others of the batch had changed shares
// their fate, also if it has changed nothing: what it saw may never have come true.
func (s *Store) commit(requests []*request) {
	if len(requests) == 0 {
		return
	}
	select {
	case <-s.stopped:
		for _, r := range requests {
			r.answer <- answer{0, refusal(s.reason)}
		}
		return
	default:
	}
	g := &group{answers: make([]answer, len(requests)), shared: make([]bool, len(requests))}
	err := reading(func() error { return s.write(g, requests) })
	if err != nil && !errors.Is(err, registry.ErrExhausted) {
		s.fail(err)
	}
	for i, r := range requests {
		switch {
		case err != nil && g.sent && g.shared[i]:
			r.answer <- answer{0, outcome(err)}
		case err != nil && (g.shared[i] || i >= g.decided):
			r.answer <- answer{0, s.notWritten(err)}
		default:
			r.answer <- g.answers[i]
		}
	}
}

// group is a batch with its callers.
type group struct {
	answers []answer
	shared  []bool // the caller's answer depends on the transaction
	decided int    // how many have been asked
	sent    bool   // the transaction has been given to the disk
	applied []registry.Applied
}

// outcome of a transaction that was given to the disk.
func outcome(err error) error {
	if errors.Is(err, registry.ErrExhausted) {
		return err
	}
	return registry.Errorf(registry.ErrUncertain, "%w", err)
}

// notWritten is what those get whose transaction never reached the disk.
func (s *Store) notWritten(err error) error {
	if errors.Is(err, registry.ErrExhausted) {
		return err
	}
	return refusal(err)
}

// write decides and writes within one transaction. An error of it is the transaction's, not a caller's.
func (s *Store) write(g *group, requests []*request) error {
	tx, err := s.db.Begin(true)
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "begin: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // of no effect after Commit
	if err := s.sane(tx); err != nil {
		return err
	}
	t := newTransaction(tx)
	b := &batch{
		transaction: t, view: s.view(tx, readHead(tx)), generation: s.generation, eventLimit: s.options.EventLimit,
		now: s.options.Now,
	}
	for i, r := range requests {
		if err := s.decide(g, b, i, r); err != nil {
			return err
		}
		g.decided++
	}
	if !b.dirty {
		return nil
	}
	if err := b.finish(); err != nil {
		return err
	}
	return s.publish(g, tx)
}

// decide asks one caller and writes what it wants.
func (s *Store) decide(g *group, b *batch, i int, r *request) error {
	g.shared[i] = b.dirty
	change, err := r.decide(b.view)
	if err != nil || change.Empty() {
		g.answers[i] = answer{b.seq, err}
		return nil
	}
	d, err := b.draft(change)
	if err != nil {
		g.answers[i] = answer{0, err}
		return nil
	}
	if s.readOnly {
		g.answers[i] = answer{0, errReadOnly}
		return s.writableAgain()
	}
	if d.grows {
		switch err := s.reserve(b.transaction.tx.Size()); {
		case errors.Is(err, registry.ErrExhausted):
			g.answers[i] = answer{0, err}
			return nil
		case err != nil:
			return err
		}
	}
	g.shared[i] = true
	g.answers[i] = answer{index: d.applied.Index}
	g.applied = append(g.applied, d.applied)
	return b.write(d)
}

// publish commits, then shows, then tells.
func (s *Store) publish(g *group, tx *bolt.Tx) error {
	before, err := s.metas()
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "read meta pages: %w", err)
	}
	g.sent = true
	if err := tx.Commit(); err != nil {
		return s.judge(before, err)
	}
	if err := s.readers.publish(s.db); err != nil {
		return err
	}
	for _, applied := range g.applied {
		s.options.Applied(applied)
	}
	return nil
}
