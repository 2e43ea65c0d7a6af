package e2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/proto"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

// One shim at a time writes the state and calls plugins, while calls go on and shims are replaced and killed: who holds the lock of shim.db, which
// process the plugin is called by, and the generation in the file all follow one another, and none comes back.
func TestOneWriter(t *testing.T) {
	t.Parallel()
	tr, stop := newTraffic(newSuccession(t))
	locked := tr.watchLock()
	tr.users(3)
	for _, follows := range []func(){func() { tr.swap() }, tr.kill, func() { tr.swap() }, tr.kill, func() { tr.swap() }} {
		tr.flows("CreateVolume", "PrepareAlloc", "ReleaseAlloc")
		follows()
	}
	tr.flows("CreateVolume", "PrepareAlloc", "ReleaseAlloc")
	stop()
	if held := locked(); !slices.Equal(held, tr.pids) {
		t.Errorf("the state was locked by %v; those that served are %v", held, tr.pids)
	}
	tr.exit(tr.plugin)
	for _, problem := range twoMasters(tr.sent(), tr.pids) {
		t.Error(problem)
	}
	generation := uint64(0)
	for _, e := range tr.history(func(e host.Event) bool { return e.Kind == "task deregistered" }) {
		if uint64(e.Generation) < generation {
			t.Errorf("generation %d has written after %d: %s", e.Generation, generation, e)
		}
		generation = uint64(e.Generation)
	}
	if generation < uint64(len(tr.pids)) {
		t.Errorf("%d shims have served, and the last generation is %d", len(tr.pids), generation)
	}
}

// watchLock looks all the time who holds the lock of shim.db. held ends that and says who did, in their order.
func (s *succession) watchLock() (held func() []int) {
	s.t.Helper()
	db := filepath.Join(s.config.StateDir, "shim.db")
	var st unix.Stat_t
	s.must(unix.Stat(db, &st))
	ctx, cancel := context.WithCancel(s.t.Context())
	var watching sync.WaitGroup
	var holders []int
	watching.Go(func() {
		for pause(ctx, time.Millisecond) {
			now := holdersOf(&st)
			if len(now) > 1 {
				s.t.Errorf("%s is locked by %v at once", db, now)
			}
			if n := len(holders); len(now) == 1 && (n == 0 || holders[n-1] != now[0]) {
				holders = append(holders, now[0])
			}
		}
	})
	return func() []int { cancel(); watching.Wait(); return holders }
}

// holdersOf are the processes that have a lock on the file.
func holdersOf(file *unix.Stat_t) (pids []int) {
	text, _ := os.ReadFile("/proc/locks")
	name := fmt.Sprintf("%02x:%02x:%d", unix.Major(file.Dev), unix.Minor(file.Dev), file.Ino)
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line) // 1: FLOCK ADVISORY WRITE 123 08:01:4567 0 EOF; those who wait have an arrow
		if len(fields) < 6 || fields[1] == "->" || fields[5] != name {
			continue
		}
		pid, err := strconv.Atoi(fields[4])
		if err == nil && !slices.Contains(pids, pid) { // the kernel goes on where others' locks come and go, and may tell one twice
			pids = append(pids, pid)
		}
	}
	return pids
}

// twoMasters says where, in a journal, a shim has called a plugin although the next one had begun to, and where calls of two shims for one
// volume were under way at once that are not the same call, made again.
func twoMasters(calls []journal.Call, shims []int) (problems []string) {
	calls = slices.SortedFunc(slices.Values(calls), func(x, y journal.Call) int { return cmp.Compare(x.Mono, y.Mono) })
	newest := 0
	for i, c := range calls {
		at := slices.Index(shims, c.Peer)
		if at < newest {
			problems = append(problems, fmt.Sprintf("%s of %s came from process %d, number %d of %v, after one of number %d", c.RPC, subjectOf(c), c.Peer, at, shims, newest))
		}
		newest = max(newest, at)
		for _, was := range calls[:i] {
			over := was.End != nil && was.End.Mono < c.Mono
			same := was.RPC == c.RPC && was.Hash == c.Hash
			if was.Peer != c.Peer && subjectOf(was) == subjectOf(c) && !over && !same {
				problems = append(problems, fmt.Sprintf("%s of %s by process %d began while %s by process %d was under way", c.RPC, subjectOf(c), c.Peer, was.RPC, was.Peer))
			}
		}
	}
	return problems
}

// TestOneWriterIsJudged: what judges the journal finds two shims that overlap, and one that comes back.
func TestOneWriterIsJudged(t *testing.T) {
	call := func(rpc string, peer int, begin, end int64) journal.Call {
		return journal.Call{Line: journal.Line{RPC: rpc, Volume: "v", Peer: peer, Mono: begin, Hash: rpc}, End: &journal.Line{Mono: end}}
	}
	for name, c := range map[string]struct {
		calls []journal.Call
		sound bool
	}{
		"one after the other":         {[]journal.Call{call("NodeStageVolume", 7, 1, 2), call("NodePublishVolume", 3, 3, 4)}, true},
		"the same call again":         {[]journal.Call{call("NodeStageVolume", 7, 1, 5), call("NodeStageVolume", 3, 3, 4)}, true},
		"another call meanwhile":      {[]journal.Call{call("NodeStageVolume", 7, 1, 5), call("NodePublishVolume", 3, 3, 4)}, false},
		"the old one after the new":   {[]journal.Call{call("NodeStageVolume", 3, 1, 2), call("NodePublishVolume", 7, 3, 4)}, false},
		"a process that never served": {[]journal.Call{call("NodeStageVolume", 9, 1, 2)}, false},
	} {
		if problems := twoMasters(c.calls, []int{7, 3}); (len(problems) == 0) != c.sound {
			t.Errorf("%s: %q", name, problems)
		}
	}
}

// An old shim that is frozen as it is to be replaced, with a call at the driver, is killed before the new one takes over: there is nothing left to
// thaw, and the call is made again, word for word.
func TestThawedShimIsDead(t *testing.T) {
	t.Parallel()
	w := placed(t, everything...)
	w.config.SwapBudget = 200 * time.Millisecond // to be over soon: that it is, is the point
	w.open()
	s := w.succession()
	old := s.pids[0]
	p := s.plugin("alloc-p", csifake.Monolith)
	gate := p.On("NodeStageVolume").Times(1).Hold()
	done := goes(s.story)
	s.arrives(gate, done)
	frozen := make(chan struct{})
	var once sync.Once
	p.On("Probe").Answer(func(ctx context.Context, _, reply proto.Message, err error) (proto.Message, error) {
		if from, known := peer.FromContext(ctx); known && !strings.HasSuffix(from.Addr.String(), fmt.Sprintf("process %d", old)) {
			once.Do(func() { // the candidate asks: the state was copied, and nothing is handed over yet
				s.must(unix.Kill(old, unix.SIGSTOP))
				close(frozen)
			})
		}
		return reply, err
	})
	s.swap()
	<-frozen
	if err := unix.Kill(old, unix.SIGCONT); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the old shim can be thawed: %v", err)
	}
	gate.Open()
	s.must(s.ends("the story", done))
	s.oneRequest("NodeStageVolume", 2)
	for _, problem := range twoMasters(s.sent(), s.pids) {
		t.Error(problem)
	}
	s.exit(p)
}
