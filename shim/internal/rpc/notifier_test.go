package rpc

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"holdfast/registry"
)

// Who waits is woken by instances and tasks, also if they changed before he waited, and by nothing else.
func TestPulse(t *testing.T) {
	put := func(r registry.Record) registry.Applied {
		return registry.Applied{Change: registry.Change{Put: []registry.Record{r}}}
	}
	gone := registry.Applied{Change: registry.Change{Delete: []registry.Key{registry.TaskKey{Alloc: "a",
		Task: "t"}.Key()}}}
	for _, c := range []struct {
		name  string
		with  registry.Applied
		count bool
	}{
		{"an instance", put(instance("a")), true}, {"a task", put(registry.Task{}), true},
		{"a task that is gone", gone, true},
		{"a volume", put(volume("v")), false}, {"an alloc", put(registry.Alloc{ID: "a"}), false},
		{"an event", registry.Applied{}, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			var p Notifier
			ctx, cancel := context.WithCancelCause(t.Context())
			enough := errors.New("enough")
			ended := make(chan error, 2)
			seen := p.Count()
			go func() { ended <- p.Wait(ctx, seen) }()
			synctest.Wait()
			p.Applied(c.with)
			synctest.Wait()
			go func() { ended <- p.Wait(ctx, seen) }()
			synctest.Wait()
			if got := len(ended) == 2; got != c.count || len(ended) == 1 {
				t.Errorf("%s: %d of 2 were woken", c.name, len(ended))
			}
			cancel(enough)
			for range 2 {
				if err := <-ended; err != nil && (c.count || err != enough) {
					t.Errorf("%s: %v", c.name, err)
				}
			}
		})
	}
}
