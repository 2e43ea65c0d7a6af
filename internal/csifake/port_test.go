package csifake

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"holdfast/internal/csifake/journal"
)

// bubble runs a test within a synctest bubble, at a plugin that makes no system call.
func bubble(t *testing.T, cfg Config, f func(t *testing.T, fake *Plugin, c *client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		cfg.Port, cfg.Blind = &Port{}, true
		fake := Start(t, cfg)
		f(t, fake, clientOf(t, cfg.Port))
	})
}

// nowhere are paths that nobody touches.
var nowhere = places{staging: "/nowhere/staging", target: "/nowhere/alloc/target"}

// TestBubble: in a bubble the time of a script is that of the bubble. A delay of an hour takes no time, a deadline
// before it ends the call, and the effect comes all the same, an hour after.
func TestBubble(t *testing.T) {
	bubble(t, Config{Caps: []string{"STAGE_UNSTAGE"}}, func(t *testing.T, fake *Plugin, c *client) {
		c.learn()
		began := time.Now()
		fake.On("NodeStageVolume").Times(1).Delay(time.Hour)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		wantCode(t, c.stage(ctx, "v1", nowhere), "DEADLINE_EXCEEDED")
		if took := time.Since(began); took != time.Minute {
			t.Errorf("the deadline came after %v", took)
		}
		wantCode(t, c.unstage(t.Context(), "v1", nowhere), "ABORTED")
		staged := func() bool {
			used, err := fake.Backend().Volumes()
			must(t, err)
			return used["v1"].Staged["node-1"] != ""
		}
		time.Sleep(59*time.Minute - time.Second)
		if synctest.Wait(); staged() {
			t.Error("the effect came early")
		}
		time.Sleep(2 * time.Second)
		if synctest.Wait(); !staged() {
			t.Error("the late effect is missing")
		}
		must(t, c.unstage(t.Context(), "v1", nowhere))
		for _, v := range fake.Check(journal.Options{Settled: true}) {
			t.Error(v)
		}
		lines, err := fake.Lines()
		must(t, err)
		if first, last := lines[0].Wall, lines[len(lines)-1].Wall; last.Sub(first) < time.Hour ||
			count(lines, journal.Abandoned, "") != 1 {
			t.Errorf("the journal begins at %v and ends at %v, and has %d abandoned calls", first, last,
				count(lines, journal.Abandoned, ""))
		}
	})
}

// TestPortRestart: a plugin that dies fails the calls that run, a port without a plugin fails all, and the next plugin
// is found.
func TestPortRestart(t *testing.T) {
	bubble(t, Config{Caps: []string{"STAGE_UNSTAGE"}}, func(t *testing.T, fake *Plugin, c *client) {
		c.learn()
		fake.On("NodeStageVolume").Volume("v2").HangForEver()
		other := make(chan error, 1)
		elsewhere := places{staging: "/nowhere/else"}
		go func() { other <- c.stage(t.Context(), "v2", elsewhere) }()
		synctest.Wait()
		fake.On("NodeStageVolume").Volume("v1").After().Crash()
		wantCode(t, c.stage(t.Context(), "v1", nowhere), "UNAVAILABLE")
		wantCode(t, <-other, "UNAVAILABLE")
		_, err := c.Probe(t.Context(), &csi.ProbeRequest{})
		wantCode(t, err, "UNAVAILABLE")
		again := Start(t, fake.Config())
		must(t, c.unstage(t.Context(), "v1", nowhere), c.unstage(t.Context(), "v2", elsewhere))
		again.Stop()
		synctest.Wait()
		_, err = c.Probe(t.Context(), &csi.ProbeRequest{})
		wantCode(t, err, "UNAVAILABLE")
		for _, v := range again.Check(journal.Options{Settled: true, Strict: true}) {
			t.Error(v)
		}
	})
}

// TestDroppedCallsAreNotHeard: once a connection is cut, nobody hears an answer of a call that ran on it, whichever
// goroutine is quicker.
func TestDroppedCallsAreNotHeard(t *testing.T) {
	gone := 0
	for range 300 {
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

// TestPortSharesNothing: what a caller does with its request and its answer afterwards is nothing to the plugin.
func TestPortSharesNothing(t *testing.T) {
	bubble(t, Config{Caps: AllCaps}, func(t *testing.T, _ *Plugin, c *client) {
		req := &csi.CreateVolumeRequest{Name: "one", VolumeCapabilities: []*csi.VolumeCapability{writer()}}
		made, err := c.CreateVolume(t.Context(), req)
		must(t, err)
		req.Name, made.Volume.VolumeId = "two", "other"
		made.Volume.VolumeContext["csifake/name"] = "two"
		again, err := c.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "one",
			VolumeCapabilities: []*csi.VolumeCapability{writer()}})
		must(t, err)
		if v := again.GetVolume(); v.GetVolumeId() != VolumeID("one") || v.GetVolumeContext()["csifake/name"] != "one" {
			t.Errorf("the volume is %v", v)
		}
	})
}

