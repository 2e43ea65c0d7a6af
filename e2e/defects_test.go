package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/registry"
)

// The tests of this file are named after the rows of docs/defects.md.

// A call that fails for a moment is sent again, with the same fields, over one connection. Each try has a deadline of
// its own, though the caller has none.
func TestDefectG1RetriesAreReal(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	failures := func(rpc string) int { return map[bool]int{true: 2, false: 1}[strings.HasPrefix(rpc, "Node")] }
	for _, rpc := range everyCall {
		p.On(rpc).Times(failures(rpc)).After().Code(codes.Unavailable, "not now")
	}
	log := logRequests(p, everyCall...)
	noDeadline := context.WithoutCancel(t.Context())
	e.must(e.lifeCycle(noDeadline, "vol", e.group("alloc-1", request{source: "vol"}), ""))
	connections := map[uint64]bool{}
	for _, rpc := range everyCall {
		for _, c := range e.wantOneRequest(rpc, failures(rpc)+1) {
			connections[c.Conn] = true
		}
		limit := e.tryLimit(rpc)
		for _, r := range log.of(rpc) {
			if r.timeLeft <= 0 || r.timeLeft > limit {
				t.Errorf("a try of %s has %v left; its limit is %v", rpc, r.timeLeft, limit)
			}
		}
		if len(log.of(rpc)) == 0 {
			t.Errorf("no call of %s was logged", rpc)
		}
	}
	if len(connections) != 1 {
		t.Errorf("the calls came over %d connections", len(connections))
	}
	e.stopPlugin(p)
}

// tryLimit is how long one try of the RPC may take by docs/retries.md.
func (e *env) tryLimit(rpc string) time.Duration {
	e.t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "docs", "retries.md"))
	e.must(err)
	_, section, _ := strings.Cut(string(text), "\n## "+rpc+"\n")
	found := regexp.MustCompile(`One try takes (\S+) at most`).FindStringSubmatch(section)
	if found == nil {
		e.t.Fatalf("docs/retries.md does not say how long one try of %s takes", rpc)
	}
	d, err := time.ParseDuration(found[1])
	e.must(err)
	return d
}

// What is done about an answer depends on its code, whatever its text says. The code reaches the caller and the status.
func TestDefectG3TextsDecideNothing(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.create("vol"))
	g := e.group("alloc-1", request{source: "vol"})

	p.On("NodeStageVolume").Times(1).Code(codes.InvalidArgument,
		"code = Unavailable desc = ABORTED, operation pending, retryable")
	if err := errOf(e.prepare(g)); !errors.Is(err, host.ErrInvalid) || errors.Is(err, host.ErrUnavailable) {
		t.Errorf("an INVALID_ARGUMENT is: %v", err)
	}
	e.wantCalls(1, attachOK, "NodeStageVolume INVALID_ARGUMENT")
	list, _, err := e.host.Allocs(e.ctx(), "alloc-1")
	e.must(err)
	if len(list) != 1 || len(list[0].Waiting) != 1 {
		t.Fatalf("allocs: %+v", list)
	}
	if wait := list[0].Waiting[0]; wait.RPC != "NodeStageVolume" || wait.Code != "INVALID_ARGUMENT" {
		t.Errorf("the alloc's status lacks call or code: %+v", wait)
	}

	p.On("NodeStageVolume").Times(1).Code(codes.Unavailable, "code = InvalidArgument desc = NOT_FOUND: no mount point")
	e.must(errOf(e.prepare(g)))
	e.wantCalls(3, "NodeStageVolume UNAVAILABLE", stageOK, publishOK)

	p.On("NodeUnpublishVolume").Times(1).Code(codes.Internal, "code = NotFound desc = no mount point, OK")
	e.must(e.release("alloc-1"))
	e.wantCalls(6, "NodeUnpublishVolume INTERNAL", unpublishOK, unstageOK, detachOK)
	e.must(e.delete("vol"))
	e.stopPlugin(p)
}

// A call that hangs is cancelled when its caller leaves, or when the alloc is stopped.
func TestDefectG5CallsAreCalledOff(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.create("vol"))
	for name, end := range map[string]func(leave context.CancelFunc){
		"the caller leaves":    func(leave context.CancelFunc) { leave() },
		"the alloc is stopped": func(context.CancelFunc) { e.must(e.release("alloc-1")) },
	} {
		before := len(e.calls("NodeStageVolume"))
		p.On("NodeStageVolume").Times(1).Hang()
		ctx, leave := context.WithCancel(e.ctx())
		g := e.group("alloc-1", request{source: "vol"})
		prepared := background(func() error { return errOf(e.prepareAll(ctx, g)) })
		e.waitUntil("the call hangs", func() bool { return len(e.calls("NodeStageVolume")) > before })
		end(leave)
		if err := e.result("prepare", prepared); err == nil {
			t.Errorf("%s: prepare succeeds, and nothing was staged", name)
		}
		e.waitUntil("the call is cancelled", func() bool { return e.calls("NodeStageVolume")[before].Abandoned })
		e.must(e.release("alloc-1"))
		leave()
	}
	e.must(e.delete("vol"))
	e.stopPlugin(p)
}

