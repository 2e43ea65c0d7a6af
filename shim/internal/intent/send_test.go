package intent

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

var (
	vol  = registry.VolumeKey{Plugin: "ebs", External: "vol-1"}
	name = registry.VolumeName{Namespace: "default", ID: "data"}
)

// stage returns the call of the tests. It marks the stage as sent, and then as done.
func stage(do func(context.Context) error) Call {
	put := func(m registry.Mark) registry.Change {
		return registry.Change{Put: []registry.Record{registry.Staging{Volume: vol, Name: name, State: m}}}
	}
	return Call{
		Intent: registry.Intent{Volume: vol, Name: name, RPC: registry.NodeStageRPC, Hash: "h"},
		Before: func(registry.View) (registry.Change, error) { return put(registry.MarkSent), nil },
		Do:     do,
		Done:   func(registry.View) registry.Change { return put(registry.MarkDone) },
	}
}

// send sends a call as an active shim does.
func send(ctx context.Context, state registry.State, c Call) error {
	return Sender{State: state, Now: time.Now, Drain: DrainTime}.Send(ctx, c)
}

func answer(code string, outcome registry.Outcome) error {
	return &registry.CallError{RPC: registry.NodeStageRPC, Code: code, Outcome: outcome, Kind: registry.ErrUnavailable,
		Detail: "because"}
}

