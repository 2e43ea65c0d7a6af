package rpc

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/intent"
)

// desk is what once needs, and an account of how often the work was done.
type desk struct {
	log     *registrytest.Log
	server  *Server
	release context.CancelCauseFunc
	runs    atomic.Int32
}

func newDesk(t *testing.T) *desk {
	d := &desk{log: registrytest.NewLog(time.Now), server: New(idle{}, &Callbacks{}, hclog.NewNullLogger())}
	ctx, cancel := context.WithCancelCause(t.Context())
	d.release = cancel
	d.server.Set(&Active{Node: "here", State: d.log, Context: ctx})
	return d
}

func asking(id, alloc string) *pb.ReleaseAllocRequest {
	return &pb.ReleaseAllocRequest{Call: &pb.Call{OperationId: id}, Alloc: alloc}
}

// ask makes a call whose work waits for gate, if there is one, and stores its answer.
func (d *desk) ask(
	ctx context.Context, req *pb.ReleaseAllocRequest, gate <-chan struct{}, fails error,
) (string, error) {
	return mutate(ctx, d.server, "Test.Ask", req, func(ctx context.Context, a *Active, call registry.Call) (string,
		error) {
		d.runs.Add(1)
		select {
		case <-gate:
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
		if fails != nil {
			return "", fails
		}
		_, err := d.log.Commit(ctx, func(registry.View) (registry.Change, error) {
			return registry.Change{Put: call.Answered("done for " + req.GetAlloc())}, nil
		})
		return "done for " + req.GetAlloc(), err
	})
}

var open = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// S1: a replay while the first is under way joins it, a replay after it gets the stored answer, and an id is good for
// one request.
func TestReplayJoins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		gate := make(chan struct{})
		var calls sync.WaitGroup
		for range 3 {
			calls.Go(func() {
				if answer, err := d.ask(t.Context(), asking("op-1", "a"), gate, nil); answer != "done for a" ||
					err != nil {
					t.Errorf("a call got %q, %v", answer, err)
				}
			})
		}
		synctest.Wait()
		if _, err := d.ask(t.Context(), asking("op-1", "b"), open, nil); !errors.Is(err, registry.ErrInvalid) {
			t.Errorf("the id of a call under way was taken for another request: %v", err)
		}
		close(gate)
		calls.Wait()
		if answer, err := d.ask(t.Context(), asking("op-1", "a"), open, nil); answer != "done for a" || err != nil {
			t.Errorf("a late replay got %q, %v", answer, err)
		}
		if _, err := d.ask(t.Context(), asking("op-1", "b"), open, nil); !errors.Is(err, registry.ErrInvalid) {
			t.Errorf("a used id was taken for another request: %v", err)
		}
		if n := d.runs.Load(); n != 1 {
			t.Errorf("the work was done %d times", n)
		}
	})
}

// The stored answer serves a later shim too.
func TestReplayAfterReopen(t *testing.T) {
	d := newDesk(t)
	_, err := d.ask(t.Context(), asking("op-1", "a"), open, nil)
	must(t, err)
	next := newDesk(t)
	next.log = d.log.Reopen()
	next.server.Set(&Active{Node: "here", State: next.log, Context: t.Context()})
	if answer, err := next.ask(t.Context(), asking("op-1", "a"), open, nil); answer != "done for a" || err != nil ||
		next.runs.Load() != 0 {
		t.Errorf("got %q, %v after %d runs", answer, err, next.runs.Load())
	}
}

// Whoever joined a call whose caller went away does it himself.
func TestJoinerRunsWhatTheFirstLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		first, leave := context.WithCancel(t.Context())
		gate := make(chan struct{})
		var calls sync.WaitGroup
		calls.Go(func() {
			if _, err := d.ask(first, asking("op-1", "a"), gate, nil); !errors.Is(err, context.Canceled) {
				t.Errorf("the first got %v", err)
			}
		})
		synctest.Wait()
		calls.Go(func() {
			if answer, err := d.ask(t.Context(), asking("op-1", "a"), gate, nil); answer != "done for a" || err != nil {
				t.Errorf("the second got %q, %v", answer, err)
			}
		})
		synctest.Wait()
		leave()
		synctest.Wait()
		close(gate)
		calls.Wait()
		if n := d.runs.Load(); n != 2 {
			t.Errorf("the work was begun %d times", n)
		}
	})
}

// A deadline of the work's own is an answer: who joined gets it, and does not try again.
func TestJoinerTakesAnAnswerThatIsADeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		gate := make(chan struct{})
		late := registry.Errorf(registry.ErrUncertain, "the plugin: %w", context.DeadlineExceeded)
		var calls sync.WaitGroup
		for range 2 {
			calls.Go(func() {
				if _, err := d.ask(t.Context(), asking("op-1", "a"), gate, late); err != late {
					t.Errorf("got %v", err)
				}
			})
		}
		synctest.Wait()
		close(gate)
		calls.Wait()
		if n := d.runs.Load(); n != 1 {
			t.Errorf("the work was done %d times", n)
		}
	})
}

// A joiner's own deadline is its own.
func TestJoinerLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		gate := make(chan struct{})
		var calls sync.WaitGroup
		calls.Go(func() { _, _ = d.ask(t.Context(), asking("op-1", "a"), gate, nil) })
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := d.ask(ctx, asking("op-1", "a"), gate, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		close(gate)
		calls.Wait()
	})
}

