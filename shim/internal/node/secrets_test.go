package node_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// safe tells one secret after another, then fails.
type safe []registry.SecretValue

func (s *safe) Resolve(context.Context, map[string]registry.Secret) (map[string]registry.SecretValue, error) {
	if len(*s) == 0 {
		return nil, registry.Errorf(registry.ErrUnavailable, "the host answers no questions")
	}
	value := (*s)[0]
	*s = (*s)[1:]
	return map[string]registry.SecretValue{"token": value}, nil
}

// A secret that the plugin refuses may be replaced while the call is tried again; one that cannot be had again stays
// what it was.
func TestRotatedSecretIsUsedByTheNextNodeCall(t *testing.T) {
	for _, rpc := range []registry.RPC{stage, publish} {
		for what, c := range map[string]struct {
			values safe
			wanted string
			sent   []string
			good   bool
		}{
			"rotated": {safe{"canary-old", "canary-new"}, "canary-new", []string{"canary-old", "canary-new"}, true},
			"rotated late": {
				safe{"canary-old", "canary-old", "canary-new"}, "canary-new",
				[]string{"canary-old", "canary-old", "canary-new"}, true,
			},
			"nobody to be asked": {safe{"canary-old"}, "canary-new", []string{"canary-old", "canary-old", "canary-old"},
				false},
		} {
			t.Run(string(rpc)+" "+what, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { rotated(t, rpc, c.values, c.wanted, c.sent, c.good) })
			})
		}
	}
}

func rotated(t *testing.T, rpc registry.RPC, values safe, wanted string, sent []string, good bool) {
	w := open(t)
	w.stages = rpc == stage
	var got []string
	w.fault = func(called registry.RPC) fault {
		secrets := w.last.publish.Secrets
		if called == stage {
			secrets = w.last.stage.Secrets
		}
		if called != rpc {
			return fault{}
		}
		got = append(got, secrets["token"].Reveal())
		if secrets["token"].Reveal() == wanted {
			return fault{}
		}
		return fault{code: "UNAUTHENTICATED", outcome: registry.OutcomeFailed}
	}
	w.stager = w.newStager(w.plugin, w.machine, &values)
	v, key := volumeOf("one"), keyOf("one", "a1")
	_, err := w.ledger.Claim(t.Context(), registry.Claim{Volume: key.Volume, Alloc: "a1", Request: "data", Node: "n1",
		Usage: shared()})
	if err == nil {
		err = w.mediator.Attach(t.Context(), intent.Caller{}, v, shared(), w.here(v.VolumeKey(), "i-1"))
	}
	if err == nil && rpc == stage {
		err = w.stager.Stage(t.Context(), intent.Caller{}, v, shared())
	}
	if err == nil && rpc == publish {
		_, err = w.stager.Publish(t.Context(), intent.Caller{}, v, key, shared())
	}
	if call, is := errors.AsType[*registry.CallError](err); (err == nil) != good || !good &&
		(!is || call.Code != "UNAUTHENTICATED") {
		t.Errorf("%v", err)
	}
	if !slices.Equal(got, sent) {
		t.Errorf("sent with %q, want %q", got, sent)
	}
}

// A host that does not answer holds a further try up for a moment only.
func TestSecretsAreWaitedForBriefly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := open(t)
		w.attaches, w.stages = false, false
		first := &firstOnly{}
		w.stager = w.newStager(w.plugin, w.machine, first)
		w.failNext(publish, fault{code: "UNAVAILABLE", outcome: registry.OutcomeUncertain})
		begin := time.Now()
		w.mustUp("a1", shared())
		if took := time.Since(begin); first.asked != 2 || took > 10*time.Second {
			t.Errorf("asked %d times, took %v", first.asked, took)
		}
	})
}

// firstOnly answers once.
type firstOnly struct{ asked int }

func (f *firstOnly) Resolve(
	ctx context.Context, refs map[string]registry.Secret,
) (map[string]registry.SecretValue, error) {
	if f.asked++; f.asked > 1 {
		return mute{}.Resolve(ctx, refs)
	}
	return vault{}.Resolve(ctx, refs)
}