// giveUp makes a call for an alloc and cancels it once the alloc's status contains a text. It returns the call's error.
func (e *env) giveUp(alloc, status string, call func(context.Context) error) error {
	e.t.Helper()
	ctx, leave := context.WithCancel(e.ctx())
	defer leave()
	done := background(func() error { return call(ctx) })
	e.waitUntil(alloc+" waits for "+status, func() bool { return strings.Contains(e.waitReasons(alloc), status) })
	leave()
	return e.result("a cancelled call", done)
}

// A caller that gives up while another alloc is served gets an error: neither a mount nor an unmount that never ran is
// a success. A caller without any time gets one at once. Nothing was sent for them.
func TestDefectV3WaitingInVainIsAnError(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.create("vol"))
	shared := request{source: "vol", mode: manyWriters}
	first := e.use("alloc-1", shared)
	gate := p.On("NodePublishVolume").Times(1).Hold()
	g := e.group("alloc-2", shared)
	served := background(func() error { return errOf(e.prepare(g)) })
	e.waitHeld(gate, served)
	before := len(e.calls())

	third := e.group("alloc-3", shared)
	prepare := func(ctx context.Context) error { return errOf(e.prepareAll(ctx, third)) }
	release := func(ctx context.Context) error { return e.host.ReleaseAlloc(ctx, "alloc-1") }
	if err := e.giveUp("alloc-3", "alloc-2", prepare); !errors.Is(err, context.Canceled) {
		t.Errorf("a mount that never ran ends with: %v", err)
	}
	if err := e.giveUp("alloc-1", "alloc-2", release); !errors.Is(err, context.Canceled) {
		t.Errorf("an unmount that never ran ends with: %v", err)
	}
	if _, mounted := e.mounted(first); !mounted {
		t.Error("the first alloc's mount is gone")
	}
	e.wantCalls(before)
	gate.Open()
	e.must(e.result("prepare", served))
	for _, id := range []string{"alloc-1", "alloc-2", "alloc-3"} {
		e.must(e.release(id))
	}
	e.must(e.delete("vol"))
	e.stopPlugin(p)
}

// A caller without any time gets an error and nothing else.
func TestDefectH9NoTimeIsAnError(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.create("vol"))
	shared := request{source: "vol", mode: manyWriters}
	e.use("alloc-1", shared)
	before := len(e.calls())
	g := e.group("alloc-2", shared)
	late, end := context.WithDeadline(e.ctx(), time.Now())
	defer end()
	cancelled, cancel := context.WithCancel(e.ctx())
	cancel()
	for why, ctx := range map[error]context.Context{context.DeadlineExceeded: late, context.Canceled: cancelled} {
		for what, err := range map[string]error{
			"prepare": errOf(e.prepareAll(ctx, g)), "release": e.host.ReleaseAlloc(ctx, "alloc-1"),
			"create": e.createWith(ctx, "other", ""), "delete": e.host.DeleteVolume(ctx, volumeName("vol")),
		} {
			if !errors.Is(err, why) {
				t.Errorf("%s: %v, not %v", what, err, why)
			}
		}
	}
	e.wantCalls(before)
	e.must(e.release("alloc-1"))
	e.must(e.delete("vol"))
	e.stopPlugin(p)
}

// A caller that leaves while it is served or waits leaves the volume to the next one. Waiting costs no processor time.
func TestDefectV4NobodySpinsAndNothingStaysLocked(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.create("vol"))
	ctx, leave := context.WithCancel(e.ctx())
	defer leave()
	gate := p.On("NodeStageVolume").Times(1).Hold()
	prepare := func(ctx context.Context, id string) <-chan error {
		g := e.group(id, request{source: "vol", mode: manyWriters})
		return background(func() error { return errOf(e.prepareAll(ctx, g)) })
	}
	holder := prepare(ctx, "alloc-1")
	e.waitHeld(gate, holder)
	waiter, third, last := prepare(ctx, "alloc-2"), prepare(e.ctx(), "alloc-3"), prepare(e.ctx(), "alloc-4")
	for _, id := range []string{"alloc-2", "alloc-3", "alloc-4"} {
		e.waitUntil(id+" waits", func() bool { return e.waitReasons(id) != "" })
	}
	leave()
	for name, done := range map[string]<-chan error{"the holder": holder, "the waiter": waiter} {
		if err := e.result(name, done); !errors.Is(err, context.Canceled) {
			t.Errorf("%s left and got: %v", name, err)
		}
	}
	if used := e.cpuUse(time.Second); used > 0.1 {
		t.Errorf("a shim with a waiting call uses %.1f%% of a processor", 100*used)
	}
	if n := len(e.calls("NodeStageVolume")); n > 20 {
		t.Errorf("the open call was sent %d times within a second", n)
	}
	gate.Open()
	e.must(e.result("the third", third))
	e.must(e.result("the last", last))
	for _, id := range []string{"alloc-1", "alloc-2", "alloc-3", "alloc-4"} {
		e.must(e.release(id))
	}
	e.must(e.delete("vol"))
	e.stopPlugin(p)
}

