package e2e

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// Two allocs whose jobs ask for equal mount options are users of one volume, also after the shim was started anew: the first that leaves
// takes nothing from the second.
func TestDefectV1UsageIsComparedByValue(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	same := ask{source: "vol", mode: manyWriters, more: flags("noatime", "sync")}
	w.use("alloc-1", same)
	path := w.use("alloc-2", same)
	w.write(path, "f", "x")
	w.must(w.release("alloc-1"))
	if len(w.sent("NodeUnstageVolume")) > 0 {
		t.Error("unstaged under a user")
	}
	w.killShim()
	w.use("alloc-3", same)
	w.must(w.release("alloc-3"))
	w.reads(path, "f", "x")
	w.must(w.release("alloc-2"))
	w.mustHaveSent(1, attachOK, stageOK, publishOK, publishOK, unpublishOK,
		publishOK, unpublishOK, unpublishOK, unstageOK, detachOK)
	w.must(w.delete("vol"))
	w.exit(p)
}

// Who uses a volume is known over the restart of whoever may restart: the last one that leaves has it unstaged, and no other.
func TestDefectV2UseIsNotForgotten(t *testing.T) {
	type parts struct {
		*world
		plugin *pluginTask
		users  []host.AllocGroup
	}
	for name, restart := range map[string]func(*parts){
		"the shim":   func(w *parts) { w.killShim() },
		"the host":   func(w *parts) { w.reopened([]*pluginTask{w.plugin}, w.users...) },
		"the plugin": func(w *parts) { w.plugin = w.replaced(w.plugin, csifake.Monolith) },
		"another alloc of the plugin": func(w *parts) {
			next := w.world.plugin(string(w.plugin.task.Alloc)+"-next", csifake.Monolith)
			w.exit(w.plugin)
			w.plugin = next
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := &parts{world: newWorld(t, everything...)}
			w.plugin = w.world.plugin("alloc-p", csifake.Monolith)
			w.must(w.create("vol"))
			for _, id := range []string{"alloc-1", "alloc-2"} {
				w.users = append(w.users, w.asking(id, ask{source: "vol", mode: manyWriters}))
			}
			w.must(second(w.prepared(w.ctx(), w.users[0])))
			at, err := w.prepared(w.ctx(), w.users[1])
			w.must(err)
			path := at["DATA"]
			w.write(path, "f", "x")
			restart(w)
			w.must(w.release("alloc-1"))
			w.reads(path, "f", "x")
			w.mustHaveSent(1, attachOK, stageOK, publishOK, publishOK, unpublishOK)
			restart(w)
			w.must(w.release("alloc-2"))
			w.mustHaveSent(6, unpublishOK, unstageOK, detachOK)
			w.must(w.delete("vol"))
			w.exit(w.plugin)
		})
	}
}

// Who gives up while another one is served is told so: neither a mount nor an unmount that never ran is a success.
func TestDefectV3WaitingInVainIsAnError(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	first := w.use("alloc-1", ask{source: "vol", mode: manyWriters})
	gate := p.On("NodePublishVolume").Times(1).Hold()
	g := w.asking("alloc-2", ask{source: "vol", mode: manyWriters})
	served := goes(func() error { return second(w.prepared(w.ctx(), g)) })
	w.arrives(gate, served)

	third := w.asking("alloc-3", ask{source: "vol", mode: manyWriters})
	err := w.inVain("alloc-3", "alloc-2", func(ctx context.Context) error { return second(w.prepared(ctx, third)) })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a mount that never ran ends with: %v", err)
	}
	if err := w.releasedInVain("alloc-1", "alloc-2"); !errors.Is(err, context.Canceled) {
		t.Errorf("an unmount that never ran ends with: %v", err)
	}
	if _, mounted := w.mounted(first); !mounted || len(w.sent("NodeUnpublishVolume")) > 0 {
		t.Error("the first alloc's mount was touched")
	}
	gate.Open()
	w.must(w.ends("prepare", served))
	for _, id := range []string{"alloc-1", "alloc-2", "alloc-3"} {
		w.must(w.release(id))
	}
	w.must(w.delete("vol"))
	w.exit(p)
}