// look returns the open intent, the mark and the events in the log.
func look(
	t *testing.T, log registry.State,
) (open registry.Intent, found bool, mark registry.Mark, events []registry.Event) {
	t.Helper()
	err := log.View(context.Background(), func(v registry.View) error {
		open, found = registry.OpenIntent(v, vol)
		p, _ := v.Staging(vol)
		mark = p.State
		events, _ = v.Events(0, 1000)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return open, found, mark, events
}

func TestIntentIsDurableBeforeTheCall(t *testing.T) {
	log := registrytest.NewLog(time.Now)
	err := send(t.Context(), log, stage(func(context.Context) error {
		open, found, mark, _ := look(t, log)
		if !found || open.Outcome != registry.OutcomePending || open.Attempt != 1 || open.Since.IsZero() ||
			mark != registry.MarkSent {
			t.Errorf("while the call runs: intent %+v (%v), mark %q", open, found, mark)
		}
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	if _, found, mark, _ := look(t, log); found || mark != registry.MarkDone {
		t.Errorf("after the call: intent open %v, mark %q", found, mark)
	}
}

// The outcome of a call and the intent of the next one are one commit, for which the next call waits. If the next call
// is not sent, because its caller has gone or it is refused, the outcome is stored without it.
func TestOutcomeAndNextIntentAreOneCommit(t *testing.T) {
	no := errors.New("no")
	for _, c := range []struct {
		name    string
		first   func(cancel func()) // runs during the first call
		refusal error               // of the second call
		commits int
		want    error
	}{
		{"one after the other", func(func()) {}, nil, 3, nil},
		{"caller gone", func(cancel func()) { cancel() }, nil, 2, context.Canceled},
		{"refused", func(func()) {}, no, 2, no},
	} {
		runInBubble(t, c.name, func(t *testing.T) {
			log := registrytest.NewLog(time.Now)
			ctx, cancel := context.WithCancel(t.Context())
			sent := false
			first := stage(func(context.Context) error { c.first(cancel); return nil })
			second := Call{
				Intent: registry.Intent{Volume: vol, Name: name, RPC: registry.NodePublishRPC, Hash: "h"},
				Before: func(view registry.View) (registry.Change, error) {
					if p, _ := view.Staging(vol); p.State != registry.MarkDone {
						t.Errorf("the second call is opened after mark %q", p.State)
					}
					return registry.Change{}, c.refusal
				},
				Do: func(context.Context) error {
					sent = true
					open, _, mark, _ := look(t, log)
					if open.RPC != registry.NodePublishRPC || mark != registry.MarkDone {
						t.Errorf("the second call is sent with intent %+v, mark %q", open, mark)
					}
					return nil
				},
			}
			err := Sender{State: log, Now: time.Now}.Send(ctx, first, second)
			_, open, mark, _ := look(t, log)
			if !errors.Is(err, c.want) || sent != (c.want == nil) || open || mark != registry.MarkDone {
				t.Errorf("%v; second call sent %v, intent open %v, mark %q", err, sent, open, mark)
			}
			if log.Commits() != c.commits {
				t.Errorf("%d commits, want %d", log.Commits(), c.commits)
			}
		})
	}
}

func TestFailedCallIsClosedAndItsMarkStays(t *testing.T) {
	log := registrytest.NewLog(time.Now)
	sent := 0
	err := send(t.Context(), log, stage(func(context.Context) error {
		sent++
		return answer("INVALID_ARGUMENT", registry.OutcomeFailed)
	}))
	if err == nil || errors.Is(err, registry.ErrUncertain) || sent != 1 {
		t.Errorf("sent %d times, %v", sent, err)
	}
	_, found, mark, events := look(t, log)
	if found || mark != registry.MarkSent {
		t.Errorf("intent open %v, mark %q; want none open, and the mark sent", found, mark)
	}
	if len(events) != 1 || events[0].Kind != registry.EventStepFailed || events[0].Cause != "NodeStageVolume" ||
		events[0].Detail != "INVALID_ARGUMENT: because" || events[0].Role != registry.RoleNode {
		t.Errorf("events %v", events)
	}
}

func TestOutcomeIsStoredAfterItsCallerHasGone(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	log, gone := registrytest.NewLog(time.Now), errors.New("gone")
	err := send(ctx, log, stage(func(ctx context.Context) error {
		cancel(gone)
		<-ctx.Done()
		return ctx.Err()
	}))
	if !errors.Is(err, registry.ErrUncertain) || !errors.Is(err, gone) {
		t.Errorf("%v", err)
	}
	if open, found, _, _ := look(t, log); !found || open.Outcome != registry.OutcomeUncertain ||
		open.Code != "CANCELLED" {
		t.Errorf("intent %+v (%v)", open, found)
	}
}

// A call whose caller has given up before is not sent, and Send returns an error.
func TestEndedContextSendsNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	log := registrytest.NewLog(time.Now)
	err := send(ctx, log, stage(func(context.Context) error { t.Error("sent"); return nil }))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if _, found, mark, _ := look(t, log); found || mark != "" {
		t.Errorf("intent open %v, mark %q", found, mark)
	}
}

func TestBeforeRefuses(t *testing.T) {
	log := registrytest.NewLog(time.Now)
	c := stage(func(context.Context) error { t.Error("sent"); return nil })
	c.Before = func(registry.View) (registry.Change, error) { return registry.Change{}, registry.Invalid("no") }
	if err := send(t.Context(), log, c); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("%v", err)
	}
	if _, found, _, _ := look(t, log); found {
		t.Error("an intent is open")
	}
}

// Only the same call or its undo may follow a call that has no certain answer.
func TestOnlyTheSameCallOrItsUndo(t *testing.T) {
	publish := func(a registry.AllocID, hash string) registry.Intent {
		return registry.Intent{Volume: vol, Name: name, RPC: registry.NodePublishRPC, Alloc: a, Request: "r",
			Hash: hash}
	}
	with := func(i registry.Intent, rpc registry.RPC, hash string) registry.Intent {
		i.RPC, i.Hash = rpc, hash
		return i
	}
	attach := registry.Intent{Volume: vol, Name: name, RPC: registry.ControllerPublishRPC, Hash: "a", Node: "i-1"}
	elsewhere := attach
	elsewhere.Node = "i-2"
	for _, c := range []struct {
		name       string
		open, next registry.Intent
		legal      bool
	}{
		{"the same", publish("a1", "h"), publish("a1", "h"), true},
		{"another request", publish("a1", "h"), publish("a1", "i"), false},
		{"its undo", publish("a1", "h"), with(publish("a1", ""), registry.NodeUnpublishRPC, "u"), true},
		{"the undo of another", publish("a1", "h"), with(publish("a2", ""), registry.NodeUnpublishRPC, "u"), false},
		{"unstage under a publish", publish("a1", "h"), with(attach, registry.NodeUnstageRPC, "x"), false},
		{"detach of an attach", attach, with(attach, registry.ControllerUnpublishRPC, "d"), true},
		{"detach from another node", attach, with(elsewhere, registry.ControllerUnpublishRPC, "d"), false},
		{"unstage of a stage", with(attach, registry.NodeStageRPC, "s"), with(attach, registry.NodeUnstageRPC, "u"),
			true},
		{"detach under an unstage", with(attach, registry.NodeUnstageRPC, "s"),
			with(attach, registry.ControllerUnpublishRPC, "d"), false},
		{"stage after an unstage", with(attach, registry.NodeUnstageRPC, "s"), with(attach, registry.NodeStageRPC, "u"),
			false},
		{"delete under a detach", with(attach, registry.ControllerUnpublishRPC, "s"),
			with(attach, registry.DeleteVolumeRPC, "u"), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			log := registrytest.NewLog(time.Now)
			lost := func(context.Context) error { return answer("PERMISSION_DENIED", registry.OutcomeUncertain) }
			_ = send(t.Context(), log, Call{Intent: c.open, Do: lost})
			sent := false
			err := send(t.Context(), log, Call{Intent: c.next, Do: func(context.Context) error {
				sent = true
				return nil
			}})
			if sent != c.legal || (err == nil) != c.legal {
				t.Fatalf("sent %v, %v", sent, err)
			}
			if !c.legal && (!errors.Is(err, registry.ErrConflict) ||
				!strings.Contains(err.Error(), string(c.open.RPC)+" of data")) {
				t.Errorf("the error does not name the open call: %v", err)
			}
		})
	}
}

func TestCallIsTriedAgainUntilItIsDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, sent := registrytest.NewLog(time.Now), 0
		err := send(t.Context(), log, stage(func(context.Context) error {
			if sent++; sent == 5 {
				open, _, _, _ := look(t, log)
				if open.Attempt != 4 || open.Outcome != registry.OutcomeUncertain || open.Next.IsZero() {
					t.Errorf("at the fifth try: %+v", open)
				}
				return nil
			}
			return answer("ABORTED", registry.OutcomeUncertain)
		}))
		if err != nil || sent != 5 {
			t.Errorf("sent %d times, %v", sent, err)
		}
		_, found, mark, events := look(t, log)
		if found || mark != registry.MarkDone {
			t.Errorf("intent open %v, mark %q", found, mark)
		}
		if len(events) != 1 {
			t.Errorf("four equal failures have %d events: %v", len(events), events)
		}
	})
}

func TestHungCallEndsAtItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, sent, start := registrytest.NewLog(time.Now), 0, time.Now()
		err := send(t.Context(), log, stage(func(ctx context.Context) error {
			if sent++; sent == 2 {
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		}))
		if took := time.Since(start); err != nil || sent != 2 || took < Policies[registry.NodeStageRPC].Deadline {
			t.Errorf("sent %d times in %s, %v", sent, took, err)
		}
	})
}

// sentInAnHour returns how often a call is sent within an hour if every answer has the code, and whether its intent
// is open after that.
func sentInAnHour(t *testing.T, rpc registry.RPC, code string, outcome registry.Outcome) (sent int, open bool) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		log := registrytest.NewLog(time.Now)
		err := send(ctx, log, Call{
			Intent: registry.Intent{Volume: vol, Name: name, RPC: rpc, Hash: "h"},
			Do:     func(context.Context) error { sent++; return answer(code, outcome) },
		})
		_, open, _, _ = look(t, log)
		if errors.Is(err, registry.ErrUncertain) != open {
			t.Errorf("%s, %s: intent open %v, %v", rpc, code, open, err)
		}
	})
	return sent, open
}

// If the answer to the last commit of a call is lost, the commit may be written or not. The same call is legal either
// way.
func TestLostCommitLeavesACallThatMayBeRepeated(t *testing.T) {
	for _, written := range []bool{true, false} {
		log := registrytest.NewLog(time.Now)
		err := send(t.Context(), log, stage(func(context.Context) error { log.Lose(written); return nil }))
		if !errors.Is(err, registry.ErrUncertain) {
			t.Errorf("written %v: %v", written, err)
		}
		log = log.Reopen()
		if _, found, _, _ := look(t, log); found == written {
			t.Errorf("written %v, intent open %v", written, found)
		}
		if err := send(t.Context(), log, stage(func(context.Context) error { return nil })); err != nil {
			t.Errorf("written %v: %v", written, err)
		}
	}
}

