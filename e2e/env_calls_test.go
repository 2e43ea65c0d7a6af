package e2e

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
)

// The mutating CSI calls of a volume's life, in order, without and with expansion.
var (
	everyCall = []string{
		"CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume",
		"NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume",
	}
	mutatingCalls = slices.Concat(everyCall[:4], []string{"ControllerExpandVolume", "NodeExpandVolume"}, everyCall[4:])
)

// Calls that succeeded, as answers returns them.
const (
	attachOK    = "ControllerPublishVolume OK"
	stageOK     = "NodeStageVolume OK"
	publishOK   = "NodePublishVolume OK"
	unpublishOK = "NodeUnpublishVolume OK"
	unstageOK   = "NodeUnstageVolume OK"
	detachOK    = "ControllerUnpublishVolume OK"
)

// calls returns the mutating calls in the order in which plugins got them, or those of the RPCs that are named.
func (e *env) calls(only ...string) []journal.Call {
	e.t.Helper()
	all, err := csifake.Calls(e.journal, only...)
	e.must(err)
	return slices.DeleteFunc(all, func(c journal.Call) bool { return len(only) == 0 && !journal.Mutates(c.RPC) })
}

// answers returns what was called and how it was answered.
func answers(calls []journal.Call) (list []string) {
	for _, c := range calls {
		list = append(list, c.RPC+" "+codeOf(c))
	}
	return list
}

func codeOf(c journal.Call) string {
	if c.End == nil {
		return "no answer"
	}
	return c.End.Code
}

// wantCalls compares the calls after the first n.
func (e *env) wantCalls(n int, want ...string) {
	e.t.Helper()
	if got := answers(e.calls()[n:]); !slices.Equal(got, want) {
		e.t.Errorf("the plugin got %q, not %q", got, want)
	}
}

// wantOneRequest fails the test unless the RPC was sent at least so often, each time with the same fields.
func (e *env) wantOneRequest(rpc string, least int) []journal.Call {
	e.t.Helper()
	calls := e.calls(rpc)
	if len(calls) < least {
		e.t.Fatalf("%s was sent %d times, not %d at least", rpc, len(calls), least)
	}
	for _, c := range calls[1:] {
		if c.Hash != calls[0].Hash {
			e.t.Errorf("%s was sent with other fields: %+v after %+v", rpc, c.Line, calls[0].Line)
		}
	}
	return calls
}

// wantOneSuccessEach fails the test unless the plugin got n different requests of the RPC, each of which succeeded.
// Only a later shim, which does not know the answer, may repeat a request that succeeded.
func (e *env) wantOneSuccessEach(rpc string, n int) {
	e.t.Helper()
	last := map[string]journal.Call{} // by request
	calls := e.calls(rpc)
	for _, c := range calls {
		if was, repeated := last[c.Hash]; repeated && was.Peer == c.Peer && codeOf(was) == "OK" {
			e.t.Errorf("process %d repeated %s after it had succeeded: %+v", c.Peer, rpc, c.Line)
		}
		last[c.Hash] = c
	}
	for _, c := range last {
		if codeOf(c) != "OK" {
			e.t.Errorf("%s did not succeed: %+v", rpc, c)
		}
	}
	if len(last) != n {
		e.t.Errorf("%s: %d different requests, not %d; the calls are %q", rpc, len(last), n, answers(calls))
	}
}

// requestLog keeps the requests of some RPCs and their deadlines.
type requestLog struct {
	mu    sync.Mutex // guards byRPC
	byRPC map[string][]loggedRequest
}

type loggedRequest struct {
	request  proto.Message
	timeLeft time.Duration // until the call's deadline; 0: it has none
}

// logRequests logs the calls of the RPCs that no other rule acts on.
func logRequests(p *pluginTask, rpcs ...string) *requestLog {
	l := &requestLog{byRPC: map[string][]loggedRequest{}}
	for _, rpc := range rpcs {
		p.On(rpc).Answer(func(ctx context.Context, req, reply proto.Message, err error) (proto.Message, error) {
			r := loggedRequest{request: proto.Clone(req)}
			if end, has := ctx.Deadline(); has {
				r.timeLeft = time.Until(end)
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			l.byRPC[rpc] = append(l.byRPC[rpc], r)
			return reply, err
		})
	}
	return l
}

func (l *requestLog) of(rpc string) []loggedRequest {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.byRPC[rpc])
}

