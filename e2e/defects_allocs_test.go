package e2e

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// While an unmount fails, nothing that comes after it is sent, and the claim is kept: nobody else gets the volume, and nobody deletes it.
func TestDefectH1ClaimIsKeptUntilUnmounted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	path := w.use("alloc-1", ask{source: "vol"})
	p.On("NodeUnpublishVolume").Code(codes.Internal, "target is busy")
	if err := w.releasedInVain("alloc-1", "INTERNAL: target is busy"); !errors.Is(err, context.Canceled) {
		t.Errorf("release: %v", err)
	}
	w.eventually("the unmount is given up, and begun anew", func() bool {
		return len(w.sent("NodeUnpublishVolume")) > 3 || len(w.claims()) == 0
	})
	if _, held := w.claims()["alloc-1"]; !held {
		t.Error("the claim was given back")
	}
	if _, mounted := w.mounted(path); !mounted {
		t.Error("it is not mounted: the test proves nothing")
	}
	w.conflicts(second(w.prepared(w.ctx(), w.asking("alloc-2", ask{source: "vol"}))), "alloc-1")
	w.conflicts(w.delete("vol"), "alloc-1")
	if n := len(w.sent("NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume")); n > 0 {
		t.Errorf("%d calls were sent that may come after the unmount only", n)
	}
	p.ClearScript()
	w.must(w.release("alloc-1"))
	w.must(w.release("alloc-2"))
	w.must(w.delete("vol"))
	w.exit(p)
}

// An unmount that did not succeed is gone on with by itself, however often shim and host are started anew: nobody has to ask for it again.
func TestDefectH2UnmountIsResumedAfterARestart(t *testing.T) {
	for name, restart := range map[string]func(*world, *pluginTask){
		"of the shim": func(w *world, _ *pluginTask) { w.killShim() },
		"of the host": func(w *world, p *pluginTask) { w.reopened([]*pluginTask{p}) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, everything...)
			p := w.plugin("alloc-p", csifake.Monolith)
			w.must(w.create("vol"))
			path := w.use("alloc-1", ask{source: "vol"})
			p.On("NodeUnpublishVolume").Code(codes.Internal, "target is busy")
			if err := w.releasedInVain("alloc-1", "target is busy"); err == nil {
				t.Fatal("released, and the unmount failed")
			}
			first := w.sent("NodeUnpublishVolume")[0]
			restart(w, p)
			w.eventually("the next shim tries", func() bool {
				tries := w.sent("NodeUnpublishVolume")
				return tries[len(tries)-1].Peer != first.Peer
			})
			p.ClearScript()
			w.forgotten("alloc-1")
			if _, mounted := w.mounted(path); mounted {
				t.Error("left mounted")
			}
			w.oneRequest("NodeUnpublishVolume", 3)
			w.must(w.delete("vol"))
			w.exit(p)
		})
	}
}

// On the way down a claim stays what it was, and each step is repeated as it was first sent, by whichever shim.
func TestDefectH3RetriesKnowAllOfTheClaim(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	w.use("alloc-1", ask{source: "vol", mode: manyWriters, more: "read_only = true\n" + flags("noatime")})
	was := w.claims()["alloc-1"]
	if was.Usage.Access != manyWriters || was.Usage.Attachment != "file-system" || !was.Usage.ReadOnly || was.Node != "node-1" {
		t.Errorf("the claim is %+v", was)
	}
	down := []string{"NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume"}
	var gates []*csifake.Gate
	for _, rpc := range down {
		gates = append(gates, p.On(rpc).Times(1).Hold())
	}
	released := goes(func() error { return w.release("alloc-1") })
	for i, gate := range gates {
		w.arrives(gate, released)
		w.killShim()
		if now := w.claims()["alloc-1"]; now != was {
			t.Errorf("during %s the claim is %+v, and was %+v", down[i], now, was)
		}
		gate.Open()
	}
	w.must(w.ends("release", released))
	for _, rpc := range down {
		for _, c := range w.oneRequest(rpc, 2) {
			if c.Node != "node-1" {
				t.Errorf("%s is for node %q", rpc, c.Node)
			}
		}
	}
	w.must(w.delete("vol"))
	w.exit(p)
}