// A try that did not reach the plugin does not settle an earlier try, neither within a call nor after a restart.
func TestUnsentTryDoesNotSettleAnEarlierOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, sent := registrytest.NewLog(time.Now), 0
		unsent := answer("UNAVAILABLE", registry.OutcomeFailed)
		drive := func(first error) error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			sent = 0
			return send(ctx, log, stage(func(context.Context) error {
				if sent++; sent == 1 {
					return first
				}
				return unsent
			}))
		}
		if err := drive(unsent); err == nil || errors.Is(err, registry.ErrUncertain) || sent < 2 {
			t.Errorf("nothing ever left: %v", err)
		}
		if _, found, _, _ := look(t, log); found {
			t.Error("nothing ever left, and an intent is open")
		}
		for _, first := range []error{answer("DEADLINE_EXCEEDED", registry.OutcomeUncertain), unsent} {
			if err := drive(first); !errors.Is(err, registry.ErrUncertain) {
				t.Errorf("%v", err)
			}
			if open, found, _, _ := look(t, log); !found || open.Outcome != registry.OutcomeUncertain {
				t.Errorf("%+v", open)
			}
			log = log.Reopen()
		}
		if err := drive(answer("INVALID_ARGUMENT", registry.OutcomeFailed)); errors.Is(err, registry.ErrUncertain) {
			t.Errorf("the plugin's own word: %v", err)
		}
	})
}

// If another operation has closed the intent of a call, the call is not sent again, and its outcome is not stored. By
// then the volume may be a different one.
func TestForgottenCallIsNotSentAgain(t *testing.T) {
	for what, ends := range map[string]error{
		"tried again": answer("UNAVAILABLE", registry.OutcomeUncertain),
		"failed":      answer("PERMISSION_DENIED", registry.OutcomeFailed),
		"uncertain":   answer("PERMISSION_DENIED", registry.OutcomeUncertain), "done": nil,
	} {
		runInBubble(t, what, func(t *testing.T) {
			log, sent := registrytest.NewLog(time.Now), 0
			err := send(t.Context(), log, stage(func(ctx context.Context) error {
				sent++
				_, err := log.Commit(ctx, func(registry.View) (registry.Change, error) {
					return registry.Change{Delete: []registry.Key{vol.NodeIntentRecord(), vol.StagingRecord()}}, nil
				})
				if err != nil {
					t.Error(err)
				}
				return ends
			}))
			if !errors.Is(err, registry.ErrConflict) || sent != 1 {
				t.Errorf("sent %d times, %v", sent, err)
			}
			if open, found, mark, events := look(t, log); found || mark != "" || len(events) > 0 {
				t.Errorf("stored all the same: %+v, mark %q, events %v", open, mark, events)
			}
		})
	}
}

// conflicting is a State in which the first commit conflicts with a change: it is decided once before, and once after.
type conflicting struct {
	registry.State
	change func()
}

func (c *conflicting) Commit(ctx context.Context, decisions ...registry.Decision) (registry.Seq, error) {
	if change := c.change; change != nil {
		c.change = nil
		_ = c.View(ctx, func(v registry.View) error { _, err := decisions[0](v); return err })
		change()
	}
	return c.State.Commit(ctx, decisions...)
}

// If the same call is open when a call is decided on, but not any more when that is stored, it is no earlier try.
func TestCallThatWasClosedMeanwhileIsNoEarlierTry(t *testing.T) {
	log := registrytest.NewLog(time.Now)
	c := stage(func(context.Context) error {
		if open, _, _, _ := look(t, log); open.Code != "" || open.Attempt != 1 {
			t.Errorf("stored: %+v", open)
		}
		return answer("INVALID_ARGUMENT", registry.OutcomeFailed)
	})
	open := c.Intent
	open.Outcome, open.Code, open.Attempt = registry.OutcomeUncertain, "ABORTED", 3
	registrytest.Put(t, log, open)
	c.Failed = func(_ registry.View, _ *registry.CallError, clean bool) (none registry.Change) {
		if !clean {
			t.Error("the failure counts as one of an earlier try")
		}
		return none
	}
	_ = send(t.Context(), &conflicting{log, func() {
		if _, err := log.Commit(t.Context(), func(registry.View) (registry.Change, error) {
			return registry.Change{Delete: []registry.Key{open.Key()}}, nil
		}); err != nil {
			t.Error(err)
		}
	}}, c)
}