// Who gives up while it is served or waits leaves the volume to the next, and nobody spins meanwhile.
func TestDefectV4NobodySpinsAndNothingStaysLocked(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	ctx, leave := context.WithCancel(w.ctx())
	defer leave()
	gate := p.On("NodeStageVolume").Times(1).Hold()
	prepare := func(ctx context.Context, id string) <-chan error {
		g := w.asking(id, ask{source: "vol", mode: manyWriters})
		return goes(func() error { return second(w.prepared(ctx, g)) })
	}
	holder := prepare(ctx, "alloc-1")
	w.arrives(gate, holder)
	waiter, third, last := prepare(ctx, "alloc-2"), prepare(w.ctx(), "alloc-3"), prepare(w.ctx(), "alloc-4")
	for _, id := range []string{"alloc-2", "alloc-3", "alloc-4"} {
		w.eventually(id+" waits", func() bool { return w.waits(id) != "" })
	}
	leave()
	for name, done := range map[string]<-chan error{"the holder": holder, "the waiter": waiter} {
		if err := w.ends(name, done); !errors.Is(err, context.Canceled) {
			t.Errorf("%s left, and is told: %v", name, err)
		}
	}
	used := w.busy(2 * time.Second) // one of the two that are left has the volume now, and the other waits
	t.Logf("a shim in which one waits uses %.1f%% of a processor", 100*used)
	if used > 0.1 {
		t.Error("somebody spins")
	}
	if n := len(w.sent("NodeStageVolume")); n > 20 {
		t.Errorf("the call that is open was sent %d times within two seconds", n)
	}
	gate.Open()
	w.must(w.ends("the third", third))
	w.must(w.ends("the last one", last))
	for _, id := range []string{"alloc-1", "alloc-2", "alloc-3", "alloc-4"} {
		w.must(w.release(id))
	}
	w.must(w.delete("vol"))
	w.exit(p)
}

// busy is which part of a processor the shim uses for so long.
func (w *world) busy(long time.Duration) float64 {
	w.t.Helper()
	st, err := w.host.Status(w.ctx())
	w.must(err)
	used, began := w.ticks(st.PID), time.Now()
	<-time.After(long)
	return float64(w.ticks(st.PID)-used) * float64(time.Second/100) / float64(time.Since(began))
}

// ticks is the processor time of a process in hundredths of a second (proc_pid_stat(5): utime and stime).
func (w *world) ticks(pid int) (sum int) {
	w.t.Helper()
	stat := proc(pid, "stat")
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	for _, field := range fields[11:13] {
		n, err := strconv.Atoi(field)
		w.must(err)
		sum += n
	}
	return sum
}

// Who asks for other mount options than a volume is staged with gets neither the mount of the others nor one of its own.
func TestDefectV5OtherOptionsAreRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.createWith(w.ctx(), "vol", flags("noatime")))
	w.use("alloc-1", ask{source: "vol", mode: manyWriters})
	before := len(w.sent())
	_, err := w.prepared(w.ctx(), w.asking("alloc-2", ask{source: "vol", mode: manyWriters, more: flags("noexec")}))
	w.conflicts(err, "alloc-1")
	w.mustHaveSent(before)
	w.must(w.release("alloc-2"))
	w.must(w.release("alloc-1"))
	w.use("alloc-3", ask{source: "vol", mode: manyWriters, more: flags("noexec")}) // nobody uses it otherwise now
	w.must(w.release("alloc-3"))
	w.must(w.delete("vol"))
	w.exit(p)
}

