package csifake

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/internal/csifake/journal"
)

// TestEveryCode: all codes of gRPC and one that nobody knows arrive as they are, before the effect and after it.
func TestEveryCode(t *testing.T) {
	inBothForms(t, func(t *testing.T, start func(Config) (*Plugin, *client)) {
		fake, c := start(Config{Caps: []string{"STAGE_UNSTAGE"}})
		at, ctx := makePlaces(t), t.Context()
		for _, number := range []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 77} {
			for _, when := range []Moment{Before, After} {
				name := journal.CodeName(number)
				must(t, fake.Script(Rule{RPC: "NodeStageVolume", When: when, Code: name, Message: "because"}))
				err := c.stage(ctx, "v1", at)
				if s := statusOf(t, err); uint32(s.Code()) != number || s.Message() != "because" {
					t.Errorf("%s arrives as %v", name, err)
				}
				used, err := fake.Backend().Volumes()
				must(t, err)
				if staged := used["v1"].Staged["node-1"] != ""; staged != (when == After) {
					t.Errorf("%s %s: staged is %v", name, when, staged)
				}
				fake.ClearScript()
				must(t, c.unstage(ctx, "v1", at))
			}
		}
	})
}

// TestDrop: a connection that is cut before or after the effect is UNAVAILABLE for its callers, all of them, and is
// told as such in the journal. The next call has a connection of its own.
func TestDrop(t *testing.T) {
	inBothForms(t, func(t *testing.T, start func(Config) (*Plugin, *client)) {
		for _, when := range []Moment{Before, After} {
			fake, c := start(Config{Caps: []string{"STAGE_UNSTAGE"}})
			at, ctx := makePlaces(t), t.Context()
			gate := fake.On("NodeStageVolume").Volume("v2").Hold()
			bystander := make(chan error, 1)
			go func() { bystander <- c.stage(ctx, "v2", makePlaces(t)) }()
			<-gate.Arrived()
			must(t, fake.Script(Rule{RPC: "NodeStageVolume", Volume: "v1", Times: 1, When: when, Drop: true}))
			wantCode(t, c.stage(ctx, "v1", at), "UNAVAILABLE")
			wantCode(t, <-bystander, "UNAVAILABLE")
			gate.Open()
			used, err := fake.Backend().Volumes()
			must(t, err)
			if staged := used["v1"].Staged["node-1"] != ""; staged != (when == After) {
				t.Errorf("%s: staged is %v", when, staged)
			}
			patiently(t, func() error { return c.stage(ctx, "v1", at) })
			eventually(t, func() bool {
				calls, err := fake.Calls("NodeStageVolume")
				must(t, err)
				last := calls[len(calls)-1]
				return calls[0].Abandoned && calls[1].Abandoned && !last.Abandoned && calls[0].Conn == calls[1].Conn &&
					last.Conn > calls[0].Conn
			})
		}
	})
}

// TestNoAnswer: a call that took effect and is never answered lasts as long as its caller's patience, on a connection
// that stays.
func TestNoAnswer(t *testing.T) {
	inBothForms(t, func(t *testing.T, start func(Config) (*Plugin, *client)) {
		fake, c := start(Config{Caps: []string{"STAGE_UNSTAGE"}})
		fake.On("NodeStageVolume").After().HangForEver()
		ctx, cancel := context.WithCancel(t.Context())
		answer := make(chan error, 1)
		go func() { answer <- c.stage(ctx, "v1", makePlaces(t)) }()
		eventually(t, func() bool {
			used, err := fake.Backend().Volumes()
			must(t, err)
			return used["v1"].Staged["node-1"] != ""
		})
		_, err := c.Probe(t.Context(), &csi.ProbeRequest{})
		must(t, err)
		cancel()
		wantCode(t, <-answer, "CANCELLED")
		calls, err := fake.Calls()
		must(t, err)
		if len(calls) != 2 || calls[0].Conn != calls[1].Conn {
			t.Errorf("the journal has %+v", calls)
		}
	})
}

// TestGarbage: who connects meets what the script has, and then, with the next connection, a plugin.
func TestGarbage(t *testing.T) {
	for kind, hears := range map[Garbage]string{HTTP1: "HTTP/1.1 400", TLS: "\x15\x03\x01", Random: "", Close: "",
		Silence: ""} {
		t.Run(string(kind), func(t *testing.T) {
			fake := Start(t, Config{})
			fake.On(Accept).Times(1).Garbage(kind)
			conn, err := net.Dial("unix", fake.Socket())
			must(t, err)
			defer conn.Close()
			wait := 20 * time.Second
			if kind == Silence {
				wait = 100 * time.Millisecond
			}
			must(t, conn.SetReadDeadline(time.Now().Add(wait)))
			b := make([]byte, 64)
			n, err := conn.Read(b)
			timeout, _ := err.(net.Error)
			switch {
			case kind == Close && (n != 0 || err == nil || timeout != nil && timeout.Timeout()):
				t.Errorf("it is not closed: %d bytes, %v", n, err)
			case kind == Silence && (n != 0 || timeout == nil || !timeout.Timeout()):
				t.Errorf("it is not silent: %d bytes, %v", n, err)
			case kind != Close && kind != Silence && (err != nil || !strings.HasPrefix(string(b[:n]), hears)):
				t.Errorf("it says %q, %v", b[:n], err)
			}
			if kind == Close {
				eventually(t, func() bool { _, err := conn.Write(b); return err != nil })
			}
			_, err = dial(t, fake.Socket()).Probe(t.Context(), &csi.ProbeRequest{})
			must(t, err)
		})
	}
}

// TestGarbageForCallers: calls fail while there is garbage, in both forms, and the plugin ends all the same while
// somebody listens to it.
func TestGarbageForCallers(t *testing.T) {
	inBothForms(t, func(t *testing.T, start func(Config) (*Plugin, *client)) {
		for _, kind := range []Garbage{HTTP1, TLS, Random, Close} {
			_, c := start(Config{Script: []Rule{{RPC: Accept, Garbage: kind}}})
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			_, err := c.Probe(ctx, &csi.ProbeRequest{})
			wantCode(t, err, "UNAVAILABLE")
			cancel()
		}
		_, c := start(Config{Script: []Rule{{RPC: Accept, Garbage: Silence}}})
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		_, err := c.Probe(ctx, &csi.ProbeRequest{})
		wantCode(t, err, "DEADLINE_EXCEEDED")
	})
}