// volumeOf returns the volume of a call, also of one that creates it.
func volumeOf(c journal.Call) string {
	if c.RPC == "CreateVolume" {
		return csifake.VolumeID(c.Name)
	}
	return c.Volume
}

// overlapErrors finds calls of a shim after its successor's first, and calls of two shims for one volume that were
// under way at once and are not the same call.
func overlapErrors(calls []journal.Call, shims []int) (problems []string) {
	calls = slices.SortedFunc(slices.Values(calls), func(x, y journal.Call) int { return cmp.Compare(x.Mono, y.Mono) })
	newest := 0
	for i, c := range calls {
		at := slices.Index(shims, c.Peer)
		if at < newest {
			problems = append(problems, fmt.Sprintf("%s of %s came from process %d, number %d of %v, after one of "+
				"number %d", c.RPC, volumeOf(c), c.Peer, at, shims, newest))
		}
		newest = max(newest, at)
		for _, was := range calls[:i] {
			ended := was.End != nil && was.End.Mono < c.Mono
			same := was.RPC == c.RPC && was.Hash == c.Hash
			if was.Peer != c.Peer && volumeOf(was) == volumeOf(c) && !ended && !same {
				problems = append(problems, fmt.Sprintf("%s of %s by process %d began during %s by process %d",
					c.RPC, volumeOf(c), c.Peer, was.RPC, was.Peer))
			}
		}
	}
	return problems
}

// TestOverlapErrorsFindTwoWriters is a negative control of overlapErrors.
func TestOverlapErrorsFindTwoWriters(t *testing.T) {
	call := func(rpc string, peer int, begin, end int64) journal.Call {
		return journal.Call{
			Line: journal.Line{RPC: rpc, Volume: "v", Peer: peer, Mono: begin, Hash: rpc},
			End:  &journal.Line{Mono: end},
		}
	}
	for name, c := range map[string]struct {
		calls []journal.Call
		legal bool
	}{
		"one after the other": {[]journal.Call{call("NodeStageVolume", 7, 1, 2),
			call("NodePublishVolume", 3, 3, 4)}, true},
		"the same call again": {[]journal.Call{call("NodeStageVolume", 7, 1, 5),
			call("NodeStageVolume", 3, 3, 4)}, true},
		"another call meanwhile": {[]journal.Call{call("NodeStageVolume", 7, 1, 5),
			call("NodePublishVolume", 3, 3, 4)}, false},
		"the old one after the new": {[]journal.Call{call("NodeStageVolume", 3, 1, 2),
			call("NodePublishVolume", 7, 3, 4)}, false},
		"a process that never served": {[]journal.Call{call("NodeStageVolume", 9, 1, 2)}, false},
	} {
		if problems := overlapErrors(c.calls, []int{7, 3}); (len(problems) == 0) != c.legal {
			t.Errorf("%s: %q", name, problems)
		}
	}
}

// eventOf is the event that reports the success of a call.
var eventOf = map[string]host.EventKind{
	"CreateVolume": registry.EventVolumeCreated, "DeleteVolume": registry.EventVolumeDeleted,
	"ControllerPublishVolume": registry.EventAttached, "ControllerUnpublishVolume": registry.EventDetached,
	"NodeStageVolume": registry.EventStaged, "NodeUnstageVolume": registry.EventUnstaged,
	"ControllerExpandVolume": registry.EventVolumeExpanded, "NodeExpandVolume": registry.EventNodeExpanded,
	"ControllerModifyVolume": registry.EventVolumeModified,
	"NodePublishVolume":      registry.EventPublished, "NodeUnpublishVolume": registry.EventUnpublished,
}

// effect is a call that a volume needs at most once.
type effect struct{ volume, rpc string }

