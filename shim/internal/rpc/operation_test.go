package rpc

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/intent"
)

// operationEnv is a server without a connection. Its only mutating call stores its answer.
type operationEnv struct {
	t       *testing.T
	log     *registrytest.Log
	server  *Server
	release context.CancelCauseFunc
	gate    chan struct{} // the call waits until it is closed
	fails   error         // the error of the call
	runs    int           // how often the call has begun
	calls   sync.WaitGroup
}

func newOperationEnv(t *testing.T, log *registrytest.Log) *operationEnv {
	e := &operationEnv{t: t, log: log, server: New(idle{}, NewCallbacks(), hclog.NewNullLogger()),
		gate: make(chan struct{})}
	ctx, cancel := context.WithCancelCause(t.Context())
	e.release = cancel
	e.server.Set(&Active{Node: "here", State: e.log, Context: ctx})
	return e
}

// inBubble runs f in fake time.
func inBubble(t *testing.T, f func(t *testing.T, e *operationEnv)) {
	synctest.Test(t, func(t *testing.T) { f(t, newOperationEnv(t, registrytest.NewLog(time.Now))) })
}

// call makes the call for an alloc.
func (e *operationEnv) call(ctx context.Context, op *pb.Call, alloc string) (string, error) {
	req := &pb.ReleaseAllocRequest{Call: op, Alloc: alloc}
	return mutate(ctx, e.server, "Test.Call", req,
		func(ctx context.Context, a *Active, call registry.Call) (string, error) {
			e.runs++
			select {
			case <-e.gate:
			case <-ctx.Done():
				return "", context.Cause(ctx)
			}
			if e.fails != nil {
				return "", e.fails
			}
			return "done for " + alloc, a.store(ctx, call.Answered("done for "+alloc))
		})
}

// want makes a call in a goroutine. The call has to return err, or the answer if err is nil.
func (e *operationEnv) want(ctx context.Context, id string, err error) {
	e.calls.Go(func() {
		answer, got := e.call(ctx, &pb.Call{OperationId: id}, "a")
		if !errors.Is(got, err) || err == nil && (got != nil || answer != "done for a") {
			e.t.Errorf("a call of %s got %q, %v; want %v", id, answer, got, err)
		}
	})
	synctest.Wait()
}

func (e *operationEnv) open(wantRuns int) {
	close(e.gate)
	e.calls.Wait()
	if e.runs != wantRuns {
		e.t.Errorf("the call was begun %d times, not %d", e.runs, wantRuns)
	}
}

// A replay joins the first call, or gets its stored answer, even at a later shim. An ID is valid for one request only.
func TestReplayJoins(t *testing.T) {
	inBubble(t, func(t *testing.T, e *operationEnv) {
		refused := func(when string) {
			_, err := e.call(t.Context(), &pb.Call{OperationId: "op-1"}, "b")
			if !errors.Is(err, registry.ErrInvalid) {
				t.Errorf("the ID %s was taken for another request: %v", when, err)
			}
		}
		for range 3 {
			e.want(t.Context(), "op-1", nil)
		}
		refused("of a call under way")
		e.open(1)
		e.want(t.Context(), "op-1", nil)
		refused("of a call that was answered")
		e.calls.Wait()
		next := newOperationEnv(e.t, e.log.Reopen())
		next.want(t.Context(), "op-1", nil)
		next.open(0)
	})
}

// If the first caller gives up, a joiner runs the call itself, and keeps its own deadline.
func TestJoinerRunsWhatTheFirstLeft(t *testing.T) {
	inBubble(t, func(t *testing.T, e *operationEnv) {
		first, leave := context.WithCancel(t.Context())
		e.want(first, "op-1", context.Canceled)
		soon, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		e.want(soon, "op-1", context.DeadlineExceeded)
		e.want(t.Context(), "op-1", nil)
		time.Sleep(2 * time.Second)
		leave()
		synctest.Wait()
		e.open(2)
	})
}

