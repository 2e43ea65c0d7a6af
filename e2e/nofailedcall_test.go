package e2e

import (
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake/journal"
)

// Calls of every method of a host, made all the time by many callers, end as they would with one shim for ever, while shims are replaced, and
// while they are killed: what is asked for is done, once, and what is to be refused is refused. Streams go on.
func TestNoFailedCall(t *testing.T) {
	for name, c := range map[string]struct {
		follows func(*traffic)
		times   int
		without []string // methods that are not called
	}{
		"swapped": {func(tr *traffic) { tr.swap(); tr.count("Swap") }, 5, nil},
		"killed":  {func(tr *traffic) { tr.kill() }, 4, []string{"Swap"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tr, stop := newTraffic(newSuccession(t))
			tr.rolls()
			for range c.times {
				tr.flows("CreateVolume", "PrepareAlloc", "ReleaseAlloc", "Volumes", "TaskStarted")
				c.follows(tr)
			}
			tr.flows("CreateVolume", "PrepareAlloc", "ReleaseAlloc", "Sync", "Doctor")
			stop()
			tr.exit(tr.plugin)
			tr.judge()
			tr.must(tr.host.Close())
			tr.count("Close")
			if never := tr.neverMade(); !slices.Equal(never, c.without) {
				t.Errorf("nobody has called %v", never)
			}
			t.Logf("%d shims, calls: %v", len(tr.pids), tr.calls())
		})
	}
}

// judge holds what was done to volumes against what was told of it.
func (tr *traffic) judge() {
	tr.t.Helper()
	events := tr.history(func(e host.Event) bool { return e.Kind == "task deregistered" && e.Alloc == tr.plugin.task.Alloc })
	hurried := map[string]bool{} // who asked for them twice may have them asked for twice
	for _, c := range tr.sent("CreateVolume") {
		hurried[subjectOf(c)] = strings.HasPrefix(c.Name, "hurried-")
	}
	calls := slices.DeleteFunc(tr.sent(), func(c journal.Call) bool { return hurried[subjectOf(c)] })
	events = slices.DeleteFunc(events, func(e host.Event) bool { return strings.HasPrefix(string(e.Volume.ID), "hurried-") })
	for _, problem := range effectsOnce(calls, events) {
		tr.t.Error(problem)
	}
	tr.t.Logf("of %d calls of plugins %d were made again, over %d shims", len(calls), madeAgain(calls), len(tr.pids))
}

// madeAgain is how many calls were made for which there had been one already.
func madeAgain(calls []journal.Call) (n int) {
	first := map[deed]bool{}
	for _, c := range calls {
		d := deed{subjectOf(c), c.RPC}
		if first[d] {
			n++
		}
		first[d] = true
	}
	return n
}

// TestNoFailedCallIsJudged: what judges the calls finds one that is made again blindly, one with other fields, and one that nobody tells of.
func TestNoFailedCallIsJudged(t *testing.T) {
	at := time.Now()
	call := func(after time.Duration, peer int, hash, code string) journal.Call {
		c := journal.Call{Line: journal.Line{RPC: "CreateVolume", Name: "v", Wall: at.Add(after), Peer: peer, Hash: hash}}
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
		sound  bool
	}{
		"once":                           {[]journal.Call{first}, created, true},
		"again, by the next shim":        {[]journal.Call{first, call(1, 2, "a", "OK")}, created, true},
		"again, as there was no answer":  {[]journal.Call{call(0, 1, "a", ""), call(1, 1, "a", "OK")}, created, true},
		"again, by the shim that knows":  {[]journal.Call{first, call(1, 1, "a", "OK")}, created, false},
		"again, with other fields":       {[]journal.Call{first, call(1, 2, "b", "OK")}, created, false},
		"again, though it was recorded":  {[]journal.Call{first, call(2*time.Second, 2, "a", "OK")}, created, false},
		"told twice":                     {[]journal.Call{first}, append(created[:1:1], created[0]), false},
		"not told":                       {[]journal.Call{first}, nil, false},
		"told, and nobody has called it": {nil, created, false},
	} {
		if problems := effectsOnce(c.calls, c.events); (len(problems) == 0) != c.sound {
			t.Errorf("%s: %q", name, problems)
		}
	}
}
