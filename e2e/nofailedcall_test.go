package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake/journal"
)

// Calls of every method of a host, made all the time by many callers, end as they would with one shim for ever, while shims are replaced, and
// while they are killed: what is asked for is done, once, and what is to be refused is refused. Streams go on. Each method that changes something
// is held by a swap at least once, and cut off in the middle by a kill.
func TestNoFailedCall(t *testing.T) {
	for name, c := range map[string]struct {
		follows func(tr *traffic) func(methods []string) (missed []string)
		without []string // methods that are not called; Swap calls SwapAs
	}{
		"swapped": {(*traffic).swapsUnder, []string{"SwapAs"}},
		"killed":  {(*traffic).killsUnder, []string{"Swap", "SwapAs"}},
	} {
		t.Run(name, func(t *testing.T) {
			if name == "killed" { // in make test TestShimKilledInTheMiddle stands for it
				slow(t)
			}
			t.Parallel()
			tr, stop := newTraffic(newSuccession(t))
			follows := c.follows(tr)
			tr.rolls()
			for _, methods := range turns {
				for tries := 1; len(methods) > 0; tries++ {
					tr.flows("CreateVolume", "PrepareAlloc", "ReleaseAlloc", "Volumes", "TaskStarted")
					if methods = follows(methods); tries == mostTries && len(methods) > 0 {
						t.Fatalf("no succession of %d has come while calls of %v were under way", tries, methods)
					}
				}
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

// mutators is the methods that change something, by what shims call them.
var mutators = map[string]string{
	"Volumes.Create": "CreateVolume", "Volumes.Expand": "ExpandVolume", "Volumes.Delete": "DeleteVolume",
	"Volumes.Register": "RegisterVolume", "Volumes.Deregister": "DeregisterVolume",
	"Tasks.Starting": "TaskStarting", "Tasks.Started": "TaskStarted", "Tasks.Stopping": "TaskStopping", "Tasks.Exited": "TaskExited",
	"Allocs.Prepare": "PrepareAlloc", "Allocs.Release": "ReleaseAlloc", "Allocs.Sync": "Sync", "Doctor": repair,
}

// turns are all mutators. Those of one turn have callers of their own, who can wait for each other.
var turns = [][]string{
	{"CreateVolume", "RegisterVolume", "TaskStarting"},
	{"PrepareAlloc", "DeregisterVolume", "TaskStarted"},
	{"ExpandVolume", "ReleaseAlloc", "TaskStopping"},
	{"DeleteVolume", "TaskExited"},
	{"Sync"},
	{repair},
}

// swapsUnder has calls of some methods be made in the middle of a swap, while nobody serves. They are held: none ends before somebody does.
func (tr *traffic) swapsUnder() func([]string) []string {
	activate := tr.halt("Activate before")
	tr.follow(activate.lines()...)
	return func(methods []string) []string {
		m := tr.meets(methods)
		tr.must(activate.shuts())
		report := tr.swapWhile(func() {
			tr.eventually("nobody serves", func() bool { return exists(activate.reached) })
			close(m.begin)
			for method, g := range m.guests {
				tr.eventually(method+" is called", func() bool { return closed(g.heed) || closed(g.ended) })
			}
			if ended := m.ended(); len(ended) > 0 {
				tr.t.Errorf("calls of %v have ended while nobody serves", ended)
			}
			tr.must(activate.opens())
		})
		if report.Held < len(methods) {
			tr.t.Errorf("%v were held, and the swap tells of %d calls", methods, report.Held)
		}
		tr.count("Swap")
		return nil
	}
}

// killsUnder has shims killed that have done what calls of some methods ask for, and not said so. missed are those whose call was another one.
func (tr *traffic) killsUnder() func([]string) []string {
	dir := filepath.Join(tr.dir, "hang")
	tr.must(os.Mkdir(dir, 0o700))
	mark := func(method string) string { return filepath.Join(dir, strings.ReplaceAll(method, " ", "-")) }
	var hangs []string
	for at, method := range mutators {
		hangs = append(hangs, at+" after hang once "+mark(method))
		tr.must(os.WriteFile(mark(method), nil, 0o600))
	}
	tr.follow(hangs...)
	tr.swap()
	return func(methods []string) (missed []string) {
		m := tr.meets(methods)
		for _, method := range methods {
			tr.must(os.Remove(mark(method)))
		}
		close(m.begin)
		for _, method := range methods {
			tr.eventually(method+" hangs", func() bool { return exists(mark(method)) })
		}
		missed = m.ended()
		tr.kill()
		return missed
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