// If the work itself ends at a deadline, that is its answer: a joiner gets it and does not try again.
func TestJoinerTakesAnAnswerThatIsADeadline(t *testing.T) {
	inBubble(t, func(t *testing.T, e *operationEnv) {
		e.fails = registry.Errorf(registry.ErrUncertain, "the plugin: %w", context.DeadlineExceeded)
		e.want(t.Context(), "op-1", e.fails)
		e.want(t.Context(), "op-1", e.fails)
		e.open(1)
	})
}

// A mutating call without an operation ID, or for another node, is refused.
func TestMutatingCallNeedsAnIDAndThisNode(t *testing.T) {
	inBubble(t, func(t *testing.T, e *operationEnv) {
		close(e.gate)
		for _, c := range []struct {
			call *pb.Call
			ok   bool
		}{
			{&pb.Call{}, false}, {&pb.Call{OperationId: "op-1", Node: "there"}, false},
			{&pb.Call{OperationId: "op-1", Node: "here"}, true},
		} {
			if _, err := e.call(t.Context(), c.call, "a"); notActive(err) || (err == nil) != c.ok ||
				(e.runs > 0) != c.ok {
				t.Errorf("%v: %v after %d runs", c.call, err, e.runs)
			}
		}
	})
}

// A quiesced server refuses new operations until Resume, and lets replays of running ones join. AwaitCalls waits for
// the running ones.
func TestQuiescedServerAwaitsRunningOperations(t *testing.T) {
	inBubble(t, func(t *testing.T, e *operationEnv) {
		e.want(t.Context(), "op-1", nil)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		e.server.Quiesce()
		if err := e.server.AwaitCalls(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("it did not wait: %v", err)
		}
		quiet := false
		e.calls.Go(func() { must(t, e.server.AwaitCalls(t.Context())); quiet = true })
		e.want(t.Context(), "op-1", nil)
		e.want(t.Context(), "op-2", errNotActive)
		if quiet {
			t.Error("AwaitCalls did not wait for the running call")
		}
		e.open(1)
		e.server.Resume()
		e.want(t.Context(), "op-2", nil)
		e.calls.Wait()
	})
}

// An operation that is between two commits when its shim releases the state is awaited. Its next commit is refused, and
// it gets no answer. The next shim runs it again.
func TestOperationBetweenTwoCommitsIsCutByARelease(t *testing.T) {
	inBubble(t, func(t *testing.T, e *operationEnv) {
		call := func(e *operationEnv) (string, error) {
			return mutate(t.Context(), e.server, "Test.Call",
				&pb.ReleaseAllocRequest{Call: &pb.Call{OperationId: "op-1"}},
				func(ctx context.Context, a *Active, call registry.Call) (string, error) {
					must(t, a.store(ctx, []registry.Record{volume("data")}))
					<-e.gate
					return "done", a.store(ctx, call.Answered("done"))
				})
		}
		e.calls.Go(func() {
			if _, err := call(e); !errors.Is(err, errNotActive) {
				t.Errorf("it got %v", err)
			}
		})
		synctest.Wait()
		e.server.Quiesce()
		e.release(registry.Errorf(registry.ErrUnavailable, "%w", intent.ErrReleased))
		awaited := false
		e.calls.Go(func() { must(t, e.server.AwaitCalls(t.Context())); awaited = true })
		if synctest.Wait(); awaited {
			t.Error("AwaitCalls did not wait for it")
		}
		close(e.gate)
		e.calls.Wait()
		next := newOperationEnv(t, e.log.Reopen())
		if commits := e.log.Commits(); commits != 1 {
			t.Errorf("%d commits, want 1", commits)
		}
		close(next.gate)
		if answer, err := call(next); answer != "done" || err != nil {
			t.Errorf("the next shim answers %q, %v", answer, err)
		}
	})
}

// An error that only reports the end of this shim is not passed on, so that the host asks the next shim.
func TestEndOfTheShimIsNoAnswer(t *testing.T) {
	inBubble(t, func(t *testing.T, e *operationEnv) {
		e.want(t.Context(), "op-1", errNotActive)
		e.release(registry.Errorf(registry.ErrUnavailable, "released"))
		e.calls.Wait()
	})
	inBubble(t, func(t *testing.T, e *operationEnv) {
		e.log.Lose(false) // the store fails
		e.want(t.Context(), "op-1", errNotActive)
		e.open(1)
	})
	inBubble(t, func(t *testing.T, e *operationEnv) { // as a control, any other error is passed on
		e.fails = registry.Errorf(registry.ErrUnavailable, "the plugin is not there")
		e.want(t.Context(), "op-1", e.fails)
		e.open(1)
	})
}

