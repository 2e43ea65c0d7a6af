package csifake

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/internal/csifake/journal"
)

// bubble runs a test within a synctest bubble, with a plugin that makes no system call.
func bubble(t *testing.T, cfg Config, f func(t *testing.T, fake *Plugin, c *client)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		cfg.Port, cfg.Blind = &Port{}, true
		fake := Start(t, cfg)
		f(t, fake, clientOf(t, cfg.Port))
	})
}

// nowhere has paths that are never accessed.
var nowhere = places{staging: "/nowhere/staging", target: "/nowhere/alloc/target"}

// In a bubble, a script uses the bubble's time. A delay of an hour takes no real time. A deadline before that ends the
// call, and the effect still comes after the hour.
func TestDelaysFollowTheClockOfTheBubble(t *testing.T) {
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

// If a plugin dies, its running calls fail. A port without a plugin fails all calls. The next plugin is found.
func TestPortFindsTheNextPlugin(t *testing.T) {
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

// Once a connection is cut, no caller gets an answer of a call on it, whichever goroutine is faster.
func TestDroppedCallsGetNoAnswer(t *testing.T) {
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

// Changes that a caller makes to its request and its answer afterwards do not affect the plugin.
func TestPortCopiesRequestsAndAnswers(t *testing.T) {
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

// A call with several answers also works through a port, and may hang and be cut there.
func TestPortServesStreams(t *testing.T) {
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
