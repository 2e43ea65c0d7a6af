package chain_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/chain"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func alloc(id registry.AllocID) registry.Record {
	return registry.Alloc{ID: id, State: registry.AllocReady}
}

// puts is a decision.
func puts(records ...registry.Record) chain.Decision {
	return func(registry.View) (registry.Change, error) {
		return registry.Change{Put: records, Events: []registry.Event{{Kind: registry.EventStaged, Detail: fmt.Sprint(len(records))}}}, nil
	}
}

func refuses(err error) chain.Decision {
	return func(registry.View) (registry.Change, error) { return registry.Change{}, err }
}

// ids is the allocs that are seen with ctx.
func ids(t *testing.T, ctx context.Context, log registry.Log) (ids []string) {
	t.Helper()
	must(t, log.View(ctx, func(v registry.View) error {
		ids = nil
		for _, a := range v.Allocs() {
			ids = append(ids, string(a.ID))
		}
		return nil
	}))
	return ids
}

// world is a log in memory, and what was committed to it.
type world struct {
	*registrytest.Log
	log     registry.Log
	mu      sync.Mutex
	commits []registry.Change
}

func newWorld() *world {
	w := &world{Log: registrytest.NewLog(time.Now)}
	w.log = chain.Over(w.Log)
	w.OnApplied(func(a registry.Applied) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.commits = append(w.commits, a.Change)
	})
	return w
}

func (w *world) written() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.commits)
}

func leave(t *testing.T, ctx context.Context, d chain.Decision) {
	t.Helper()
	if !chain.Leave(ctx, d) {
		t.Fatal("nothing was left")
	}
}

func commit(ctx context.Context, log registry.Log, d chain.Decision) error {
	_, err := log.Commit(ctx, d)
	return err
}

// C1
func TestTheChainSeesWhatItLeft(t *testing.T) {
	w := newWorld()
	ctx, c := chain.Begin(t.Context(), w.log)
	leave(t, ctx, puts(alloc("a")))
	leave(t, ctx, func(v registry.View) (registry.Change, error) {
		if _, found := v.Alloc("a"); !found {
			return registry.Change{}, errors.New("what was left before is not seen")
		}
		return puts(alloc("b"))(v)
	})
	if got := ids(t, ctx, w.log); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("the chain sees %v", got)
	}
	if got := ids(t, t.Context(), w.log); len(got) != 0 || w.written() != 0 {
		t.Errorf("others see %v after %d commits", got, w.written())
	}
	must(t, commit(ctx, w.log, func(v registry.View) (registry.Change, error) {
		if len(v.Allocs()) != 2 {
			return registry.Change{}, fmt.Errorf("a commit sees %v", v.Allocs())
		}
		return registry.Change{Put: []registry.Record{alloc("c")}, Delete: []registry.Key{registry.AllocRecord("a")}}, nil
	}))
	if got := ids(t, t.Context(), w.log); !slices.Equal(got, []string{"b", "c"}) || w.written() != 1 || len(w.commits[0].Events) != 2 {
		t.Errorf("written is %v, by %d commits with %v", got, w.written(), w.commits)
	}
	must(t, c.End(ctx))
	if w.written() != 1 {
		t.Error("the end wrote again what was written")
	}
}

// C2
func TestLeftIsWrittenSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		ctx, c := chain.Begin(t.Context(), w.log)
		leave(t, ctx, puts(alloc("a")))
		time.Sleep(chain.Longest - time.Nanosecond)
		synctest.Wait()
		leave(t, ctx, puts(alloc("b"))) // does not put it off
		if w.written() != 0 {
			t.Error("it was written before its time")
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if got := ids(t, t.Context(), w.log); len(got) != 2 || w.written() != 1 {
			t.Errorf("written is %v", got)
		}
		leave(t, ctx, puts(alloc("c"))) // and again
		time.Sleep(chain.Longest)
		synctest.Wait()
		if w.written() != 2 {
			t.Error("what was left later is not written")
		}
		must(t, c.End(ctx))
	})
}

func TestTheEndWrites(t *testing.T) {
	w := newWorld()
	gone, cancel := context.WithCancel(t.Context())
	ctx, c := chain.Begin(gone, w.log)
	leave(t, ctx, puts(alloc("a")))
	cancel()
	if err := commit(ctx, w.log, puts(alloc("b"))); !errors.Is(err, context.Canceled) || w.written() != 0 {
		t.Errorf("a commit of who has gone: %v", err)
	}
	must(t, c.End(ctx))
	if got := ids(t, t.Context(), w.log); !slices.Equal(got, []string{"a"}) {
		t.Errorf("written is %v", got)
	}
	if chain.Leave(ctx, puts(alloc("c"))) {
		t.Error("something was left after the end")
	}
}

