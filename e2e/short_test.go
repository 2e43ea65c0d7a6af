package e2e

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

// TestShortCallsEndAtTheirShim: of two calls that are at the driver as their shim lets go, the one that is short ends there, once and for all; the
// long one is cut off in that moment, and made again by the next shim. A call is short for ten milliseconds, which nobody can be sure of on a busy
// machine: one that was not in time has to be made again as any other, and the next swap is another try. It runs beside no other test.
func TestShortCallsEndAtTheirShim(t *testing.T) {
	s := newBrief(t)
	for _, c := range []struct {
		rpc   string
		after int // calls of the same life for which secrets are asked before
	}{
		{"CreateVolume", 0}, {"NodeStageVolume", 2}, {"NodePublishVolume", 3}, {"DeleteVolume", 5},
	} {
		tries := 1
		for ; !s.endsAtItsShim(c.rpc, c.after); tries++ {
			if tries == mostTries {
				t.Fatalf("%s has never ended at its shim, in %d swaps", c.rpc, tries)
			}
		}
		t.Logf("%s has ended at its shim in swap %d", c.rpc, tries)
	}
	for _, problem := range twoMasters(s.sent(), s.pids) {
		t.Error(problem)
	}
	s.exit(s.plugin)
}

const mostTries = 20

// brief is a succession in which calls begin just as their shim is about to let go.
type brief struct {
	*succession
	plugin  *pluginTask
	quiesce *halt
	asks    chan *question // what becomes of the next questions for a secret
	lives   int
}

// question is one for a secret, which is answered once it may be.
type question struct{ asked, may chan struct{} }

func newBrief(t *testing.T) *brief {
	t.Helper()
	w := placed(t, everything...)
	s := &brief{asks: make(chan *question, 10)}
	w.config.SwapBudget, w.config.Bake, w.config.Secret = patience, time.Millisecond, s.secret
	w.open()
	s.succession = w.succession()
	s.plugin = s.world.plugin("alloc-p", csifake.Monolith)
	s.quiesce = s.halt("Quiesce before")
	s.follow(s.quiesce.lines()...)
	s.swap()
	return s
}

func (s *brief) secret(context.Context, string) (string, error) {
	select {
	case q := <-s.asks:
		close(q.asked)
		<-q.may
	default: // nobody minds
	}
	return "secret", nil
}

// endsAtItsShim has a swap come while a long call is at the driver, and a short one begin in its midst, which is answered in the moment in which the
// long one is cut off. It says whether the short one was let end.
func (s *brief) endsAtItsShim(rpc string, after int) bool {
	s.t.Helper()
	s.lives++
	slow, quick := fmt.Sprint("long-", s.lives), fmt.Sprint("short-", s.lives)
	s.must(s.quiesce.shuts())
	long, cut := s.takesLong(slow)
	s.answers(rpc, cut)
	held := s.holds(after)
	user := s.asking("alloc-"+quick, ask{source: quick})
	short := goes(func() error { return s.secretLife(quick, user) })
	s.eventually("the short call is about to be made", func() bool { return closed(held.asked) })
	s.swapWhile(func() {
		s.eventually("the shim is about to be quiesced", func() bool { return exists(s.quiesce.reached) })
		close(held.may)
	})
	s.must(s.ends("the long call", long))
	s.must(s.ends("the life with a short call", short))
	s.must(s.delete(slow))
	if !s.madeAgain("CreateVolume", slow) {
		s.t.Error("the long call was waited for")
	}
	return !s.madeAgain(rpc, quick)
}

// takesLong has a volume made by a call that takes until it is cut off.
func (s *brief) takesLong(volume string) (done <-chan error, cut chan struct{}) {
	s.t.Helper()
	arrived, cut := make(chan struct{}), make(chan struct{})
	s.plugin.On("CreateVolume").Times(1).Answer(func(ctx context.Context, _, reply proto.Message, err error) (proto.Message, error) {
		close(arrived)
		<-ctx.Done()
		close(cut)
		return reply, err
	})
	done = goes(func() error { return s.create(volume) })
	s.eventually("the long call is at the driver", func() bool { return closed(arrived) })
	return done, cut
}

// answers has the next such call let the swap go on, and be answered once the long one is cut off.
func (s *brief) answers(rpc string, cut <-chan struct{}) {
	s.plugin.On(rpc).Times(1).Answer(func(ctx context.Context, _, reply proto.Message, err error) (proto.Message, error) {
		if err := s.quiesce.opens(); err != nil {
			s.t.Error(err)
		}
		select {
		case <-cut:
		case <-ctx.Done():
		}
		return reply, err
	})
}

// holds is the next question for a secret but so many, which has to be answered for a call to be made.
func (s *brief) holds(after int) *question {
	for range after {
		s.asks <- answered()
	}
	q := &question{make(chan struct{}), make(chan struct{})}
	s.asks <- q
	return q
}

// answered is a question that is answered at once.
func answered() *question {
	q := &question{make(chan struct{}), make(chan struct{})}
	close(q.may)
	return q
}

// secretLife is the life of a volume whose calls have secrets.
func (s *brief) secretLife(volume string, g host.AllocGroup) error {
	if err := s.createWith(s.ctx(), volume, "secrets {\n password = { env = \"PASSWORD\" }\n}\n"); err != nil {
		return err
	}
	if _, err := s.prepared(s.ctx(), g); err != nil {
		return err
	}
	if err := s.host.ReleaseAlloc(s.ctx(), g.Alloc); err != nil {
		return err
	}
	return s.delete(volume)
}

// madeAgain says whether the call, which began at the last shim but one, was cut off there and made again by the last one. Else it has ended where it
// began.
func (s *brief) madeAgain(rpc, volume string) bool {
	s.t.Helper()
	calls := slices.DeleteFunc(s.sent(rpc), func(c journal.Call) bool { return subjectOf(c) != csifake.VolumeID(volume) })
	old, fresh := s.pids[len(s.pids)-2], s.pids[len(s.pids)-1]
	first, last := calls[0], calls[len(calls)-1]
	again := len(calls) > 1
	switch {
	case first.Peer != old:
		s.t.Errorf("%s of %s was first made by process %d, not %d", rpc, volume, first.Peer, old)
	case last.End == nil || last.End.Code != "OK" || last.Abandoned:
		s.t.Errorf("%s of %s has had no answer: %+v", rpc, volume, last)
	case again && (last.Peer != fresh || last.Hash != first.Hash):
		s.t.Errorf("%s of %s was made again by process %d, not %d, or with other fields: %+v after %+v", rpc, volume, last.Peer, fresh, last, first)
	}
	return again
}
