package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/host"
	"holdfast/internal/csifake"
)

// The tests of this file and of its two neighbours are named after the table in docs/defects.md.

// limitOf is how long one try of the call may take, as docs/retries.md promises.
func (w *world) limitOf(rpc string) time.Duration {
	w.t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "docs", "retries.md"))
	w.must(err)
	_, section, _ := strings.Cut(string(text), "\n## "+rpc+"\n")
	found := regexp.MustCompile(`One try takes (\S+) at most`).FindStringSubmatch(section)
	if found == nil {
		w.t.Fatalf("docs/retries.md does not say how long one try of %s takes", rpc)
	}
	d, err := time.ParseDuration(found[1])
	w.must(err)
	return d
}

// life is a volume's whole life, with one alloc that uses it.
func (w *world) life(ctx context.Context, volume string, g host.AllocGroup) error {
	if err := w.createWith(ctx, volume, ""); err != nil {
		return err
	}
	if _, err := w.prepared(ctx, g); err != nil {
		return err
	}
	if err := w.host.ReleaseAlloc(ctx, g.Alloc); err != nil {
		return err
	}
	return w.host.DeleteVolume(ctx, volumeName(volume))
}

// lifeWithoutHurry is asked for by somebody who sets no deadline.
func (w *world) lifeWithoutHurry(volume string) error {
	w.t.Helper()
	return w.life(context.WithoutCancel(w.t.Context()), volume, w.asking("alloc-"+volume, ask{source: volume}))
}

// A call that fails in passing is sent again, and each try has an end of its own, though nobody who asked has set one.
func TestDefectG1RetriesAreReal(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	for _, rpc := range everyCall {
		times := 1
		if strings.HasPrefix(rpc, "Node") {
			times = 2
		}
		p.On(rpc).Times(times).After().Code(codes.Unavailable, "not now")
	}
	calls := listen(p, everyCall...)
	w.must(w.lifeWithoutHurry("vol"))
	for _, rpc := range everyCall {
		least := 2
		if strings.HasPrefix(rpc, "Node") {
			least = 3
		}
		w.oneRequest(rpc, least)
		limit := w.limitOf(rpc)
		for _, c := range calls.of(rpc) {
			if c.left <= 0 || c.left > limit {
				t.Errorf("a try of %s ends in %v; its limit is %v", rpc, c.left, limit)
			}
		}
		if len(calls.of(rpc)) == 0 {
			t.Errorf("no call of %s was heard", rpc)
		}
	}
	w.exit(p)
}

// The codes that mean "later" are no failures of any call: whoever asked hears nothing of them.
func TestDefectG2PendingIsTriedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	later := map[string]codes.Code{"a": codes.Aborted, "u": codes.Unavailable, "d": codes.DeadlineExceeded, "r": codes.ResourceExhausted}
	var mu sync.Mutex // guards later, in the answers
	p.On("CreateVolume").Answer(func(_ context.Context, req, reply proto.Message, err error) (proto.Message, error) {
		mu.Lock()
		defer mu.Unlock()
		name := req.(*csi.CreateVolumeRequest).GetName()
		if code, first := later[name]; first { // it has no id yet, by which a rule could tell it
			delete(later, name)
			return nil, status.Error(code, "operation pending")
		}
		return reply, err
	})
	var groups []host.AllocGroup
	for name, code := range maps.Clone(later) {
		for i, rpc := range everyCall[1:] {
			at := p.On(rpc).Volume(string(csifake.VolumeID(name))).Times(1)
			if i%2 == 1 {
				at = at.After()
			}
			at.Code(code, "operation pending")
		}
		groups = append(groups, w.asking(name, ask{source: name}))
	}
	var lives []<-chan error
	for _, g := range groups {
		lives = append(lives, goes(func() error { return w.life(w.ctx(), string(g.Alloc), g) }))
	}
	for _, done := range lives {
		w.must(w.ends("a volume's life", done))
	}
	tries := map[string]map[string]int{} // by RPC and request
	for _, c := range w.sent() {
		if tries[c.RPC] == nil {
			tries[c.RPC] = map[string]int{}
		}
		tries[c.RPC][c.Hash]++
	}
	for _, rpc := range everyCall {
		if len(tries[rpc]) != len(lives) {
			t.Errorf("%s: %d different requests for %d volumes", rpc, len(tries[rpc]), len(lives))
		}
		for request, n := range tries[rpc] {
			if n != 2 {
				t.Errorf("%s %s was sent %d times, not twice", rpc, request, n)
			}
		}
	}
	w.exit(p)
}