// TestPortLimits: the size of answers is limited as it is over a socket, and by the same option.
func TestPortLimits(t *testing.T) {
	inBothForms(t, func(t *testing.T, start func(Config) (*Plugin, *client)) {
		_, c := start(Config{Script: []Rule{{RPC: "Probe", Hostile: Huge}}})
		_, err := c.Probe(t.Context(), &csi.ProbeRequest{})
		wantCode(t, err, "RESOURCE_EXHAUSTED")
		_, err = c.Probe(t.Context(), &csi.ProbeRequest{}, grpc.MaxCallRecvMsgSize(8<<20))
		must(t, err)
		cancelled, cancel := context.WithCancel(t.Context())
		cancel()
		_, err = c.Probe(cancelled, &csi.ProbeRequest{})
		wantCode(t, err, "CANCELLED")
	})
}

// TestPortStream: a call with several answers goes through a port too, and may hang and be cut there.
func TestPortStream(t *testing.T) {
	bubble(t, Config{Caps: everyCap()}, func(t *testing.T, fake *Plugin, c *client) {
		ctx := t.Context()
		made, err := c.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: "one",
			VolumeCapabilities: []*csi.VolumeCapability{writer()}})
		must(t, err)
		snap, err := c.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "s",
			SourceVolumeId: made.GetVolume().GetVolumeId()})
		must(t, err)
		ask := func(ctx context.Context, id string) (n int, err error) {
			stream, err := csi.NewSnapshotMetadataClient(c.to).GetMetadataAllocated(ctx,
				&csi.GetMetadataAllocatedRequest{SnapshotId: id})
			for err == nil {
				if _, err = stream.Recv(); err == nil {
					n++
				}
			}
			return n, err
		}
		if n, err := ask(ctx, snap.GetSnapshot().GetSnapshotId()); n != 1 || !errors.Is(err, io.EOF) {
			t.Errorf("%d answers, then %v", n, err)
		}
		_, err = ask(ctx, "none")
		wantCode(t, err, "NOT_FOUND")
		fake.On("GetMetadataAllocated").Times(1).Hang()
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err = ask(short, snap.GetSnapshot().GetSnapshotId())
		wantCode(t, err, "DEADLINE_EXCEEDED")
		fake.ClearScript()
		fake.On("GetMetadataAllocated").Drop()
		_, err = ask(ctx, snap.GetSnapshot().GetSnapshotId())
		wantCode(t, err, "UNAVAILABLE")
	})
}

// TestFlapping: Probe alternates by the call, or by the time; the time is the bubble's.
func TestFlapping(t *testing.T) {
	bubble(t, Config{}, func(t *testing.T, fake *Plugin, c *client) {
		probe := func() string {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			reply, err := c.Probe(ctx, &csi.ProbeRequest{})
			switch {
			case err != nil:
				return codeName(err)
			case reply.GetReady().GetValue():
				return "ok"
			}
			return "not ready"
		}
		fake.On("Probe").Nth(2).Times(6).Pattern("ok", "not_ready", "error", "hang", "CODE_42")
		var got []string
		for range 8 {
			got = append(got, probe())
		}
		want := []string{"ok", "ok", "not ready", "FAILED_PRECONDITION", "DEADLINE_EXCEEDED", "CODE_42", "ok", "ok"}
		if !slices.Equal(got, want) {
			t.Errorf("by the call: %v, want %v", got, want)
		}
		fake.ClearScript()
		fake.On("Probe").Every(10*time.Second).Pattern("error", "ok", "not_ready")
		got = nil
		for range 8 {
			got = append(got, probe())
			time.Sleep(5 * time.Second)
		}
		const sick = "FAILED_PRECONDITION"
		want = []string{sick, sick, "ok", "ok", "not ready", "not ready", sick, sick}
		if !slices.Equal(got, want) {
			t.Errorf("by the time: %v, want %v", got, want)
		}
	})
}