// Whatever an alloc waits for, to stop it ends the wait; who cannot have a volume is told at once, and by whom it is held.
func TestDefectH4WaitsAreToldAndEndWithTheAlloc(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	for _, id := range []string{"held", "hangs", "orphan"} {
		w.must(w.create(id))
	}
	w.use("alloc-h", ask{source: "held"})
	w.conflicts(second(w.prepared(w.ctx(), w.asking("alloc-1", ask{source: "held"}))), "alloc-h", "node-1", "since")

	gate := p.On("NodeStageVolume").Times(1).Hold()
	hangs := w.asking("alloc-2", ask{source: "hangs", mode: manyWriters})
	first := goes(func() error { return second(w.prepared(w.ctx(), hangs)) })
	w.arrives(gate, first)
	waits := w.asking("alloc-3", ask{source: "hangs", mode: manyWriters})
	queued := goes(func() error { return second(w.prepared(w.ctx(), waits)) })
	w.eventually("alloc-2 says for which call it waits", func() bool { return strings.Contains(w.waits("alloc-2"), "NodeStageVolume") })
	w.eventually("alloc-3 says for whom it waits", func() bool { return strings.Contains(w.waits("alloc-3"), "alloc-2") })
	stopped := goes(func() error { return w.release("alloc-3") })
	w.conflicts(w.ends("the wait for another alloc", queued), "released")
	stoppedToo := goes(func() error { return w.release("alloc-2") })
	w.conflicts(w.ends("the wait for a call", first), "released")
	gate.Open()
	w.must(w.ends("release", stopped))
	w.must(w.ends("release", stoppedToo))

	w.died(p)
	g := w.asking("alloc-4", ask{source: "orphan"})
	lonely := goes(func() error { return second(w.prepared(w.ctx(), g)) })
	w.eventually("alloc-4 says for which plugin it waits", func() bool { return strings.Contains(w.waits("alloc-4"), "plugin fake") })
	w.must(w.release("alloc-4"))
	w.conflicts(w.ends("the wait for a plugin", lonely), "released")

	p = w.startPlugin("alloc-p", csifake.Monolith, 2)
	w.must(w.release("alloc-1"))
	w.must(w.release("alloc-h"))
	for _, id := range []string{"held", "hangs", "orphan"} {
		w.must(w.delete(id))
	}
	w.exit(p)
}

// Of an alloc with two volumes the first is on record before it is touched: when shim and host end in the middle of the second, and the
// alloc is never heard of again, both are taken down.
func TestDefectH5EachVolumeIsOnRecordBeforeItIsTouched(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol-1"))
	w.must(w.create("vol-2"))
	gate := p.On("NodeStageVolume").Volume(string(csifake.VolumeID("vol-2"))).After().Times(1).Hold()
	g := w.asking("alloc-1", ask{name: "one", source: "vol-1"}, ask{name: "two", source: "vol-2"})
	ctx, leave := context.WithCancel(w.ctx())
	defer leave()
	prepared := goes(func() error { return second(w.prepared(ctx, g)) })
	w.arrives(gate, prepared)
	published := w.sent("NodePublishVolume")
	if len(published) != 1 {
		t.Fatalf("published: %q", told(published))
	}
	w.killShim()
	leave()
	if err := w.ends("prepare", prepared); err == nil {
		t.Error("prepare succeeds, and nothing but one volume was published")
	}
	gate.Open()
	w.reopened([]*pluginTask{p})
	w.forgotten("alloc-1")
	for _, c := range append(published, w.sent("NodeStageVolume")...) {
		if _, mounted := w.mounted(orElse(c.Target, c.Staging)); mounted {
			t.Errorf("%s of %s is left", c.RPC, c.Volume)
		}
	}
	w.must(w.delete("vol-1"))
	w.must(w.delete("vol-2"))
	w.exit(p)
}

