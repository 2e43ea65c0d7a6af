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

	"google.golang.org/grpc/codes"

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
