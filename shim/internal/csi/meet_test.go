package csi

import (
	"errors"
	"testing"

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
