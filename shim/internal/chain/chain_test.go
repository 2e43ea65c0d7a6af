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
func ids(t *testing.T, ctx context.Context, log registry.State) (ids []string) {
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
	log     registry.State
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

func write(ctx context.Context) (err error) {
	chain.Write(ctx, &err)
	return err
}

func end(ctx context.Context, c *chain.Chain) (err error) {
	c.End(ctx, &err)
	return err
}

func leave(t *testing.T, ctx context.Context, d chain.Decision) {
	t.Helper()
	if !chain.Leave(ctx, d) {
		t.Fatal("nothing was left")
	}
}

func commit(ctx context.Context, log registry.State, d chain.Decision) error {
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
	must(t, end(ctx, c))
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
		must(t, end(ctx, c))
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
	must(t, end(ctx, c))
	if got := ids(t, t.Context(), w.log); !slices.Equal(got, []string{"a"}) {
		t.Errorf("written is %v", got)
	}
	if chain.Leave(ctx, puts(alloc("c"))) {
		t.Error("something was left after the end")
	}
}

func TestWriteIsForWhoWaits(t *testing.T) {
	w := newWorld()
	must(t, write(t.Context())) // no chain
	ctx, c := chain.Begin(t.Context(), w.log)
	must(t, write(ctx))
	leave(t, ctx, puts(alloc("a")))
	must(t, write(ctx))
	if w.written() != 1 {
		t.Errorf("%d commits", w.written())
	}
	must(t, end(ctx, c))
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
	must(t, end(ctx, c))
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
	must(t, end(ctx, c))
	if got := ids(t, t.Context(), w.log); !slices.Equal(got, []string{"a"}) {
		t.Errorf("written is %v", got)
	}
}

// What does not stand any more when it is to be written is dropped, and the next step learns it, whoever finds it out.
func TestWhatDoesNotStandIsTold(t *testing.T) {
	why := errors.New("it was forgotten")
	for name, next := range map[string]func(ctx context.Context, w *world, c *chain.Chain) error{
		"commit": func(ctx context.Context, w *world, _ *chain.Chain) error { return commit(ctx, w.log, puts(alloc("b"))) },
		"a view that nobody heeds, and a commit": func(ctx context.Context, w *world, _ *chain.Chain) error {
			if err := w.log.View(ctx, func(registry.View) error { return nil }); err != why {
				return fmt.Errorf("the view: %w", err)
			}
			return commit(ctx, w.log, puts(alloc("b")))
		},
		"end":   func(ctx context.Context, _ *world, c *chain.Chain) error { return end(ctx, c) },
		"write": func(ctx context.Context, _ *world, _ *chain.Chain) error { return write(ctx) },
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
				must(t, end(ctx, c))
			})
		})
	}
}

// What was left before what does not stand any more is the outcome of something else, and is written.
func TestOutcomesBeforeARefusalAreWritten(t *testing.T) {
	w := newWorld()
	ctx, c := chain.Begin(t.Context(), w.log)
	why := errors.New("no")
	for _, d := range []chain.Decision{puts(alloc("a")), refuses(why), puts(alloc("b"))} {
		leave(t, ctx, d)
	}
	if err := commit(ctx, w.log, puts(alloc("c"))); err != why {
		t.Errorf("told was %v", err)
	}
	if got := ids(t, t.Context(), w.log); !slices.Equal(got, []string{"a"}) {
		t.Errorf("written is %v", got)
	}
	must(t, end(ctx, c))
}

// C3: what cannot be written before the lane is left is not written when others are in it.
func TestWhatCannotBeWrittenIsDropped(t *testing.T) {
	w := newWorld()
	ctx, c := chain.Begin(t.Context(), w.log)
	leave(t, ctx, puts(alloc("a")))
	full := registry.Errorf(registry.ErrExhausted, "full")
	w.Fail(full)
	if err := write(ctx); err != full {
		t.Errorf("the write: %v", err)
	}
	leave(t, ctx, puts(alloc("b")))
	must(t, end(ctx, c))
	if got := ids(t, t.Context(), w.log); !slices.Equal(got, []string{"b"}) {
		t.Errorf("written is %v", got)
	}
	err := errors.New("of a step")
	step := err
	ctx, c = chain.Begin(t.Context(), w.log)
	leave(t, ctx, puts(alloc("c")))
	w.Fail(full)
	if c.End(ctx, &err); !errors.Is(err, step) || !errors.Is(err, full) {
		t.Errorf("told is %v", err)
	}
}

