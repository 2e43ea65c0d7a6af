package controller

import (
	"context"
	"sync"
)

// wakeup makes a Run look for unfinished operations. It holds at most one token.
type wakeup chan struct{}

// Wake makes Run look for unfinished operations: a caller may have left one, or this node may have become the executor
// of its plugin.
func (w wakeup) Wake() {
	select {
	case w <- struct{}{}:
	default: // Run has yet to take the pending token
	}
}

// runUnfinished calls resume for each unfinished operation that list returns, at most once at a time for each key. It
// calls list again after each Wake. It returns when ctx has ended, or when list has failed; before that it ends all
// operations and waits for them. first is true for the operations that the process finds at its start.
func runUnfinished[K comparable](
	ctx context.Context, wake wakeup, list func(context.Context) ([]K, error),
	resume func(ctx context.Context, key K, first bool),
) error {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	var mu sync.Mutex // guards running
	running := map[K]bool{}
	for first := true; ; first = false {
		keys, err := list(ctx)
		if err != nil {
			return err
		}
		for _, key := range keys {
			mu.Lock()
			found := running[key]
			running[key] = true
			mu.Unlock()
			if found {
				continue
			}
			all.Go(func() {
				resume(ctx, key, first)
				mu.Lock()
				delete(running, key)
				mu.Unlock()
				wake.Wake() // another operation may have been left unfinished meanwhile
			})
		}
		select {
		case <-wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
