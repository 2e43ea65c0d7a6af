package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

// heldCall is a plugin that stops in the middle of one call after the other.
type heldCall struct {
	*env
	plugin *pluginTask
	gate   *csifake.Gate                // of the call that is under way
	next   func(plugin *csifake.Plugin) // has the plugin stop in the next call
}

// inTheMiddleOfEachCall runs a scenario and calls disturb while the plugin is in the middle of each mutating call,
// before or after its effect. disturb calls next, then opens the gate. Each call must succeed and must have been sent
// at least twice, with the same fields.
func inTheMiddleOfEachCall(t *testing.T, disturb func(h *heldCall)) {
	halves := map[string][]string{"up": mutatingCalls[:5], "down": mutatingCalls[5:]}
	for _, when := range []string{"before", "after"} {
		for name, rpcs := range halves {
			t.Run(name+"/"+when, func(t *testing.T) {
				t.Parallel()
				h := &heldCall{env: newEnv(t, expandCaps...)}
				h.plugin = h.addPlugin("alloc-p", csifake.Monolith)
				hold := func(p *csifake.Plugin, rpc string) {
					rule := p.On(rpc).Times(1)
					if when == "after" {
						rule = rule.After()
					}
					h.gate = rule.Hold()
				}
				hold(h.plugin.Plugin, rpcs[0])
				done := background(h.scenario)
				for i, rpc := range rpcs {
					t.Log("in the middle of", rpc)
					h.waitHeld(h.gate, done)
					h.next = func(p *csifake.Plugin) {
						if i+1 < len(rpcs) {
							hold(p, rpcs[i+1])
						}
					}
					disturb(h)
				}
				h.must(h.result("the scenario", done))
				for _, rpc := range rpcs {
					h.wantOneRequest(rpc, 2)
				}
				h.stopPlugin(h.plugin)
			})
		}
	}
}

// The shim is killed in the middle of each call. The caller gets what it asked for, the claim does not change, and
// nothing is lost or left.
func TestShimKilledInTheMiddle(t *testing.T) {
	inTheMiddleOfEachCall(t, func(h *heldCall) {
		gate, claim := h.gate, h.claims()["alloc-1"]
		h.next(h.plugin.Plugin)
		h.killShim()
		if now := h.claims()["alloc-1"]; now != claim {
			h.t.Errorf("the claim was %+v and is %+v", claim, now)
		}
		gate.Open()
	})
}

// The plugin is killed in the middle of each call and started again. The caller gets what it asked for.
func TestPluginKilledInTheMiddle(t *testing.T) {
	inTheMiddleOfEachCall(t, func(h *heldCall) {
		h.plugin.Kill()
		h.gate.Open()
		h.must(h.host.TaskExited(h.ctx(), h.plugin.task.Key(), h.plugin.task.Attempt, 0, 9, false))
		h.onStart = h.next
		h.plugin = h.startPlugin("alloc-p", csifake.Monolith, h.plugin.task.Attempt+1)
	})
}

// The shim is replaced in the middle of each call. The swap does not wait for the call, the next shim sends it again,
// and no mount changes.
func TestLongCallsSurvive(t *testing.T) {
	// more than the steps take on a slow machine, less than a step waits for a call
	const noWait = 1500 * time.Millisecond
	inTheMiddleOfEachCall(t, func(h *heldCall) {
		gate := h.gate
		h.next(h.plugin.Plugin)
		time.Sleep(50 * time.Millisecond) // a swap waits for shorter calls
		before := h.mountTable()
		h.waitCommitted()
		var took time.Duration
		for _, s := range h.swap().Steps {
			if s.Step == host.SwapQuiesce || s.Step == host.SwapFence {
				took += s.Took
			}
		}
		if took >= noWait {
			h.t.Errorf("the swap waited %s for a call that is still at the driver", took)
		}
		if after := h.mountTable(); after != before {
			h.t.Errorf("the swap changed the mounts:\n%s\nand now\n%s", before, after)
		}
		gate.Open()
	})
}

// One call hangs at the driver over four shims. Each sends the same call again, and the last one gets the answer.
func TestOneCallSurvivesManyShims(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	p.On("NodeStageVolume").Times(4).Hang() // until its caller is gone
	done := background(e.scenario)
	waitSent := func(n int) {
		e.waitUntil(fmt.Sprintf("the call is sent %d times", n), func() bool {
			return len(e.calls("NodeStageVolume")) == n
		})
	}
	waitSent(1)
	for n := range 3 {
		e.swap()
		waitSent(n + 2)
	}
	select {
	case err := <-done:
		t.Fatalf("the scenario ended while a call of it hangs: %v", err)
	default:
	}
	e.replaceShimByKill()
	e.must(e.result("the scenario", done))
	if calls := e.wantOneRequest("NodeStageVolume", 5); len(calls) > 5 {
		t.Errorf("five shims sent %d calls", len(calls))
	}
	for _, problem := range overlapErrors(e.calls(), e.pids) {
		t.Error(problem)
	}
	e.stopPlugin(p)
}