// What is done about an answer depends on its code, whatever its text says; and the code reaches whoever asked.
func TestDefectG3TextsDecideNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.create("vol"))
	g := w.asking("alloc-1", ask{source: "vol"})

	p.On("NodeStageVolume").Times(1).Code(codes.InvalidArgument, "code = Unavailable desc = ABORTED, operation pending, retryable: try again")
	_, err := w.prepared(w.ctx(), g)
	if !errors.Is(err, host.ErrInvalid) || errors.Is(err, host.ErrUnavailable) {
		t.Errorf("an INVALID_ARGUMENT is: %v", err)
	}
	w.mustHaveSent(1, attachOK, "NodeStageVolume INVALID_ARGUMENT")
	list, _, err := w.host.Allocs(w.ctx(), "alloc-1")
	w.must(err)
	if len(list) != 1 || len(list[0].Waiting) != 1 {
		t.Fatalf("allocs: %+v", list)
	}
	if said := list[0].Waiting[0]; said.RPC != "NodeStageVolume" || said.Code != "INVALID_ARGUMENT" {
		t.Errorf("the alloc's status does not tell call and code: %+v", said)
	}

	p.On("NodeStageVolume").Times(1).Code(codes.Unavailable, "code = InvalidArgument desc = NOT_FOUND: no mount point, FailedPrecondition")
	w.must(second(w.prepared(w.ctx(), g)))
	w.mustHaveSent(3, "NodeStageVolume UNAVAILABLE", stageOK, publishOK)

	p.On("NodeUnpublishVolume").Times(1).Code(codes.Internal, "code = NotFound desc = no mount point, OK")
	w.must(w.release("alloc-1"))
	w.mustHaveSent(6, "NodeUnpublishVolume INTERNAL", unpublishOK, unstageOK, detachOK)
	w.must(w.delete("vol"))
	w.exit(p)
}

func second[T any](_ T, err error) error { return err }

// All calls of a plugin, of controller and node alike, go over the connection that was made once.
func TestDefectG4OneConnectionForAllCalls(t *testing.T) {
	t.Parallel()
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.lifeWithoutHurry("first"))
	made := w.connections()
	for i := range 3 {
		w.must(w.lifeWithoutHurry(fmt.Sprintf("vol-%d", i)))
	}
	if now := w.connections(); now != made {
		t.Errorf("after one story the plugin had seen %d connections, after four %d", made, now)
	}
	used := map[uint64]bool{}
	for _, c := range w.sent() {
		used[c.Conn] = true
	}
	if len(used) != 1 {
		t.Errorf("the calls came over %d connections", len(used))
	}
	w.exit(p)
}

// connections is the highest number of a connection by which a call came: the plugin counts all that are made.
func (w *world) connections() (most uint64) {
	w.t.Helper()
	all, err := csifake.Calls(w.journal)
	w.must(err)
	for _, c := range all {
		most = max(most, c.Conn)
	}
	return most
}

// A call that hangs is called off when nobody wants its result any more: by who asked, and by who stops the alloc.
func TestDefectG5CallsAreCalledOff(t *testing.T) {
	for name, off := range map[string]func(w *world, stop context.CancelFunc){
		"the caller leaves":    func(_ *world, stop context.CancelFunc) { stop() },
		"the alloc is stopped": func(w *world, _ context.CancelFunc) { w.must(w.release("alloc-1")) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, everything...)
			p := w.plugin("alloc-p", csifake.Monolith)
			w.must(w.create("vol"))
			p.On("NodeStageVolume").Times(1).Hang()
			ctx, stop := context.WithCancel(w.ctx())
			defer stop()
			g := w.asking("alloc-1", ask{source: "vol"})
			prepared := goes(func() error { return second(w.prepared(ctx, g)) })
			w.eventually("the call hangs", func() bool { return len(w.sent("NodeStageVolume")) == 1 })
			off(w, stop)
			if err := w.ends("prepare", prepared); err == nil {
				t.Error("prepare succeeds, and nothing was staged")
			}
			w.eventually("the call is called off", func() bool { return w.sent("NodeStageVolume")[0].Abandoned })
			w.must(w.release("alloc-1"))
			w.must(w.delete("vol"))
			w.exit(p)
		})
	}
}
