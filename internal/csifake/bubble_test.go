package csifake

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	"holdfast/internal/csifake/journal"
)

// bubble runs a test within a synctest bubble, with a plugin that makes no system call.
func bubble(t *testing.T, cfg Config, f func(t *testing.T, fake *Plugin, c *client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		listener := bufconn.Listen(1 << 16)
		cfg.Listener, cfg.Blind = listener, true
		fake := Start(t, cfg)
		f(t, fake, dial(t, "passthrough:///bubble", grpc.WithContextDialer(
			func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) })))
	})
}

// nowhere has paths that are never accessed.
var nowhere = places{staging: "/nowhere/staging", target: "/nowhere/alloc/target"}

// In a bubble, a script uses the bubble's time. A delay of an hour takes no real time. A deadline before that ends the
// call, and the effect still comes after the hour.
func TestDelaysFollowTheClockOfTheBubble(t *testing.T) {
	bubble(t, Config{Caps: []string{"STAGE_UNSTAGE"}}, func(t *testing.T, fake *Plugin, c *client) {
		c.learn()
		fake.On("NodeStageVolume").Times(1).Delay(time.Hour)
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		wantCode(t, c.stage(ctx, "v1", nowhere), "DEADLINE_EXCEEDED")
		if took := time.Since(began); took != time.Minute {
			t.Errorf("the deadline came after %v", took)
		}
		wantCode(t, c.unstage(t.Context(), "v1", nowhere), "ABORTED")
		time.Sleep(59*time.Minute - time.Second)
		if synctest.Wait(); staged(t, fake, "v1") {
			t.Error("the effect came early")
		}
		time.Sleep(2 * time.Second)
		if synctest.Wait(); !staged(t, fake, "v1") {
			t.Error("the late effect is missing")
		}
		must(t, c.unstage(t.Context(), "v1", nowhere))
		wantRules(t, fake, journal.Options{Settled: true})
		lines, err := fake.Lines()
		must(t, err)
		if first, last := lines[0].Wall, lines[len(lines)-1].Wall; last.Sub(first) < time.Hour ||
			count(lines, journal.Abandoned, "") != 1 {
			t.Errorf("the journal begins at %v and ends at %v, and has %d abandoned calls", first, last,
				count(lines, journal.Abandoned, ""))
		}
	})
}

// Once a connection is cut, no caller gets an answer of a call on it, whichever goroutine is faster.
func TestDroppedCallsGetNoAnswer(t *testing.T) {
	gone := 0
	for range 100 {
		bubble(t, Config{Caps: []string{"STAGE_UNSTAGE"}, AnyVolume: true},
			func(t *testing.T, fake *Plugin, c *client) {
				c.learn()
				rule := Rule{RPC: "NodeUnpublishVolume", When: After, Delay: Duration(time.Second)}
				must(t, fake.Script(Rule{RPC: rule.RPC, Volume: "cut", When: After, Delay: rule.Delay, Drop: true},
					rule))
				var calls sync.WaitGroup
				heard := make([]error, 4)
				for i := range heard {
					calls.Go(func() {
						heard[i] = c.unpublish(t.Context(), fmt.Sprint(i), places{target: fmt.Sprint("/nowhere/", i)})
					})
				}
				wantCode(t, c.unpublish(t.Context(), "cut", nowhere), "UNAVAILABLE")
				calls.Wait()
				synctest.Wait()
				lines, err := fake.Lines()
				must(t, err)
				for _, call := range journal.Calls(lines) {
					if i, err := strconv.Atoi(call.Volume); err == nil && call.Abandoned {
						gone++
						wantCode(t, heard[i], "UNAVAILABLE")
					}
				}
			})
	}
	if gone == 0 {
		t.Error("no call ran beside the one that cut the connection")
	}
}
