package node

import (
	"context"
	"sync"
)

// workers runs functions on goroutines that outlive the call that started them. The goroutines start when run starts,
// and all have ended when run returns.
type workers struct {
	mu      sync.Mutex
	ctx     context.Context // set while running
	waiting []func(context.Context)
	ended   bool
	wg      sync.WaitGroup
}

// start runs f on a new goroutine, as soon as run has started. It returns false, and does not run f, once the context
// of run has ended.
func (w *workers) start(f func(context.Context)) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.ended:
		return false
	case w.ctx == nil:
		w.waiting = append(w.waiting, f)
	default:
		ctx := w.ctx
		w.wg.Go(func() { f(ctx) })
	}
	return true
}

// run starts the waiting functions, and returns when ctx and all functions have ended.
func (w *workers) run(ctx context.Context) error {
	w.mu.Lock()
	w.ctx = ctx
	waiting := w.waiting
	w.waiting = nil
	for _, f := range waiting {
		w.wg.Go(func() { f(ctx) })
	}
	w.mu.Unlock()
	<-ctx.Done()
	w.mu.Lock()
	w.ended = true
	w.mu.Unlock()
	w.wg.Wait()
	return context.Cause(ctx)
}