// An alloc that runs goes on running when host and shim come back and its plugin does not: its volume stays, and is given back when there
// is a plugin again.
func TestDefectH6AnAllocOutlivesItsPluginsAbsence(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	g := w.asking("alloc-1", ask{source: "vol"})
	at, err := w.prepared(w.ctx(), g)
	w.must(err)
	w.died(p)
	w.reopened(nil, g)
	w.write(at["DATA"], "f", "x")
	list, _, err := w.host.Allocs(w.ctx(), "alloc-1")
	w.must(err)
	if len(list) != 1 || list[0].State != "ready" || len(list[0].Waiting) > 0 {
		t.Errorf("the alloc is %+v", list)
	}
	before := len(w.sent())
	p = w.plugin("alloc-q", csifake.Monolith)
	w.reads(at["DATA"], "f", "x")
	w.mustHaveSent(before)
	w.must(w.release("alloc-1"))
	w.mustHaveSent(before, unpublishOK, unstageOK, detachOK)
	w.must(w.delete("vol"))
	w.exit(p)
}

// For a volume that an alloc never got nothing is taken back; what it got before is.
func TestDefectH7WhatWasNeverClaimedIsNotTakenBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	g := w.asking("alloc-1", ask{name: "one", source: "vol"}, ask{name: "two", source: "zero"})
	if _, err := w.prepared(w.ctx(), g); !errors.Is(err, host.ErrNotFound) {
		t.Errorf("prepare: %v", err)
	}
	w.must(w.release("alloc-1"))
	w.mustHaveSent(1, attachOK, stageOK, publishOK,
		unpublishOK, unstageOK, detachOK)
	before := len(w.sent())
	if _, err := w.prepared(w.ctx(), w.asking("alloc-2", ask{source: "zero"})); !errors.Is(err, host.ErrNotFound) {
		t.Errorf("prepare: %v", err)
	}
	w.must(w.release("alloc-2"))
	w.mustHaveSent(before)
	w.must(w.delete("vol"))
	w.exit(p)
}

// One alloc may ask for one volume under two names: it gets it at two places, each of which goes with its own unmount.
func TestDefectH8OneVolumeTwiceInAnAlloc(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	same := ask{name: "one", source: "vol", mode: manyWriters}
	other := same
	other.name = "two"
	at, err := w.prepared(w.ctx(), w.asking("alloc-1", same, other))
	w.must(err)
	if at["ONE"] == at["TWO"] || filepath.Dir(at["ONE"]) == filepath.Dir(at["TWO"]) {
		t.Errorf("both are at %s", at)
	}
	w.write(at["ONE"], "f", "x")
	w.reads(at["TWO"], "f", "x")
	w.must(w.release("alloc-1"))
	w.mustHaveSent(1, attachOK, stageOK, publishOK, publishOK,
		unpublishOK, unpublishOK, unstageOK, detachOK)
	w.must(w.delete("vol"))
	w.exit(p)
}

// Who has no time at all gets an error and nothing else, whatever was asked for.
func TestDefectH9NoTimeIsAnError(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	w.use("alloc-1", ask{source: "vol", mode: manyWriters})
	before := len(w.sent())
	g := w.asking("alloc-2", ask{source: "vol", mode: manyWriters})
	past, end := context.WithDeadline(w.ctx(), time.Now())
	defer end()
	gone, leave := context.WithCancel(w.ctx())
	leave()
	for why, ctx := range map[error]context.Context{context.DeadlineExceeded: past, context.Canceled: gone} {
		if at, err := w.prepared(ctx, g); !errors.Is(err, why) || at != nil {
			t.Errorf("prepare: %v, %v", at, err)
		}
		if err := w.host.ReleaseAlloc(ctx, "alloc-1"); !errors.Is(err, why) {
			t.Errorf("release: %v", err)
		}
		if err := w.createWith(ctx, "other", ""); !errors.Is(err, why) {
			t.Errorf("create: %v", err)
		}
		if err := w.host.DeleteVolume(ctx, volumeName("vol")); !errors.Is(err, why) {
			t.Errorf("delete: %v", err)
		}
	}
	w.mustHaveSent(before)
	if held := w.claims(); len(held) != 1 || held["alloc-1"].Alloc != "alloc-1" {
		t.Errorf("claims: %v", held)
	}
	w.must(w.release("alloc-1"))
	w.must(w.delete("vol"))
	w.exit(p)
}