func TestWriteIsForWhoWaits(t *testing.T) {
	w := newWorld()
	must(t, chain.Write(t.Context())) // no chain
	ctx, c := chain.Begin(t.Context(), w.log)
	must(t, chain.Write(ctx))
	leave(t, ctx, puts(alloc("a")))
	must(t, chain.Write(ctx))
	if w.written() != 1 {
		t.Errorf("%d commits", w.written())
	}
	must(t, c.End(ctx))
}

// What was left stood before the next step was decided, so it is written though that one is refused.
func TestARefusalKeepsWhatWasLeft(t *testing.T) {
	w := newWorld()
	ctx, c := chain.Begin(t.Context(), w.log)
	leave(t, ctx, puts(alloc("a")))
	why := errors.New("no")
	if err := commit(ctx, w.log, refuses(why)); err != why {
		t.Errorf("the refusal is %v", err)
	}
	if got := ids(t, t.Context(), w.log); !slices.Equal(got, []string{"a"}) {
		t.Errorf("written is %v", got)
	}
	must(t, c.End(ctx))
}

// What cannot be written together may be so alone: the next step needs room on a disk that is full, and what was left does not.
func TestAFailedCommitKeepsWhatWasLeft(t *testing.T) {
	w := newWorld()
	ctx, c := chain.Begin(t.Context(), w.log)
	leave(t, ctx, puts(alloc("a")))
	full := registry.Errorf(registry.ErrExhausted, "full")
	w.Fail(full)
	if err := commit(ctx, w.log, puts(alloc("b"))); err != full || w.written() != 0 {
		t.Errorf("the commit: %v", err)
	}
	must(t, c.End(ctx))
	if got := ids(t, t.Context(), w.log); !slices.Equal(got, []string{"a"}) {
		t.Errorf("written is %v", got)
	}
}

// What does not stand any more when it is to be written is dropped, and the next step learns it, whoever finds it out.
func TestWhatDoesNotStandIsTold(t *testing.T) {
	why := errors.New("it was forgotten")
	for name, next := range map[string]func(ctx context.Context, w *world, c *chain.Chain) error{
		"commit": func(ctx context.Context, w *world, _ *chain.Chain) error { return commit(ctx, w.log, puts(alloc("b"))) },
		"view": func(ctx context.Context, w *world, _ *chain.Chain) error {
			return w.log.View(ctx, func(registry.View) error { return nil })
		},
		"end": func(ctx context.Context, _ *world, c *chain.Chain) error { return c.End(ctx) },
		"after the timer": func(ctx context.Context, w *world, _ *chain.Chain) error {
			time.Sleep(chain.Longest)
			synctest.Wait()
			return commit(ctx, w.log, puts(alloc("b")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld()
				ctx, c := chain.Begin(t.Context(), w.log)
				leave(t, ctx, refuses(why))
				if err := next(ctx, w, c); err != why || w.written() != 0 {
					t.Errorf("told was %v after %d commits", err, w.written())
				}
				must(t, c.End(ctx))
			})
		})
	}
}

// Who reads while it is being written waits, and misses nothing.
func TestNobodyMissesWhatIsBeingWritten(t *testing.T) {
	w := newWorld()
	ctx, c := chain.Begin(t.Context(), w.log)
	leave(t, ctx, puts(alloc("a")))
	release := w.Hold()
	ended := make(chan error)
	go func() { ended <- chain.Write(ctx) }()
	seen := make(chan []string)
	go func() { seen <- ids(t, ctx, w.log) }()
	release()
	must(t, <-ended)
	if got := <-seen; !slices.Equal(got, []string{"a"}) {
		t.Errorf("seen was %v", got)
	}
	must(t, c.End(ctx))
}

func TestWithoutAChainNothingIsLeft(t *testing.T) {
	w := newWorld()
	bare, c := chain.Begin(t.Context(), w.Log) // not made by Over
	for _, ctx := range []context.Context{t.Context(), bare} {
		if chain.Leave(ctx, puts(alloc("a"))) {
			t.Error("it was left")
		}
	}
	must(t, c.End(bare))
	must(t, commit(t.Context(), w.log, puts(alloc("a"))))
	if w.written() != 1 {
		t.Errorf("%d commits", w.written())
	}
}

// Others use the log as they would without chains.
func TestLogPassesTheSuite(t *testing.T) {
	registrytest.TestLog(t, func(t *testing.T) (registry.Log, func() registry.Log) {
		log := registrytest.NewLog(func() time.Time { return time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC) })
		return chain.Over(log), func() registry.Log { log = log.Reopen(); return chain.Over(log) }
	})
}
