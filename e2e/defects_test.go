package e2e

import (
	"context"
	"errors"
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

// Retries and undo depend on the code of an answer, never on its text. The code reaches the caller and the status.
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
	list, _, err := e.host.Allocs(e.ctx(), host.AllocQuery{ID: "alloc-1"})
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
