package intent

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// pausable sends a call during a pause. It returns how often and when last the call was sent, its waits and its error.
func pausable(
	t *testing.T, r *Pause, ctx context.Context, answers ...error,
) (sent int, last time.Duration, waits []bool, err error) {
	t.Helper()
	began := time.Now()
	r.Notify(func(_ registry.OperationID, is bool) { waits = append(waits, is) })
	err = Sender{State: registrytest.NewLog(time.Now), Now: time.Now, Pause: r}.Send(ctx,
		stage(func(context.Context) error {
			sent, last = sent+1, time.Since(began)
			if sent <= len(answers) {
				return answers[sent-1]
			}
			return nil
		}))
	return sent, last, waits, err
}

// During a pause no call or retry begins. It waits until the pause ends.
func TestNoCallBeginsDuringAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Pause
		r.Begin()
		r.Begin()
		time.AfterFunc(time.Minute, r.End)
		sent, last, waits, err := pausable(t, &r, t.Context())
		if err != nil || sent != 1 || last != time.Minute || len(waits) != 2 || !waits[0] || waits[1] {
			t.Errorf("it ended with %v, was sent %d times, last after %v, and has waited %v", err, sent, last, waits)
		}
		time.AfterFunc(time.Millisecond, r.Begin)
		time.AfterFunc(time.Minute, r.End)
		sent, last, _, err = pausable(t, &r, t.Context(), answer("ABORTED", registry.OutcomeUncertain))
		if err != nil || sent != 2 || last != time.Minute {
			t.Errorf("a second try: %v, sent %d times, last after %v", err, sent, last)
		}
		r.End()
		if sent, last, _, err = pausable(t, &r, t.Context()); err != nil || sent != 1 || last != 0 {
			t.Errorf("without a pause: %v, sent %d times, last after %v", err, sent, last)
		}
	})
}

// A call whose context ends during a pause is not sent, and nothing is stored.
func TestAPausedCallEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Pause
		r.Begin()
		released := registry.Errorf(registry.ErrUnavailable, "%w", ErrReleased)
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(released) })
		log := registrytest.NewLog(time.Now)
		err := Sender{State: log, Now: time.Now, Pause: &r}.Send(ctx, stage(func(context.Context) error {
			t.Error("it is sent")
			return nil
		}))
		if _, found, mark, _ := look(t, log); !errors.Is(err, ErrReleased) || found || mark != registry.MarkNone {
			t.Errorf("%v; intent open %v, mark %q", err, found, mark)
		}
	})
}
