package cluster

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/registry"
)

// broadcast wakes all goroutines that wait for a change.
type broadcast struct {
	mu sync.Mutex // guards ch
	ch chan struct{}
}

// next returns a channel that is closed at the next change.
func (b *broadcast) next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

// fire wakes all waiting goroutines.
func (b *broadcast) fire() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}

// reports logs the errors of a loop. It logs an error once, and again only after another error or a success.
type reports struct{ last string }

func (r *reports) log(log hclog.Logger, what string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != r.last && text != "" {
		log.Warn(what, "error", err)
	}
	r.last = text
}

// runSteps calls step at once, after each change, when the lease becomes valid again, and one second after an error of
// step. It logs the errors of step with the message what. It returns when ctx ends, or when this node is fenced.
func (s *session) runSteps(
	ctx context.Context, changes *broadcast, log hclog.Logger, what string, step func(context.Context) error,
) error {
	for logged := (reports{}); ; {
		changed, valid := changes.next(), s.valid.next()
		err := step(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if errors.Is(err, registry.ErrFenced) {
			return err
		}
		logged.log(log, what, err)
		var again <-chan time.Time
		if err != nil {
			again = time.After(time.Second)
		}
		select {
		case <-changed:
		case <-valid:
		case <-again:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// running is the set of the tasks that run now, by key. No task runs twice at a time.
type running[K comparable] struct {
	mu    sync.Mutex // guards keys
	keys  map[K]bool
	ended broadcast // fires when a task has ended
}

// begin adds a task, and reports whether the caller may run it: false if it runs already.
func (r *running[K]) begin(key K) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.keys[key] {
		return false
	}
	if r.keys == nil {
		r.keys = map[K]bool{}
	}
	r.keys[key] = true
	return true
}

// end removes a task that has ended.
func (r *running[K]) end(key K) {
	r.mu.Lock()
	delete(r.keys, key)
	r.mu.Unlock()
	r.ended.fire()
}

// viewed returns what read returns for the state.
func viewed[T any](ctx context.Context, s registry.State, read func(registry.View) T) (result T, err error) {
	err = s.View(ctx, func(v registry.View) error { result = read(v); return nil })
	return result, err
}