// effectErrors compares a journal with the events, for volumes that are created, used once and deleted. Each effect
// has one event. All calls of it have the same fields. Only a later shim repeats a call that succeeded, and no shim
// does after the event.
func effectErrors(calls []journal.Call, events []host.Event) (problems []string) {
	add := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	recorded := map[effect]time.Time{}
	for _, event := range events {
		for rpc, kind := range eventOf {
			if x := (effect{csifake.VolumeID(string(event.Volume.ID)), rpc}); event.Kind == kind {
				if _, before := recorded[x]; before {
					add("a second event of %s: %s", x, event)
				}
				recorded[x] = event.At
			}
		}
	}
	tries := map[effect][]journal.Call{}
	for _, c := range calls {
		if eventOf[c.RPC] != "" {
			x := effect{volumeOf(c), c.RPC}
			tries[x] = append(tries[x], c)
		}
	}
	for x, list := range tries {
		if _, known := recorded[x]; !known {
			add("%s has no event", x)
		}
		for i, c := range list[1:] {
			switch was := list[i]; {
			case c.Hash != was.Hash:
				add("%s is repeated with other fields", x)
			case codeOf(was) == "OK" && c.Peer == was.Peer:
				add("%s is repeated by process %d, which had its answer", x, c.Peer)
			}
		}
		if last := list[len(list)-1]; last.Wall.After(recorded[x]) {
			add("%s is sent at %s, after its event at %s", x, last.Wall, recorded[x])
		}
	}
	for x := range recorded {
		if len(tries[x]) == 0 {
			add("%s has an event and no call", x)
		}
	}
	return problems
}

// TestEffectErrorsFindBlindRepetitions is a negative control of effectErrors.
func TestEffectErrorsFindBlindRepetitions(t *testing.T) {
	at := time.Now()
	call := func(after time.Duration, peer int, hash, code string) journal.Call {
		c := journal.Call{Line: journal.Line{RPC: "CreateVolume", Name: "v", Wall: at.Add(after), Peer: peer,
			Hash: hash}}
		if code != "" {
			c.End = &journal.Line{Code: code}
		}
		return c
	}
	created := []host.Event{{Seq: 1, Kind: "volume created", Volume: volumeName("v"), At: at.Add(time.Second)}}
	first := call(0, 1, "a", "OK")
	for name, c := range map[string]struct {
		calls  []journal.Call
		events []host.Event
		legal  bool
	}{
		"once":                      {[]journal.Call{first}, created, true},
		"repeated by the next shim": {[]journal.Call{first, call(1, 2, "a", "OK")}, created, true},
		"repeated after no answer": {[]journal.Call{call(0, 1, "a", ""), call(1, 1, "a", "OK")}, created,
			true},
		"repeated by the same shim":         {[]journal.Call{first, call(1, 1, "a", "OK")}, created, false},
		"repeated with other fields":        {[]journal.Call{first, call(1, 2, "b", "OK")}, created, false},
		"repeated after it was recorded":    {[]journal.Call{first, call(2*time.Second, 2, "a", "OK")}, created, false},
		"two events":                        {[]journal.Call{first}, append(created[:1:1], created[0]), false},
		"no event":                          {[]journal.Call{first}, nil, false},
		"an event of what was never called": {nil, created, false},
	} {
		if problems := effectErrors(c.calls, c.events); (len(problems) == 0) != c.legal {
			t.Errorf("%s: %q", name, problems)
		}
	}
}

// blockingContext closes waiting once a call waits for the context's end: from then on the call is under way.
type blockingContext struct {
	context.Context
	once    *sync.Once
	waiting chan struct{}
}

func (b blockingContext) Done() <-chan struct{} {
	b.once.Do(func() { close(b.waiting) })
	return b.Context.Done()
}

// logViolations logs what the journal has of the volumes of violations shortly before them.
func logViolations(t *testing.T, lines []journal.Line, violations []journal.Violation) {
	for _, v := range violations {
		t.Logf("journal: %s", v)
		if v.Line == 0 {
			continue
		}
		from := max(0, v.Line-100)
		for i, l := range lines[from:min(len(lines), v.Line+20)] {
			if l.Volume == lines[v.Line-1].Volume || l.Kind == journal.Start || l.Kind == journal.Stop {
				t.Logf("line %d %s %s %s call %d of %s by %d: %s %s, request %.8s, beside %v, effect %v, killed %v",
					from+i+1,
					l.Wall.Format("05.000"), l.Kind, l.RPC, l.Call, l.Instance, l.Peer, l.Code, l.Target, l.Hash,
					l.Beside, l.Effect, l.Killed)
			}
		}
	}
}
