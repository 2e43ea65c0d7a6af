package csifake

import (
	"context"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/status"

	"holdfast/internal/csifake/journal"
)

// All codes of gRPC, and an undefined one, arrive unchanged, before the effect and after it.
func TestEveryCodeReachesTheCaller(t *testing.T) {
	fake, c := start(t, Config{Caps: []string{"STAGE_UNSTAGE"}})
	at, ctx := newPaths(t), t.Context()
	for _, number := range []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 77} {
		for _, when := range []Moment{Before, After} {
			name := journal.CodeName(number)
			must(t, fake.Script(Rule{RPC: "NodeStageVolume", When: when, Code: name, Message: "because"}))
			err := c.stage(ctx, "v1", at)
			if s := status.Convert(err); uint32(s.Code()) != number || s.Message() != "because" {
				t.Errorf("%s arrives as %v", name, err)
			}
			if got := staged(t, fake, "v1"); got != (when == After) {
				t.Errorf("%s %s: staged is %v", name, when, got)
			}
			fake.ClearScript()
			must(t, c.unstage(ctx, "v1", at))
		}
	}
}

// If a connection is cut before or after the effect, all its callers get UNAVAILABLE, and the journal says so. The next
// call gets a new connection.
func TestDroppedConnectionIsUnavailable(t *testing.T) {
	for _, when := range []Moment{Before, After} {
		fake, c := start(t, Config{Caps: []string{"STAGE_UNSTAGE"}})
		at, ctx := newPaths(t), t.Context()
		gate := fake.On("NodeStageVolume").Volume("v2").Hold()
		bystander := make(chan error, 1)
		go func() { bystander <- c.stage(ctx, "v2", newPaths(t)) }()
		<-gate.Arrived()
		must(t, fake.Script(Rule{RPC: "NodeStageVolume", Volume: "v1", Times: 1, When: when, Drop: true}))
		wantCode(t, c.stage(ctx, "v1", at), "UNAVAILABLE")
		wantCode(t, <-bystander, "UNAVAILABLE")
		gate.Open()
		if got := staged(t, fake, "v1"); got != (when == After) {
			t.Errorf("%s: staged is %v", when, got)
		}
		retryAborted(t, func() error { return c.stage(ctx, "v1", at) })
		eventually(t, func() bool {
			calls, err := fake.Calls("NodeStageVolume")
			must(t, err)
			last := calls[len(calls)-1]
			return calls[0].Abandoned && calls[1].Abandoned && !last.Abandoned && calls[0].Conn == calls[1].Conn &&
				last.Conn > calls[0].Conn
		})
	}
}

// A call that takes effect and is never answered lasts until its context ends. Its connection stays.
func TestUnansweredCallEndsWithItsCaller(t *testing.T) {
	fake, c := start(t, Config{Caps: []string{"STAGE_UNSTAGE"}})
	fake.On("NodeStageVolume").After().HangForEver()
	ctx, cancel := context.WithCancel(t.Context())
	answer := make(chan error, 1)
	go func() { answer <- c.stage(ctx, "v1", newPaths(t)) }()
	eventually(t, func() bool { return staged(t, fake, "v1") })
	_, err := c.Probe(t.Context(), &csi.ProbeRequest{})
	must(t, err)
	cancel()
	wantCode(t, <-answer, "CANCELLED")
	calls, err := fake.Calls("NodeStageVolume", "Probe")
	must(t, err)
	if len(calls) != 2 || calls[0].Conn != calls[1].Conn {
		t.Errorf("the journal has %+v", calls)
	}
}
