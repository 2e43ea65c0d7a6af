package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/registry"
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
	waiter, last := prepare(ctx, "alloc-2"), prepare(w.ctx(), "alloc-3")
	for _, id := range []string{"alloc-2", "alloc-3"} {
		w.eventually(id+" waits", func() bool { return w.waits(id) != "" })
	}
	leave()
	for name, done := range map[string]<-chan error{"the holder": holder, "the waiter": waiter} {
		if err := w.ends(name, done); !errors.Is(err, context.Canceled) {
			t.Errorf("%s left, and is told: %v", name, err)
		}
	}
	if used := w.busy(2 * time.Second); used > 0.5 {
		t.Errorf("a shim in which one waits uses %.0f%% of a processor", 100*used)
	}
	if n := len(w.sent("NodeStageVolume")); n > 20 {
		t.Errorf("the call that is open was sent %d times within two seconds", n)
	}
	gate.Open()
	w.must(w.ends("the last one", last))
	for _, id := range []string{"alloc-1", "alloc-2", "alloc-3"} {
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

// That something is mounted where a volume belongs proves nothing: what nobody has recorded is neither used nor touched, and what is
// recorded and was taken away is made again.
func TestDefectV7NoMountIsTrustedForBeingThere(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	layout := hooks.Layout{Run: w.config.RunDir, State: w.config.StateDir}
	root := registry.Tree{Host: layout.PluginRoot("fake")}
	key := registry.VolumeKey{Plugin: "fake", External: registry.ExternalID(csifake.VolumeID("vol"))}
	staging := layout.Staging(key, root).Host
	target := layout.Target(registry.ClaimKey{Volume: key, Alloc: "alloc-1", Request: "data"}, root).Host
	g := w.asking("alloc-1", ask{source: "vol"})
	for _, path := range []string{staging, target} {
		before := len(w.sent("NodeStageVolume", "NodePublishVolume"))
		w.plants(path)
		w.conflicts(second(w.prepared(w.ctx(), g)), path)
		for _, c := range w.sent("NodeStageVolume", "NodePublishVolume")[before:] {
			if c.RPC == "NodePublishVolume" || path == staging {
				t.Errorf("%s was sent onto what is mounted at %s", c.RPC, path)
			}
		}
		w.must(w.release("alloc-1"))
		w.reads(path, "whose", "somebody's")
		w.uproots(path)
	}
	at, err := w.prepared(w.ctx(), g)
	w.must(err)
	if at["DATA"] != target {
		t.Fatalf("the volume is at %s, not %s: the test proves nothing", at["DATA"], target)
	}
	w.write(target, "f", "x")
	w.must(errors.Join(unix.Unmount(target, 0), unix.Unmount(staging, 0)))
	before := len(w.sent())
	w.must(second(w.prepared(w.ctx(), g)))
	w.mustHaveSent(before, stageOK, publishOK)
	w.reads(target, "f", "x")
	w.must(w.release("alloc-1"))
	w.must(w.delete("vol"))
	w.exit(p)
}

// plants mounts something at a path; uproots takes it away.
func (w *world) plants(path string) {
	w.t.Helper()
	w.must(errors.Join(os.MkdirAll(path, 0o700), unix.Mount("somebody", path, "tmpfs", 0, "size=64k")))
	w.write(path, "whose", "somebody's")
}

func (w *world) uproots(path string) {
	w.t.Helper()
	w.must(errors.Join(unix.Unmount(path, unix.UMOUNT_NOFOLLOW), os.Remove(path)))
	_ = os.Remove(filepath.Dir(path)) // of a target; the parent of staging paths holds others, or stays
}

// An answer to an unmount that is no success is none, though the path is free; nor is an OK while something is mounted. Nothing that comes
// after it is sent before it has succeeded.
func TestDefectV9AFailedUnmountIsNoSuccess(t *testing.T) {
	for name, c := range map[string]struct {
		fails func(*pluginTask)
		told  []string
	}{
		"it failed and the path is free": {
			func(p *pluginTask) { p.On("NodeUnpublishVolume").Times(4).After().Code(codes.Internal, "no") },
			[]string{"NodeUnpublishVolume INTERNAL", "NodeUnpublishVolume INTERNAL", "NodeUnpublishVolume INTERNAL", "NodeUnpublishVolume INTERNAL"},
		},
		"it failed and the mount is there": {
			func(p *pluginTask) { p.On("NodeUnpublishVolume").Times(2).Code(codes.Unknown, "no") },
			[]string{"NodeUnpublishVolume UNKNOWN", "NodeUnpublishVolume UNKNOWN"},
		},
		"the plugin does not know it and the mount is there": {
			func(p *pluginTask) { p.On("NodeUnpublishVolume").Times(2).Code(codes.NotFound, "no") },
			[]string{"NodeUnpublishVolume NOT_FOUND", "NodeUnpublishVolume NOT_FOUND"},
		},
		"it succeeded and the mount is there": {
			func(p *pluginTask) {
				lie := func(context.Context, proto.Message, proto.Message, error) (proto.Message, error) {
					return &csi.NodeUnpublishVolumeResponse{}, nil
				}
				_ = p.Script(csifake.Rule{RPC: "NodeUnpublishVolume", Times: 2, Code: "INTERNAL", Answer: lie})
			},
			[]string{unpublishOK, unpublishOK},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, everything...)
			p := w.plugin("alloc-p", csifake.Monolith)
			w.must(w.create("vol"))
			w.use("alloc-1", ask{source: "vol"})
			c.fails(p)
			w.must(w.release("alloc-1"))
			w.mustHaveSent(4, append(c.told, unpublishOK, unstageOK, detachOK)...)
			w.must(w.delete("vol"))
			w.exit(p)
		})
	}
}

