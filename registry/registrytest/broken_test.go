package registrytest

import (
	"context"
	"errors"
	"iter"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"holdfast/registry"
)

// brokenLog is a log with one fault.
type brokenLog struct {
	*Log
	read   brokenReader
	change func(*registry.Change)
	err    func(error) error
}

func (l brokenLog) Commit(ctx context.Context, decisions ...registry.Decision) (registry.Seq, error) {
	broken := slices.Clone(decisions)
	for i, decide := range decisions {
		broken[i] = func(v registry.View) (registry.Change, error) {
			c, err := decide(v)
			if l.change != nil {
				l.change(&c)
			}
			return c, err
		}
	}
	seq, err := l.Log.Commit(ctx, broken...)
	if l.err != nil && err != nil {
		err = l.err(err)
	}
	return seq, err
}

func (l brokenLog) View(ctx context.Context, read func(registry.View) error) error {
	return l.Log.View(ctx, func(v registry.View) error {
		broken := l.read
		broken.Reader = v.Reader
		return read(registry.View{Reader: broken})
	})
}

// brokenReader is a reader with one fault.
type brokenReader struct {
	registry.Reader
	get    func(registry.Record) registry.Record
	paths  func(b registry.Bucket, prefix string, paths []string) []string
	events func([]registry.Event, registry.Seq) ([]registry.Event, registry.Seq)
}

func (r brokenReader) Get(k registry.Key) registry.Record {
	record := r.Reader.Get(k)
	if r.get != nil {
		record = r.get(record)
	}
	return record
}

func (r brokenReader) Paths(b registry.Bucket, prefix string) iter.Seq[string] {
	if r.paths == nil {
		return r.Reader.Paths(b, prefix)
	}
	return slices.Values(r.paths(b, prefix, slices.Collect(r.Reader.Paths(b, prefix))))
}

func (r brokenReader) Events(after registry.Seq, limit int) ([]registry.Event, registry.Seq) {
	events, floor := r.Reader.Events(after, limit)
	if r.events != nil {
		events, floor = r.events(events, floor)
	}
	return events, floor
}

// broken holds faults by the test of the suite that finds them.
var broken = map[string]brokenLog{
	"EveryRecordComesBack": {read: brokenReader{get: func(r registry.Record) registry.Record {
		if task, ok := r.(registry.Task); ok {
			task.Sealed = nil
			return task
		}
		return r
	}}},
	"PathsInOrder": {read: brokenReader{paths: func(_ registry.Bucket, _ string, paths []string) []string {
		slices.Reverse(paths)
		return paths
	}}},
	"IndexEntries": {read: brokenReader{paths: func(b registry.Bucket, _ string, paths []string) []string {
		if b.Type() == nil && len(paths) > 0 {
			return paths[1:]
		}
		return paths
	}}},
	"EventsArePruned": {read: brokenReader{
		events: func(e []registry.Event, _ registry.Seq) ([]registry.Event, registry.Seq) { return e, 0 },
	}},
	"UnstorableChange": {change: func(c *registry.Change) {
		if c.Mixed() {
			c.Put = c.Put[:1]
		}
	}},
	"Deletes":              {change: func(c *registry.Change) { c.Delete = nil }},
	"AllOrNothing":         {change: func(c *registry.Change) { c.Put = c.Put[:min(len(c.Put), 3)] }},
	"EventsAreNumbered":    {change: func(c *registry.Change) { slices.Reverse(c.Events) }},
	"DecisionsOfOneCommit": {err: func(err error) error { return errors.Join(err) }},
}

const brokenEnv = "HOLDFAST_BROKEN_LOG"

// TestSuiteFindsFaults is the suite's negative control: each broken log fails, in a process of its own.
func TestSuiteFindsFaults(t *testing.T) {
	for name := range broken {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestBrokenLog$")
		cmd.Env = append(os.Environ(), brokenEnv+"="+name)
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), "--- FAIL: TestBrokenLog/"+name) {
			t.Errorf("a log with the fault %s passes: %v\n%s", name, err, out)
		}
	}
}

// TestBrokenLog is run by TestSuiteFindsFaults, with the name of a fault in its environment.
func TestBrokenLog(t *testing.T) {
	b, asked := broken[os.Getenv(brokenEnv)]
	if !asked {
		return
	}
	TestLog(t, func(t *testing.T) (registry.State, func() registry.State) {
		b.Log = NewLog(clock)
		return b, func() registry.State { b.Log = b.Log.Reopen(); return b }
	})
}
