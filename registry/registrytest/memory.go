package registrytest

import (
	"cmp"
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/registry"
)

// Log is a registry.State in memory. Reopen stands for a restart of the process.
type Log struct {
	now       func() time.Time
	committed atomic.Pointer[state] // what views see
	keep      int                   // how many events are kept

	mu        sync.Mutex // held by one commit at a time
	listeners []func(registry.Applied)
	commits   int
	fault     *fault
	durable   *state // what Reopen finds; differs from committed after Lose
	dead      error  // the error of all further commits; nil: none
	hold      chan struct{}
}

// fault describes how the next commit fails.
type fault struct {
	err     error
	written bool // the commit is written all the same
	fatal   bool // later commits fail as well
	skip    int  // commits that succeed before
}

// NewLog returns an empty state of generation 1. now stamps events that have no time.
func NewLog(now func() time.Time) *Log {
	l := &Log{now: now, keep: registry.MaxEvents}
	l.publish(&state{generation: 1})
	return l
}

// OnApplied makes Commit call f with each change that it has committed, in commit order, before it returns. f must not
// block or commit.
func (l *Log) OnApplied(f func(registry.Applied)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.listeners = append(l.listeners, f)
}

// KeepEvents prunes all but the newest n events with the next commit.
func (l *Log) KeepEvents(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.keep = n
}

// Fail makes the next commit that would write something write nothing and return err.
func (l *Log) Fail(err error) { l.setFault(fault{err: err}) }

// Lose makes the next commit that would write something return ErrUncertain. written says whether Reopen finds its
// changes. No listener is called, and later commits fail.
func (l *Log) Lose(written bool) { l.LoseAfter(0, written) }

// LoseAfter is Lose after n more commits that write something.
func (l *Log) LoseAfter(n int, written bool) {
	l.setFault(fault{
		err: registry.Errorf(registry.ErrUncertain,
			"injected: the outcome of the commit is unknown"), written: written, fatal: true, skip: n,
	})
}

func (l *Log) publish(s *state) {
	l.durable = s
	l.committed.Store(s)
}

// Heal cancels a Fail or Lose that has not taken effect yet.
func (l *Log) Heal() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fault = nil
}

func (l *Log) setFault(f fault) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fault = &f
}

// Commits returns the number of commits that have written something.
func (l *Log) Commits() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.commits
}

// Hold makes commits wait between their decision and their storage until release is called.
func (l *Log) Hold() (release func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	held := make(chan struct{})
	l.hold = held
	return sync.OnceFunc(func() { close(held) })
}

// Reopen fences l and returns its successor: what was durable, under the next generation, without listeners.
func (l *Log) Reopen() *Log {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dead = registry.Errorf(registry.ErrFenced, "the log was reopened")
	next := *l.durable
	next.generation++
	successor := &Log{now: l.now, keep: l.keep}
	successor.publish(&next)
	return successor
}

// Commit implements registry.State.
func (l *Log) Commit(ctx context.Context, decisions ...registry.Decision) (registry.Seq, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case l.dead != nil:
		return 0, l.dead
	}
	after, applied := l.committed.Load(), []registry.Applied{}
	var at registry.Seq
	var refused error
	for _, decide := range decisions {
		change, err := decide(registry.View{Reader: after})
		if err == nil {
			err = change.Check()
		}
		if err != nil {
			at, refused = 0, err
			break
		}
		at = after.index
		if !change.Empty() {
			for i := range change.Events {
				change.Events[i].At = cmp.Or(change.Events[i].At, l.now())
			}
			next, a := after.with(change, l.keep)
			after, applied, at = next, append(applied, a), a.Index
		}
	}
	if len(applied) == 0 {
		return at, refused
	}
	if l.hold != nil {
		<-l.hold
	}
	if f := l.fault; f != nil {
		if f.skip--; f.skip < 0 {
			l.fault = nil
			if f.fatal {
				l.dead = f.err
			}
			if f.written {
				l.durable = after
			}
			return 0, f.err
		}
	}
	l.publish(after)
	l.commits++
	for _, a := range applied {
		for _, listener := range l.listeners {
			listener(a)
		}
	}
	return at, refused
}

// View implements registry.State.
func (l *Log) View(ctx context.Context, read func(registry.View) error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return read(registry.View{Reader: l.committed.Load()})
}

// Write commits a change that does not depend on the state, in as many parts as necessary, shared records first.
func Write(ctx context.Context, s registry.State, c registry.Change) (at registry.Seq, err error) {
	for _, part := range c.Parts() {
		at, err = s.Commit(ctx, func(registry.View) (registry.Change, error) { return part, nil })
		if err != nil {
			return 0, err
		}
	}
	return at, nil
}

// Put commits records that do not depend on the state, as Write does.
func Put(t testing.TB, s registry.State, records ...registry.Record) {
	t.Helper()
	if _, err := Write(context.Background(), s, registry.Change{Put: records}); err != nil {
		t.Fatal(err)
	}
}