// If the caller sets no deadline, the call ends at a default one, and says so. The caller's own deadline is kept.
func TestEveryCallHasADeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		ctx, cancel := withDeadline(t.Context(), callLimit)
		defer cancel()
		<-ctx.Done()
		if !errors.Is(context.Cause(ctx), context.DeadlineExceeded) || time.Since(began) != callLimit {
			t.Errorf("ended after %v with %v", time.Since(began), context.Cause(ctx))
		}
		own, cancelOwn := context.WithTimeout(t.Context(), 2*callLimit)
		defer cancelOwn()
		if ctx, cancel = withDeadline(own, callLimit); ctx != own {
			t.Error("the caller's own deadline is replaced")
		}
		cancel()
	})
}

// A shim may die between any two commits of a removal. A replay at the next shim gets the same answer. It does not
// remove a volume that was created since under the same name. Another operation does not find the volume.
func TestRemovalIsAnsweredAfterADeath(t *testing.T) {
	name := registry.VolumeName{Namespace: "default", ID: "data"}
	errDied := errors.New("died")
	for what, c := range map[string]struct {
		dies      func(e *operationEnv, remove func() error) error // how the shim dies in the first run
		recreated bool
		op        string
		runs      int
		kind      error
	}{
		"before the removal": {dies: func(*operationEnv, func() error) error { return errDied }, op: "op-1", runs: 2},
		"before the answer": {
			dies: func(e *operationEnv, remove func() error) error {
				must(t, remove())
				e.log.Fail(errDied)
				return nil
			}, op: "op-1", runs: 1,
		},
		"before the answer, and the volume was created again": {
			dies:      func(_ *operationEnv, remove func() error) error { must(t, remove()); return errDied },
			recreated: true, op: "op-1", runs: 1,
		},
		"before the answer, and another operation follows": {
			dies: func(_ *operationEnv, remove func() error) error { must(t, remove()); return errDied },
			op:   "op-2", runs: 2, kind: registry.ErrNotFound,
		},
	} {
		e, runs := newOperationEnv(t, registrytest.NewLog(time.Now)), 0
		remove := func() error {
			_, err := e.log.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
				if _, found := v.Volume(name); !found {
					return registry.Change{}, registry.Errorf(registry.ErrNotFound, "volume %s not found", name)
				}
				return registry.Change{Delete: []registry.Key{name.Key()}}, nil
			})
			return err
		}
		call := func(op string, run func() error) error {
			req := &pb.DeleteVolumeRequest{Call: &pb.Call{OperationId: op}}
			_, err := mutate(t.Context(), e.server, "Test.Remove", req,
				func(ctx context.Context, a *Active, call registry.Call) (struct{}, error) {
					return struct{}{}, runRemoval(ctx, a, call, volumeIndex(name),
						func() error { runs++; return run() })
				})
			return err
		}
		put(t, e.log, volume("data"))
		if err := call("op-1", func() error { return c.dies(e, remove) }); !errors.Is(err, errDied) {
			t.Errorf("%s: the first call: %v", what, err)
		}
		if c.recreated {
			put(t, e.log, volume("data"))
		}
		for range 2 { // the second replay gets the stored answer
			if err := call(c.op, remove); !errors.Is(err, c.kind) || c.kind == nil && err != nil {
				t.Errorf("%s: the replay: %v", what, err)
			}
			if c.kind != nil {
				break
			}
		}
		var found bool
		must(t, e.log.View(t.Context(), func(v registry.View) error { _, found = v.Volume(name); return nil }))
		if runs != c.runs || found != c.recreated {
			t.Errorf("%s: it ran %d times, and the volume is found: %v", what, runs, found)
		}
	}
}