// Volumes of one id in two namespaces have nothing in common; and what is one volume at its plugin has one name.
func TestDefectV11NamespacesDoNotCollide(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	paths := map[string]string{}
	for _, ns := range []string{"red", "blue"} {
		w.must(w.createIn(ns, "vol"))
		g := w.asking("alloc-"+ns, ask{source: "vol"})
		g.Namespace = registry.Namespace(ns)
		at, err := w.prepared(w.ctx(), g)
		w.must(err)
		paths[ns] = at["DATA"]
		w.write(paths[ns], "whose", ns)
	}
	w.reads(paths["red"], "whose", "red")
	if err := w.register("alias", "red-vol"); !errors.Is(err, host.ErrExists) || !strings.Contains(err.Error(), "red/vol") {
		t.Errorf("one volume got a second name: %v", err)
	}
	w.must(w.release("alloc-red"))
	w.reads(paths["blue"], "whose", "blue")
	staged := w.sent("NodeStageVolume")
	if len(staged) != 2 || staged[0].Staging == staged[1].Staging || staged[0].Volume == staged[1].Volume {
		t.Errorf("staged: %+v", staged)
	}
	w.must(w.release("alloc-blue"))
	for _, ns := range []string{"red", "blue"} {
		w.must(w.host.DeleteVolume(w.ctx(), host.VolumeName{Namespace: registry.Namespace(ns), ID: "vol"}))
	}
	w.exit(p)
}

// register asks for one more name for a volume that the plugin has made.
func (w *world) register(id, made string) error {
	text := fmt.Sprintf(`
id = %q
type = "csi"
plugin_id = "fake"
external_id = %q
context = { "csifake/name" = %q, pool = "p" }
capability {
  access_mode = "single-node-writer"
  attachment_mode = "file-system"
}
`, id, csifake.VolumeID(made), made)
	spec, _, err := w.host.ParseVolume(w.ctx(), host.Source{Name: "v.hcl", Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		return err
	}
	return second(w.host.RegisterVolume(w.ctx(), spec))
}

// createIn makes a volume in a namespace.
func (w *world) createIn(ns, id string) error {
	text := fmt.Sprintf(`
id = %q
namespace = %q
name = "%s-%s"
type = "csi"
plugin_id = "fake"
capability {
  access_mode = "single-node-writer"
  attachment_mode = "file-system"
}
`, id, ns, ns, id)
	spec, _, err := w.host.ParseVolume(w.ctx(), host.Source{Name: "v.hcl", Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		return err
	}
	return second(w.host.CreateVolume(w.ctx(), spec))
}