// TestLateEffectAfterAnswer: an answer that says nothing comes at once and the effect later. Until then the volume is
// busy.
func TestLateEffectAfterAnswer(t *testing.T) {
	for _, rule := range []Rule{{Code: "DEADLINE_EXCEEDED"}, {Code: "ABORTED"}, {Drop: true}} {
		bubble(t, Config{Caps: []string{"STAGE_UNSTAGE"}}, func(t *testing.T, fake *Plugin, c *client) {
			c.learn()
			rule.RPC, rule.Times, rule.Late = "NodeStageVolume", 1, Duration(5*time.Second)
			must(t, fake.Script(rule))
			want := rule.Code
			if rule.Drop {
				want = "UNAVAILABLE"
			}
			began := time.Now()
			wantCode(t, c.stage(t.Context(), "v1", nowhere), want)
			if time.Since(began) != 0 {
				t.Errorf("the answer takes %v", time.Since(began))
			}
			var waits int
			for codeName(c.unstage(t.Context(), "v1", nowhere)) != "OK" {
				waits++
				time.Sleep(time.Second)
			}
			lines, err := fake.Lines()
			must(t, err)
			late := slices.IndexFunc(lines, func(l journal.Line) bool { return l.Kind == journal.Late })
			if waits != 5 && waits != 6 || late < 0 || !lines[late].Effect || lines[late].Call == 0 {
				t.Errorf("the undo waits %d times; the journal has %+v", waits, lines)
			}
			if used, _ := fake.Backend().Volumes(); used["v1"].Staged["node-1"] != "" {
				t.Errorf("the backend has %v", used)
			}
			for _, v := range fake.Check(journal.Options{Settled: true}) {
				t.Error(v)
			}
		})
	}
}

// TestLateEffectOfTheDead: a plugin that dies takes what was to come with it.
func TestLateEffectOfTheDead(t *testing.T) {
	bubble(t, Config{Caps: []string{"STAGE_UNSTAGE"}}, func(t *testing.T, fake *Plugin, c *client) {
		must(t, fake.Script(Rule{RPC: "NodeStageVolume", Late: Duration(time.Minute), Code: "ABORTED"}))
		wantCode(t, c.stage(t.Context(), "v1", nowhere), "ABORTED")
		fake.Kill()
		time.Sleep(time.Hour)
		if used, _ := fake.Backend().Volumes(); used["v1"].Staged["node-1"] != "" {
			t.Errorf("the backend has %v", used)
		}
	})
}

// TestCapsLater: what a plugin announces changes from one start to the next, and stays as it was the last time.
func TestCapsLater(t *testing.T) {
	inBothForms(t, func(t *testing.T, start func(Config) (*Plugin, *client)) {
		cfg := Config{Role: Node, Backend: NewBackend(""), Caps: []string{"STAGE_UNSTAGE"},
			CapsLater: [][]string{{}, {"STAGE_UNSTAGE", "node/EXPAND_VOLUME"}}}
		capName := func(c *csi.NodeServiceCapability) fmt.Stringer { return c.GetRpc().GetType() }
		var got []string
		for range 4 {
			fake, c := start(cfg)
			reply, err := c.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
			must(t, err)
			got = append(got, strings.Join(names(reply.GetCapabilities(), capName), "+"))
			wantStage := "OK"
			if len(reply.GetCapabilities()) == 0 {
				wantStage = "UNIMPLEMENTED"
			}
			wantCode(t, c.stage(t.Context(), "v1", places{staging: "/csifake/nowhere"}), wantStage)
			cfg = fake.Config()
			fake.Kill()
		}
		const both = "STAGE_UNSTAGE_VOLUME+EXPAND_VOLUME"
		if want := []string{"STAGE_UNSTAGE_VOLUME", "", both, both}; !slices.Equal(got, want) {
			t.Errorf("the starts announce %q, want %q", got, want)
		}
		if _, err := New(Config{Port: &Port{}, CapsLater: [][]string{{"NONSENSE"}}}); err == nil {
			t.Error("an unknown capability is taken")
		}
	})
}

// TestManyCalls: a bubble takes tens of thousands of calls, with deaths among them, and the judge all of their journal.
func TestManyCalls(t *testing.T) {
	bubble(t, Config{Caps: []string{"STAGE_UNSTAGE"}}, func(t *testing.T, fake *Plugin, c *client) {
		c.learn()
		rnd, ctx := rand.New(rand.NewPCG(1, 2)), t.Context()
		again := func(call func(context.Context, string, places) error) {
			for codeName(call(ctx, "v1", nowhere)) != "OK" {
				if rnd.IntN(10) == 0 {
					fake.Kill()
					fake = Start(t, fake.Config())
				}
			}
		}
		for range 2500 {
			fake.ClearScript()
			must(t, fake.Script(Rule{Times: 2, When: []Moment{Before, After}[rnd.IntN(2)],
				Code: journal.CodeName(uint32(rnd.IntN(17)))}))
			for _, call := range []func(context.Context, string, places) error{c.stage, c.publish, c.unpublish,
				c.unstage} {
				again(call)
			}
		}
		calls, err := fake.Calls()
		must(t, err)
		if len(calls) < 10_000 {
			t.Errorf("the journal has %d calls", len(calls))
		}
		for _, v := range fake.Check(journal.Options{Settled: true, Strict: true}) {
			t.Fatal(v)
		}
	})
}
