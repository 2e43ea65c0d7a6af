package controller

import (
	"context"
	"testing"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// releasing is a State that calls release once an intent is stored.
type releasing struct {
	registry.State
	release func()
}

func (s releasing) Commit(ctx context.Context, decisions ...registry.Decision) (registry.Seq, error) {
	at, err := s.State.Commit(context.WithoutCancel(ctx), decisions...)
	_ = s.View(context.WithoutCancel(ctx), func(v registry.View) error {
		if len(v.Intents()) > 0 {
			s.release()
		}
		return nil
	})
	return at, err
}

// A release that keeps a detach from being sent leaves both its intent and the operator's request to the next shim.
func TestDetachThatIsNotSentBecauseOfAReleaseStaysRequested(t *testing.T) {
	d := open(t, of(registry.AttachDetach), ready(), attachedTo("n1"))
	d.faults = append(d.faults, failed("CANCELLED"))
	ctx, cancel := context.WithCancelCause(t.Context())
	d.Controller.State = releasing{d.log, func() { cancel(intent.ErrReleased) }}
	_, err := d.DetachVolume(ctx, call, name, "n1", registry.Force{By: "ada"})
	d.view(func(v registry.View) {
		if by := v.Attachments(key)[0].Detaching.By; err == nil || len(v.Intents()) != 1 || by != "ada" {
			t.Errorf("%v; %d intents are open, the detach is requested by %q", err, len(v.Intents()), by)
		}
	})
}