// An old shim that freezes before it is replaced, with a call at the driver, is dead before the new one takes over: it
// cannot be thawed, and the call is sent again with the same fields.
func TestThawedShimIsDead(t *testing.T) {
	t.Parallel()
	e := unopenedEnv(t, allCaps...)
	e.config.SwapBudget = 200 * time.Millisecond // so that it runs out
	e.open()
	old := e.pids[0]
	p := e.addPlugin("alloc-p", csifake.Monolith)
	gate := p.On("NodeStageVolume").Times(1).Hold()
	done := background(e.scenario)
	e.waitHeld(gate, done)
	frozen := make(chan struct{})
	var once sync.Once
	p.On("Probe").Answer(func(ctx context.Context, _, reply proto.Message, err error) (proto.Message, error) {
		from, known := peer.FromContext(ctx)
		// the candidate has a copy of the state
		if known && !strings.HasSuffix(from.Addr.String(), fmt.Sprintf("process %d", old)) {
			once.Do(func() {
				e.must(unix.Kill(old, unix.SIGSTOP))
				close(frozen)
			})
		}
		return reply, err
	})
	e.swap()
	<-frozen
	if err := unix.Kill(old, unix.SIGCONT); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the old shim can be thawed: %v", err)
	}
	gate.Open()
	e.must(e.result("the scenario", done))
	e.wantOneRequest("NodeStageVolume", 2)
	for _, problem := range overlapErrors(e.calls(), e.pids) {
		t.Error(problem)
	}
	e.stopPlugin(p)
}

// maxTries bounds how often a test repeats what may fail on a busy machine.
const maxTries = 20

// Two calls are at the driver when their shim has to release the state. The short one ends there; the long one is cut
// off and the next shim sends it again. A call counts as short for ten milliseconds, so on a busy machine some tries
// fail and must repeat the call properly. No other test runs meanwhile.
func TestShortCallsEndAtTheirShim(t *testing.T) {
	s := newShortCalls(t)
	for _, c := range []struct {
		rpc   string
		after int // calls of the same volume that need its secret earlier
	}{
		{"CreateVolume", 0}, {"NodeStageVolume", 2}, {"NodePublishVolume", 3}, {"DeleteVolume", 5},
	} {
		tries := 1
		for ; !s.endsAtItsShim(c.rpc, c.after); tries++ {
			if tries == maxTries {
				t.Fatalf("%s never ended at its shim in %d swaps", c.rpc, tries)
			}
		}
		t.Logf("%s ended at its shim in swap %d", c.rpc, tries)
	}
	for _, problem := range overlapErrors(s.calls(), s.pids) {
		t.Error(problem)
	}
	s.stopPlugin(s.plugin)
}

// shortCalls is an env in which calls begin just before their shim releases the state.
type shortCalls struct {
	*env
	plugin  *pluginTask
	quiesce *breakpoint
	secrets chan *secretRequest // how to answer the next requests for a secret
	volumes int
}

// secretRequest is a request for a secret that is answered once answer is closed.
type secretRequest struct{ received, answer chan struct{} }

func newShortCalls(t *testing.T) *shortCalls {
	t.Helper()
	s := &shortCalls{env: unopenedEnv(t, allCaps...), secrets: make(chan *secretRequest, 10)}
	s.config.Bake, s.config.Secret = time.Millisecond, s.secret
	s.open()
	s.plugin = s.addPlugin("alloc-p", csifake.Monolith)
	s.quiesce = s.newBreakpoint("Quiesce before")
	s.setFaults(s.quiesce.faults()...)
	s.swap()
	return s
}

func (s *shortCalls) secret(context.Context, string) (string, error) {
	select {
	case r := <-s.secrets:
		close(r.received)
		<-r.answer
	default:
	}
	return "secret", nil
}

// endsAtItsShim swaps while a long call is at the driver and a short one begins, which is answered as the long one is
// cut off. It reports whether the short call ended at the old shim.
func (s *shortCalls) endsAtItsShim(rpc string, after int) bool {
	s.t.Helper()
	s.volumes++
	long, short := fmt.Sprint("long-", s.volumes), fmt.Sprint("short-", s.volumes)
	s.must(s.quiesce.set())
	longDone, cut := s.startLongCall(long)
	s.plugin.On(rpc).Times(1).Answer(func(ctx context.Context, _, reply proto.Message, err error) (proto.Message,
		error) {
		if err := s.quiesce.unset(); err != nil {
			s.t.Error(err)
		}
		select {
		case <-cut:
		case <-ctx.Done():
		}
		return reply, err
	})
	newRequest := func() *secretRequest { return &secretRequest{make(chan struct{}), make(chan struct{})} }
	for range after {
		r := newRequest()
		close(r.answer)
		s.secrets <- r
	}
	held := newRequest()
	s.secrets <- held
	user := s.group("alloc-"+short, request{source: short})
	secrets := "secrets {\n password = { env = \"PASSWORD\" }\n}\n"
	shortDone := background(func() error { return s.lifeCycle(s.ctx(), short, user, secrets) })
	s.waitUntil("the short call is about to be sent", func() bool { return isClosed(held.received) })
	s.swapWhile(func() {
		s.waitReached(s.quiesce)
		close(held.answer)
	})
	s.must(s.result("the long call", longDone))
	s.must(s.result("the short call's volume", shortDone))
	s.must(s.delete(long))
	if !s.sentAgain("CreateVolume", long) {
		s.t.Error("the swap waited for the long call")
	}
	return !s.sentAgain(rpc, short)
}

