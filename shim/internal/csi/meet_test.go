package csi

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

// Another process at the socket says what it is before it is asked for anything, and one that is not what is registered is not asked: nothing
// has left.
func TestAnotherProcessSaysWhatItIsFirst(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	unpublish := mutating[7]
	if err := unpublish.do(patient(t), f); err != nil {
		t.Fatal(err)
	}
	fake.Kill()
	fake = csifake.Start(t, fake.Config())
	answers(t, open(t, f))
	if err := unpublish.do(patient(t), f); err != nil {
		t.Errorf("the same plugin again: %v", err)
	}
	all, err := fake.Calls()
	if err != nil {
		t.Fatal(err)
	}
	last, asked := "", false
	for _, c := range all { // of all processes: what precedes the last call is what matters
		if c.RPC == "NodeUnpublishVolume" {
			asked = last == "NodeGetInfo" || last == "NodeGetCapabilities"
		}
		last = c.RPC
	}
	if !asked {
		t.Error("it was not asked what it is")
	}
	before := calls(t, fake, "NodeUnpublishVolume")
	fake.Kill()
	cfg := fake.Config()
	cfg.Caps = []string{"GET_VOLUME_STATS"}
	fake = csifake.Start(t, cfg)
	answers(t, open(t, f))
	err = unpublish.do(patient(t), f)
	call, is := errors.AsType[*registry.CallError](err)
	if !is || call.Code != "UNAVAILABLE" || call.Outcome != registry.OutcomeFailed || calls(t, fake, "NodeUnpublishVolume") != before {
		t.Errorf("another plugin: %v; %d calls, were %d", err, calls(t, fake), before)
	}
}

// Who has no processor for longer than a dial may take greets all the same, while there is time; who is not answered at all does not take it.
func TestGreetOfTheSlow(t *testing.T) {
	fake := csifake.Start(t, csifake.Config{Blind: true, Caps: csifake.AllCaps, Socket: socketDir(t) + "/csi.sock"})
	for what, c := range map[string]struct {
		socket string
		slow   time.Duration
		good   bool
	}{
		"slow":   {fake.Socket(), dialLimit + dialLimit/2, true},
		"absent": {fake.Socket() + ".not", 0, false},
	} {
		t.Run(what, func(t *testing.T) {
			since := time.Now()
			f := Dialling(nil, func(ctx context.Context, path string) (net.Conn, error) {
				if left := c.slow - time.Since(since); left > 0 {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				return dial(ctx, path)
			})
			t.Cleanup(f.CloseAll)
			ctx := patient(t)
			err := f.Greet(ctx, taskKey, []registry.Instance{{InstanceKey: nodeKey, Endpoint: registry.Endpoint{Host: c.socket}}})
			if (err == nil) != c.good || ctx.Err() != nil {
				t.Errorf("greeted: %v; %v", err, ctx.Err())
			}
		})
	}
}