// cpuUse returns the share of a processor that the shim uses for a while.
func (e *env) cpuUse(long time.Duration) float64 {
	e.t.Helper()
	ticks := func() int { // of a hundredth of a second: utime and stime of proc_pid_stat(5)
		text := procText(e.activeShim().PID, "stat")
		fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
		var user, system int
		_, err := fmt.Sscan(fields[11]+" "+fields[12], &user, &system)
		e.must(err)
		return user + system
	}
	used, began := ticks(), time.Now()
	<-time.After(long)
	return float64(ticks()-used) * float64(time.Second/100) / float64(time.Since(began))
}

// A mount at a volume's path proves nothing: one without a record is neither used nor touched, and a recorded one that
// is gone is made again.
func TestDefectV7NoMountIsTrustedForBeingThere(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	e.must(e.create("vol"))
	layout := hooks.Layout{Run: e.config.RunDir, State: e.config.StateDir}
	root := registry.Tree{Host: layout.PluginRoot("fake")}
	key := registry.VolumeKey{Plugin: "fake", External: registry.ExternalID(csifake.VolumeID("vol"))}
	staging := layout.Staging(key, root).Host
	target := layout.Target(registry.ClaimKey{Volume: key, Alloc: "alloc-1", Request: "data"}, root).Host
	g := e.group("alloc-1", request{source: "vol"})
	for _, path := range []string{staging, target} {
		before := len(e.calls("NodeStageVolume", "NodePublishVolume"))
		e.must(errors.Join(os.MkdirAll(path, 0o700), unix.Mount("foreign", path, "tmpfs", 0, "size=64k")))
		e.writeFile(path, "owner", "foreign")
		e.wantConflict(errOf(e.prepare(g)), path)
		for _, c := range e.calls("NodeStageVolume", "NodePublishVolume")[before:] {
			if c.RPC == "NodePublishVolume" || path == staging {
				t.Errorf("%s was sent onto the mount at %s", c.RPC, path)
			}
		}
		e.must(e.release("alloc-1"))
		e.wantFile(path, "owner", "foreign")
		e.must(errors.Join(unix.Unmount(path, unix.UMOUNT_NOFOLLOW), os.Remove(path)))
		_ = os.Remove(filepath.Dir(path)) // of a target; the parent of staging paths stays
	}
	at, err := e.prepare(g)
	e.must(err)
	if at != target {
		t.Fatalf("the volume is at %s, not %s", at, target)
	}
	e.writeFile(target, "f", "x")
	e.must(errors.Join(unix.Unmount(target, 0), unix.Unmount(staging, 0)))
	before := len(e.calls())
	e.must(errOf(e.prepare(g)))
	e.wantCalls(before, stageOK, publishOK)
	e.wantFile(target, "f", "x")
	e.must(e.release("alloc-1"))
	e.must(e.delete("vol"))
	e.stopPlugin(p)
}

// Volumes of one id in two namespaces have nothing in common, and a volume of a plugin has one name.
func TestDefectV11NamespacesDoNotCollide(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	p := e.addPlugin("alloc-p", csifake.Monolith)
	in := func(ns, name string) string {
		text := strings.Replace(volumeText("fake", "vol", ""), "name = \"vol\"", fmt.Sprintf("name = %q", name), 1)
		return text + fmt.Sprintf("namespace = %q\n", ns)
	}
	paths := map[string]string{}
	for _, ns := range []string{"red", "blue"} {
		e.must(createText(e.ctx(), e.host, in(ns, ns+"-vol")))
		g := e.group("alloc-"+ns, request{source: "vol"})
		g.Namespace = registry.Namespace(ns)
		path, err := e.prepare(g)
		e.must(err)
		paths[ns] = path
		e.writeFile(path, "namespace", ns)
	}
	e.wantFile(paths["red"], "namespace", "red")
	spec, err := parseVolume(e.ctx(), e.host, in("green", "alias"))
	e.must(err)
	spec.External, spec.Context = registry.ExternalID(csifake.VolumeID("red-vol")), map[string]string{"csifake/name": "red-vol", "pool": "p"}
	if err := errOf(e.host.RegisterVolume(e.ctx(), spec)); !errors.Is(err, host.ErrExists) ||
		!strings.Contains(err.Error(), "red/vol") {
		t.Errorf("one volume got a second name: %v", err)
	}
	e.must(e.release("alloc-red"))
	e.wantFile(paths["blue"], "namespace", "blue")
	staged := e.calls("NodeStageVolume")
	if len(staged) != 2 || staged[0].Staging == staged[1].Staging || staged[0].Volume == staged[1].Volume {
		t.Errorf("staged: %+v", staged)
	}
	e.must(e.release("alloc-blue"))
	for _, ns := range []string{"red", "blue"} {
		e.must(e.host.DeleteVolume(e.ctx(), host.VolumeName{Namespace: registry.Namespace(ns), ID: "vol"}))
	}
	e.stopPlugin(p)
}