// What was staged for a publish that fails is unstaged with the alloc, whether the orchestrator says so or comes back without it.
func TestDefectV6AFailedPublishLeavesNothingStaged(t *testing.T) {
	for name, end := range map[string]func(*world, *pluginTask){
		"released":              func(w *world, _ *pluginTask) { w.must(w.release("alloc-1")) },
		"released after a kill": func(w *world, _ *pluginTask) { w.killShim(); w.must(w.release("alloc-1")) },
		"not named any more":    func(w *world, p *pluginTask) { w.reopened([]*pluginTask{p}) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, everything...)
			p := w.plugin("alloc-p", csifake.Monolith)
			w.must(w.create("vol"))
			p.On("NodePublishVolume").After().Code(codes.InvalidArgument, "no")
			if _, err := w.prepared(w.ctx(), w.asking("alloc-1", ask{source: "vol"})); !errors.Is(err, host.ErrInvalid) {
				t.Fatalf("prepare: %v", err)
			}
			staged := w.sent("NodeStageVolume")[0].Staging
			if _, mounted := w.mounted(staged); !mounted {
				t.Fatalf("nothing is staged at %s", staged)
			}
			end(w, p)
			w.forgotten("alloc-1")
			if _, mounted := w.mounted(staged); mounted {
				t.Error("left staged")
			}
			w.mustHaveSent(4, unpublishOK, unstageOK, detachOK)
			w.must(w.delete("vol"))
			w.exit(p)
		})
	}
}

// A volume that was expanded while nobody used it is expanded on its node when it is used next, by whichever shim, once, before its tasks start;
// one that is used, at once. The size that the node tells is the new one.
func TestDefectV8ExpandedVolumeGrowsAtItsNextUse(t *testing.T) {
	const enlargeOK, growOK = "ControllerExpandVolume OK", "NodeExpandVolume OK"
	stages := []string{"CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "STAGE_UNSTAGE_VOLUME"}
	for name, c := range map[string]struct {
		caps         []string
		up, up2      []string
		down, online []string
	}{
		"staged": {stages, []string{attachOK, stageOK, growOK, publishOK}, []string{attachOK, stageOK, publishOK},
			[]string{unpublishOK, unstageOK, detachOK}, []string{enlargeOK, growOK}},
		"published": {[]string{"CREATE_DELETE_VOLUME"}, []string{publishOK, growOK}, []string{publishOK}, []string{unpublishOK}, []string{enlargeOK, growOK}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, append(c.caps, "EXPAND_VOLUME", "expansion/ONLINE", "node/GET_VOLUME_STATS")...)
			p := w.plugin("alloc-p", csifake.Monolith)
			w.must(w.create("vol"))
			n := len(w.sent())
			w.expanded("vol", 2<<20, true)
			w.mustHaveSent(n, enlargeOK)
			w.killShim()
			n = len(w.sent())
			w.use("alloc-1", ask{source: "vol"})
			w.mustHaveSent(n, c.up...)
			w.shows("vol", 2<<20)
			n = len(w.sent())
			w.must(w.release("alloc-1"))
			w.use("alloc-2", ask{source: "vol"})
			w.mustHaveSent(n, append(c.down, c.up2...)...)
			n = len(w.sent())
			w.expanded("vol", 3<<20, false)
			w.mustHaveSent(n, c.online...)
			w.shows("vol", 3<<20)
			w.must(w.release("alloc-2"))
			w.must(w.delete("vol"))
			w.exit(p)
		})
	}
}

// expanded expands a volume, and says whether its node has it left to do.
func (w *world) expanded(id string, size int64, pending bool) {
	w.t.Helper()
	v, err := w.host.ExpandVolume(w.ctx(), volumeName(id), host.CapacityRange{Required: size})
	w.must(err)
	if v.Capacity != size || v.Expansion.Pending() != pending {
		w.t.Errorf("expanded to %d bytes: %+v", v.Capacity, v.Expansion)
	}
}

// shows fails the test unless the node tells that size of a volume.
func (w *world) shows(id string, size int64) {
	w.t.Helper()
	usage, _, err := w.host.VolumeStats(w.ctx(), volumeName(id))
	w.must(err)
	if len(usage) == 0 || usage[0].Total != size {
		w.t.Errorf("the node tells %+v, want %d bytes", usage, size)
	}
}