func TestEveryChangeHasAnOperationID(t *testing.T) {
	d := newDesk(t)
	if _, err := d.ask(t.Context(), asking("", "a"), open, nil); !errors.Is(err, registry.ErrInvalid) ||
		d.runs.Load() != 0 {
		t.Errorf("got %v after %d runs", err, d.runs.Load())
	}
}

// A call for another node is not done here.
func TestAnotherNodeIsRefused(t *testing.T) {
	d := newDesk(t)
	req := asking("op-1", "a")
	req.Call.Node = "there"
	if _, err := d.ask(t.Context(), req, open, nil); err == nil || nobody(err) || d.runs.Load() != 0 {
		t.Errorf("got %v after %d runs", err, d.runs.Load())
	}
	req.Call.Node = "here"
	if _, err := d.ask(t.Context(), req, open, nil); err != nil {
		t.Errorf("this node: %v", err)
	}
}

// Quiesce waits for what runs, lets its replays join, and refuses what is new as if nobody had answered; Resume takes
// it again.
func TestQuiesceRefusesNewAndWaitsForRunning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t)
		gate := make(chan struct{})
		var calls sync.WaitGroup
		running := func() {
			if answer, err := d.ask(t.Context(), asking("op-1", "a"), gate, nil); answer != "done for a" || err != nil {
				t.Errorf("a running call got %q, %v", answer, err)
			}
		}
		calls.Go(running)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := d.server.Quiesce(ctx, 0); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("it did not wait: %v", err)
		}
		quiet := false
		calls.Go(func() { must(t, d.server.Quiesce(t.Context(), 0)); quiet = true })
		calls.Go(running)
		synctest.Wait()
		if _, err := d.ask(t.Context(), asking("op-2", "a"), open, nil); !nobody(err) || quiet {
			t.Errorf("a new call got %v, quiet is %v", err, quiet)
		}
		close(gate)
		calls.Wait()
		d.server.Resume()
		if _, err := d.ask(t.Context(), asking("op-2", "a"), open, nil); err != nil {
			t.Errorf("after Resume: %v", err)
		}
	})
}

// A Quiesce with a limit does not wait for an operation whose next CSI call is paused. The operation continues if the
// pause ends, and is the next shim's if this one releases the state.
func TestQuiesceDoesNotWaitForAPausedCall(t *testing.T) {
	for what, c := range map[string]struct {
		then   func(d *desk, p *intent.Pause)
		nobody bool
	}{
		"the shim goes on": {func(_ *desk, p *intent.Pause) { p.End() }, false},
		"the shim lets go": {func(d *desk, _ *intent.Pause) {
			d.release(registry.Errorf(registry.ErrUnavailable, "%w", intent.ErrReleased))
		}, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			d, sent := newDesk(t), 0
			var pause intent.Pause
			active := d.server.active.Load()
			active.Pause = &pause
			d.server.Set(active)
			var calls sync.WaitGroup
			calls.Go(func() {
				_, err := mutate(t.Context(), d.server, "Test.Ask", asking("op-1", "a"),
					func(ctx context.Context, _ *Active, _ registry.Call) (string, error) {
						time.Sleep(2 * time.Millisecond)
						return "", intent.Sender{State: d.log, Now: time.Now, Pause: &pause}.Send(ctx, intent.Call{
							Intent: registry.Intent{Operation: "op-1",
								Volume: registry.VolumeKey{Plugin: "p", External: "v"}, RPC: registry.NodeStageRPC},
							Do: func(context.Context) error { sent++; return nil },
						})
					})
				if c.nobody != nobody(err) || c.nobody != (sent == 0) {
					t.Errorf("%s: it got %v, and has sent %d", what, err, sent)
				}
			})
			synctest.Wait()
			pause.Begin()
			began := time.Now()
			must(t, d.server.Quiesce(t.Context(), 10*time.Millisecond))
			if took := time.Since(began); took != 2*time.Millisecond {
				t.Errorf("%s: it was waited for %v", what, took)
			}
			c.then(d, &pause)
			calls.Wait()
		})
	}
}

// What only tells of this shim's end is nobody's answer, so that the next shim is asked.
func TestEndOfTheShimIsNobodysAnswer(t *testing.T) {
	t.Run("released", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			d := newDesk(t)
			var calls sync.WaitGroup
			calls.Go(func() {
				if _, err := d.ask(t.Context(), asking("op-1", "a"), nil, nil); !nobody(err) {
					t.Errorf("got %v", err)
				}
			})
			synctest.Wait()
			d.release(registry.Errorf(registry.ErrUnavailable, "released"))
			calls.Wait()
		})
	})
	t.Run("its log has failed", func(t *testing.T) {
		d := newDesk(t)
		d.log.Lose(false)
		if _, err := d.ask(t.Context(), asking("op-1", "a"), open, nil); !nobody(err) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("not at all", func(t *testing.T) { // the control: an answer is passed on
		d := newDesk(t)
		refused := registry.Errorf(registry.ErrUnavailable, "the plugin is not there")
		if _, err := d.ask(t.Context(), asking("op-1", "a"), open, refused); err != refused {
			t.Errorf("got %v", err)
		}
	})
}