// RetryUntil ends the retries of a call. It does not cut off a try that is under way.
func TestRetryUntilCutsNoCallOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, start, sent := registrytest.NewLog(time.Now), time.Now(), 0
		call := stage(func(ctx context.Context) error {
			sent++
			select {
			case <-time.After(4 * time.Minute):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		call.RetryUntil = time.Now().Add(30 * time.Second)
		err := send(t.Context(), log, call)
		if took := time.Since(start); err != nil || took != 4*time.Minute || sent != 1 {
			t.Errorf("sent %d times in %s: %v", sent, took, err)
		}
		start = time.Now()
		call = stage(func(context.Context) error { return answer("UNAVAILABLE", registry.OutcomeUncertain) })
		call.RetryUntil = time.Now().Add(30 * time.Second)
		err = send(t.Context(), log, call)
		if took := time.Since(start); !errors.Is(err, registry.ErrUncertain) || took > 30*time.Second ||
			took < 10*time.Second {
			t.Errorf("tried for %s: %v", took, err)
		}
		waiting, cancel := Caller{RetryUntil: time.Now().Add(time.Second)}.WaitContext(t.Context())
		defer cancel()
		if end, has := waiting.Deadline(); !has || time.Until(end) != time.Second {
			t.Errorf("a wait ends at %s", end)
		}
	})
}

// Each answer has its own number of tries.
func TestBudgetsAreByAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sent := 0
		err := send(t.Context(), registrytest.NewLog(time.Now), stage(func(context.Context) error {
			if sent++; sent <= 5 {
				return answer("UNAVAILABLE", registry.OutcomeUncertain)
			}
			return answer("INTERNAL", registry.OutcomeUncertain)
		}))
		if !errors.Is(err, registry.ErrUncertain) || sent != 5+few {
			t.Errorf("sent %d times: %v", sent, err)
		}
	})
}

// A cancelled call may still run at the plugin. Its repetition or undo is retried soon, and then less and less often. A
// call that waits for an unrelated one uses the normal back-off.
func TestACallThatStillRunsIsAskedForSoon(t *testing.T) {
	for what, c := range map[string]struct {
		again     bool
		said      string // the answer to the earlier call; "CANCELLED": it was cancelled
		why       error  // why the context of the earlier call ended
		runs      time.Duration
		asked     int // how often the call may be sent at most
		least, at time.Duration
	}{
		"a short one": {true, "CANCELLED", ErrReleased, 50 * time.Millisecond, 7, 50 * time.Millisecond,
			150 * time.Millisecond},
		"a long one": {true, "CANCELLED", ErrReleased, time.Minute, 40, time.Minute, 90 * time.Second},
		"another call": {false, "", nil, 50 * time.Millisecond, 2, 100 * time.Millisecond,
			200 * time.Millisecond},
		"one that was answered": {true, "INTERNAL", errors.New("gone"), 50 * time.Millisecond, 2,
			200 * time.Millisecond, 400 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			log, asked := registrytest.NewLog(time.Now), 0
			if c.again { // after a release by the shim, nothing is stored
				ctx, cancel := context.WithCancelCause(t.Context())
				_ = send(ctx, log, stage(func(context.Context) error {
					cancel(c.why)
					return answer(c.said, registry.OutcomeUncertain)
				}))
			}
			began := time.Now()
			err := send(t.Context(), log.Reopen(), stage(func(context.Context) error {
				if asked++; time.Since(began) < c.runs {
					return answer("ABORTED", registry.OutcomeUncertain)
				}
				return nil
			}))
			if took := time.Since(began); err != nil || asked > c.asked || took < c.least || took > c.at {
				t.Errorf("%s: asked %d times, over after %v: %v", what, asked, took, err)
			}
		})
	}
}