// startLongCall creates a volume by a call that takes until it is cut off.
func (s *shortCalls) startLongCall(volume string) (done <-chan error, cut chan struct{}) {
	s.t.Helper()
	arrived, cut := make(chan struct{}), make(chan struct{})
	s.plugin.On("CreateVolume").Times(1).Answer(func(ctx context.Context, _, reply proto.Message,
		err error) (proto.Message, error) {
		close(arrived)
		<-ctx.Done()
		close(cut)
		return reply, err
	})
	done = background(func() error { return s.create(volume) })
	s.waitUntil("the long call is at the driver", func() bool { return isClosed(arrived) })
	return done, cut
}

// sentAgain reports whether a call of the last shim but one was cut off and sent again by the last one.
func (s *shortCalls) sentAgain(rpc, volume string) bool {
	s.t.Helper()
	calls := slices.DeleteFunc(s.calls(rpc), func(c journal.Call) bool {
		return volumeOf(c) != csifake.VolumeID(volume)
	})
	old, next := s.pids[len(s.pids)-2], s.pids[len(s.pids)-1]
	first, last := calls[0], calls[len(calls)-1]
	again := len(calls) > 1
	switch {
	case first.Peer != old:
		s.t.Errorf("%s of %s was first sent by process %d, not %d", rpc, volume, first.Peer, old)
	case codeOf(last) != "OK" || last.Abandoned:
		s.t.Errorf("%s of %s was not answered: %+v", rpc, volume, last)
	case again && (last.Peer != next || last.Hash != first.Hash):
		s.t.Errorf("%s of %s was repeated by process %d, not %d, or with other fields: %+v after %+v",
			rpc, volume, last.Peer, next, last, first)
	}
	return again
}

// The shim is killed whenever one of four parts of a volume was mounted or unmounted. Its successor completes the work:
// each part is mounted once, from its place, and nothing is left in the end.
func TestShimKilledAmongParts(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.create("vol"))
	parts := func() (points []string) {
		mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(filepath.Join(e.config.StateDir, "mnt", "parts")))
		e.must(err)
		for _, m := range mounts {
			points = append(points, m.Mountpoint)
		}
		return points
	}
	killWhen := func(is func() bool) {
		for end := time.Now().Add(waitLimit); !is(); time.Sleep(100 * time.Microsecond) {
			if time.Now().After(end) {
				t.Fatal("timed out waiting for parts")
			}
		}
		e.killShim()
	}
	for kill := range 5 {
		alloc := fmt.Sprint("alloc-", kill)
		g, err := parseGroup(e.ctx(), e.host, alloc, partsJob)
		e.must(err)
		g.Isolated = map[string]bool{"t": true}
		var plans map[string]host.Plan
		prepared := background(func() (err error) { plans, err = e.host.PrepareAlloc(e.ctx(), g); return err })
		killWhen(func() bool { return len(parts()) >= kill })
		e.must(e.result("prepare", prepared))
		binds := plans["t"].Binds
		if points := parts(); len(points) != 4 || len(binds) != 4 {
			t.Fatalf("killed at %d: %d are mounted, the plan has %v", kill, len(points), binds)
		}
		for i, b := range binds {
			e.must(os.WriteFile(filepath.Join(b.Source, "name"), []byte(b.Target), 0o600))
			want := fmt.Sprintf("/parts/%s/%d", alloc, i)
			info, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(b.Source))
			if err != nil || len(info) != 1 || !strings.HasSuffix(info[0].Root, want) ||
				b.Target != fmt.Sprintf("/data/%d", i) {
				t.Errorf("%s is of %v, want %s: %v", b.Target, info, want, err)
			}
		}
		released := background(func() error { return e.release(alloc) })
		killWhen(func() bool { return len(parts()) <= 4-kill })
		e.must(e.result("release", released))
		if points := parts(); len(points) > 0 {
			t.Errorf("killed at %d: left are %v", kill, points)
		}
	}
	e.must(e.delete("vol"))
	e.stopPlugin(p)
}

// partsJob has a task that mounts four parts of the volume "vol".
const partsJob = `
job "user" {
  group "g" {
    volume "data" {
      type            = "csi"
      source          = "vol"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
    }
    task "t" {
      driver = "exec"
      dynamic "volume_mount" {
        for_each = range(4)
        content {
          volume      = "data"
          destination = "/data/${volume_mount.value}"
          sub_path    = "parts/${NOMAD_ALLOC_ID}/${volume_mount.value}"
        }
      }
    }
  }
}
`