// What may have been written is not decided once more.
func TestUncertainIsNotRepeated(t *testing.T) {
	w := newWorld()
	ctx, c := chain.Begin(t.Context(), w.log)
	asked := 0
	leave(t, ctx, func(v registry.View) (registry.Change, error) { asked++; return puts(alloc("a"))(v) })
	w.Lose(true)
	if err := commit(ctx, w.log, puts(alloc("b"))); !errors.Is(err, registry.ErrUncertain) {
		t.Errorf("the commit: %v", err)
	}
	if err := w.log.View(ctx, func(registry.View) error { return nil }); !errors.Is(err, registry.ErrUncertain) {
		t.Errorf("a view after it: %v", err)
	}
	if err := end(ctx, c); !errors.Is(err, registry.ErrUncertain) || asked != 1 {
		t.Errorf("the end: %v, after the decision was asked %d times", err, asked)
	}
}

// A write that the timer began and that failed is told, and the next is begun in time.
func TestTheTimerFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		ctx, c := chain.Begin(t.Context(), w.log)
		full := registry.Errorf(registry.ErrExhausted, "full")
		leave(t, ctx, puts(alloc("a")))
		w.Fail(full)
		time.Sleep(chain.Longest)
		synctest.Wait()
		if err := commit(ctx, w.log, puts(alloc("b"))); err != full || w.written() != 0 {
			t.Errorf("told was %v after %d commits", err, w.written())
		}
		leave(t, ctx, puts(alloc("c")))
		time.Sleep(chain.Longest)
		synctest.Wait()
		if w.written() != 1 {
			t.Errorf("%d commits", w.written())
		}
		must(t, end(ctx, c))
	})
}

// Who reads while it is being written waits, and misses nothing; or for as long as he likes.
func TestNobodyMissesWhatIsBeingWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld()
		ctx, c := chain.Begin(t.Context(), w.log)
		leave(t, ctx, puts(alloc("a")))
		release := w.Hold()
		ended := make(chan error)
		go func() { ended <- write(ctx) }()
		synctest.Wait() // it is being written
		seen := make(chan []string, 1)
		go func() { seen <- ids(t, ctx, w.log) }()
		synctest.Wait()
		select {
		case got := <-seen:
			t.Errorf("seen was %v before it was written", got)
		default:
		}
		brief, cancel := context.WithTimeout(ctx, time.Millisecond)
		defer cancel()
		if err := w.log.View(brief, func(registry.View) error { return nil }); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("who has a millisecond: %v", err)
		}
		release()
		must(t, <-ended)
		if got := <-seen; !slices.Equal(got, []string{"a"}) {
			t.Errorf("seen was %v", got)
		}
		must(t, end(ctx, c))
	})
}

func TestWithoutAChainNothingIsLeft(t *testing.T) {
	w := newWorld()
	bare, c := chain.Begin(t.Context(), w.Log) // not made by Over
	for _, ctx := range []context.Context{t.Context(), bare} {
		if chain.Leave(ctx, puts(alloc("a"))) {
			t.Error("it was left")
		}
	}
	must(t, end(bare, c))
	must(t, commit(t.Context(), w.log, puts(alloc("a"))))
	if w.written() != 1 {
		t.Errorf("%d commits", w.written())
	}
}

// Others use the log as they would without chains.
func TestLogPassesTheSuite(t *testing.T) {
	registrytest.TestLog(t, func(t *testing.T) (registry.State, func() registry.State) {
		log := registrytest.NewLog(func() time.Time { return time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC) })
		return chain.Over(log), func() registry.State { log = log.Reopen(); return chain.Over(log) }
	})
}