// index returns the index of the last change.
func index(t *testing.T, log registry.State) (at registry.Seq) {
	t.Helper()
	if err := log.View(context.Background(), func(v registry.View) error { at = v.Index(); return nil }); err != nil {
		t.Fatal(err)
	}
	return at
}

// The intent of a call that a swap has cancelled is stored already, so the call is repeated without a commit. A quick
// answer is not stored either. The intent of a different call is stored first. A refused call is not sent.
func TestAnOpenCallIsNotStoredAgain(t *testing.T) {
	refused := errors.New("it has no claim any more")
	for what, c := range map[string]struct {
		again  func(*Call)
		stored bool
		want   error
	}{
		"the same call":         {func(*Call) {}, false, nil},
		"for another operation": {func(c *Call) { c.Intent.Operation = "op-2" }, true, nil},
		"that does not fit": {func(c *Call) {
			c.Before = func(registry.View) (registry.Change, error) { return registry.Change{}, refused }
		}, false, refused},
		"of which less is stored": {func(c *Call) { c.Before = markedAt("/elsewhere") }, true, nil},
	} {
		synctest.Test(t, func(t *testing.T) {
			log := registrytest.NewLog(time.Now)
			ctx, cancel := context.WithCancelCause(t.Context())
			first := stage(func(context.Context) error {
				cancel(ErrReleased)
				return answer("CANCELLED", registry.OutcomeUncertain)
			})
			first.Before = markedAt("")
			_ = send(ctx, log, first)
			log = log.Reopen()
			before, sent := index(t, log), 0
			again := stage(func(context.Context) error {
				if stored := index(t, log) > before; stored != c.stored {
					t.Errorf("%s: at try %d it is stored once more: %v", what, sent+1, stored)
				}
				if sent++; sent < 3 {
					return answer("ABORTED", registry.OutcomeUncertain)
				}
				return nil
			})
			again.Before = markedAt("")
			c.again(&again)
			if err := send(t.Context(), log, again); !errors.Is(err, c.want) || sent > 0 != (c.want == nil) {
				t.Errorf("%s: sent %d times, %v", what, sent, err)
			}
			if open, found, mark, events := look(t, log); c.want == nil &&
				(found || mark != registry.MarkDone || len(events) > 0) {
				t.Errorf("%s: after it %+v (%v), mark %q, events %v", what, open, found, mark, events)
			}
		})
	}
}

// markedAt returns a Before that marks the stage as sent, and keeps the other fields of the staging.
func markedAt(path string) func(registry.View) (registry.Change, error) {
	return func(v registry.View) (registry.Change, error) {
		p, _ := v.Staging(vol)
		p.Volume, p.Name, p.State, p.Path = vol, name, registry.MarkSent, registry.Tree{Host: path}
		return registry.Change{Put: []registry.Record{p}}, nil
	}
}

// If a call probably still runs, its undo would overlap with it.
func TestUndoOverlapsWithARunningCall(t *testing.T) {
	for what, c := range map[string]struct {
		open registry.Intent
		want bool
	}{
		"not answered": {registry.Intent{RPC: registry.NodeStageRPC,
			Outcome: registry.OutcomePending}, true},
		"still running, says its plugin": {registry.Intent{RPC: registry.NodeStageRPC,
			Outcome: registry.OutcomeUncertain, Code: "ABORTED"}, true},
		"called off": {registry.Intent{RPC: registry.NodeStageRPC,
			Outcome: registry.OutcomeUncertain, Code: "CANCELLED"}, false},
		"answered": {registry.Intent{RPC: registry.NodeStageRPC,
			Outcome: registry.OutcomeUncertain, Code: "INTERNAL"}, false},
		"an undo": {registry.Intent{RPC: registry.NodeUnstageRPC,
			Outcome: registry.OutcomePending}, false},
	} {
		if UndoOverlaps(c.open) != c.want {
			t.Errorf("%s: overlaps is %v", what, !c.want)
		}
	}
}

// runInBubble runs a subtest in a synctest bubble.
func runInBubble(t *testing.T, name string, f func(*testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}
