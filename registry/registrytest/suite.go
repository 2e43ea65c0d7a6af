package registrytest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/registry"
)

// Open returns an empty state and cleans up after the test. reopen closes the state opened last, as the end of its
// process would, and opens it again. If the state has a method OnApplied(func(registry.Applied)), the suite tests
// that as well.
type Open func(t *testing.T) (log registry.State, reopen func() registry.State)

// TestLog tests that a registry.State does what its comments say.
func TestLog(t *testing.T, open Open) {
	for _, c := range []struct {
		name string
		run  func(*testing.T, Open)
	}{
		{"EveryRecordComesBack", testRoundTrip},
		{"IndexesOfRecords", testIndexes},
		{"AllOrNothing", testAtomic},
		{"DecisionsOfOneCommit", testDecisions},
		{"EmptyChange", testEmptyChange},
		{"FinishedContext", testFinishedContext},
		{"DecideSeesEarlierCommits", testConcurrency},
		{"ViewStaysAsItIs", testIsolation},
		{"ReadersNeverSeeHalf", testReaders},
		{"NothingIsShared", testNothingShared},
		{"Deletes", testDeletes},
		{"PathsInOrder", testPaths},
		{"IndexEntries", testIndexEntries},
		{"UnstorableChange", testUnstorable},
		{"EventsAreNumbered", testEvents},
		{"EventsHaveTheRecord", testEventInstance},
		{"EventsArePruned", testPruning},
		{"AppliedInOrder", testApplied},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, open) })
	}
}

// mustCommit commits a change that does not depend on anything, and returns its index.
func mustCommit(t *testing.T, log registry.State, c registry.Change) registry.Seq {
	t.Helper()
	seq, err := Write(t.Context(), log, c)
	if err != nil {
		t.Fatal(err)
	}
	return seq
}

func putChange(records ...registry.Record) registry.Change { return registry.Change{Put: records} }

func view(t *testing.T, log registry.State, read func(registry.View)) {
	t.Helper()
	if err := log.View(t.Context(), func(v registry.View) error { read(v); return nil }); err != nil {
		t.Fatal(err)
	}
}

// within fails the test if f takes so long that it must be stuck.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatalf("%s does not end", what)
	}
}

// viewTwice calls check with the state as committed, and again after it was reopened. It returns the reopened state.
func viewTwice(t *testing.T, log registry.State, reopen func() registry.State, check func(when string, v registry.View),
) registry.State {
	t.Helper()
	view(t, log, func(v registry.View) { check("committed", v) })
	log = reopen()
	view(t, log, func(v registry.View) { check("reopened", v) })
	return log
}

// oneOfEach returns a record for each bucket.
func oneOfEach(t *testing.T) (records []registry.Record) {
	for seed, b := range registry.Buckets {
		records = append(records, Record(t, b, seed+1))
	}
	return records
}

// testRoundTrip sets every field of every record, by reflection.
func testRoundTrip(t *testing.T, open Open) {
	log, reopen := open(t)
	var written []registry.Record
	for _, r := range oneOfEach(t) {
		written = append(written, registry.Indexed(r, 0, mustCommit(t, log, putChange(r))))
	}
	viewTwice(t, log, reopen, func(when string, v registry.View) {
		for _, want := range written {
			k := want.Key()
			if got := v.Get(k); !reflect.DeepEqual(got, want) {
				t.Errorf("%s: %s reads\n%+v, want\n%+v", when, k.Bucket, got, want)
			}
			if paths := slices.Collect(v.Paths(k.Bucket, "")); !slices.Equal(paths, []string{k.Path}) {
				t.Errorf("%s: the paths of %s are %q", when, k.Bucket, paths)
			}
		}
	})
}

// testIndexEntries puts, changes and deletes records: the indexes have exactly the entries of the records.
func testIndexEntries(t *testing.T, open Open) {
	log, reopen := open(t)
	check := func(when string, v registry.View) {
		var got, want []string
		for _, x := range registry.Indexes {
			for path := range v.Paths(x.Bucket, "") {
				got = append(got, fmt.Sprintf("%s %q", x.Bucket, path))
			}
		}
		for _, b := range registry.Buckets {
			for path := range v.Paths(b, "") {
				for _, k := range registry.IndexKeys(v.Get(registry.Key{Bucket: b, Path: path})) {
					want = append(want, fmt.Sprintf("%s %q", k.Bucket, k.Path))
				}
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: the index entries are\n%s\nwant\n%s", when, got, want)
		}
	}
	volume := Record(t, registry.BucketVolumes, 1).(registry.Volume)
	renamed, gone := volume, volume
	renamed.Name, renamed.External = "renamed", "renamed"
	gone.ID = "gone"
	other := Record(t, registry.BucketVolumes, 2).(registry.Volume)
	unnamed := other
	unnamed.External, unnamed.Created = "", false
	for n, c := range []registry.Change{
		putChange(volume, other),
		putChange(renamed, unnamed),
		putChange(volume, renamed, other), // twice in one change
		{Put: []registry.Record{gone}, Delete: []registry.Key{gone.Key(), other.Key()}},
		putChange(Record(t, registry.BucketInlineVolumes, 3), Record(t, registry.BucketRequests, 4)),
		putChange(Record(t, registry.BucketRequests, 4)),
	} {
		mustCommit(t, log, c)
		view(t, log, func(v registry.View) { check(fmt.Sprint("change ", n), v) })
	}
	viewTwice(t, log, reopen, check)
}

// testUnstorable commits changes that no State can store. Nothing of them is written, and later commits succeed.
func testUnstorable(t *testing.T, open Open) {
	log, _ := open(t)
	first := mustCommit(t, log, registry.Change{})
	volume, ref := Record(t, registry.BucketVolumes, 1).(registry.Volume), Record(t, registry.BucketRefs, 2)
	inline := Record(t, registry.BucketInlineVolumes, 3)
	long := volume
	long.External = registry.ExternalID(strings.Repeat("x", 1<<15))
	var many registry.Change
	for i := range registry.MaxShared + 1 {
		claim := registry.Claim{Volume: volume.VolumeKey(), Alloc: registry.AllocID(fmt.Sprint(i)), Request: "r"}
		many.Put, many.Delete = append(many.Put, claim), append(many.Delete, claim.Key())
	}
	fits := putChange(many.Put[:registry.Batch]...)
	for what, c := range map[string]registry.Change{
		"mixed":               putChange(volume, ref),
		"mixed by a deletion": {Put: []registry.Record{inline}, Delete: []registry.Key{volume.Key()}},
		"unknown bucket":      {Delete: []registry.Key{{Bucket: "none", Path: "x"}}},
		"empty path":          {Delete: []registry.Key{{Bucket: registry.BucketAllocs}}},
		"long path":           putChange(registry.Alloc{ID: registry.AllocID(strings.Repeat("x", 1<<15))}),
		"long index entry":    putChange(long),
		"many shared records": putChange(many.Put...),
		"many deletions":      {Delete: many.Delete},
		"many index entries":  putChange(slices.Repeat([]registry.Record{volume}, registry.MaxShared/5+1)...),
	} {
		_, err := log.Commit(t.Context(), func(registry.View) (registry.Change, error) { return c, nil })
		if !errors.Is(err, registry.ErrInternal) {
			t.Errorf("%s: %v", what, err)
		}
	}
	view(t, log, func(v registry.View) {
		if v.Index() != first || v.Get(volume.Key()) != nil || v.Get(inline.Key()) != nil {
			t.Errorf("something was written; index %d", v.Index())
		}
	})
	mustCommit(t, log, putChange(volume))
	mustCommit(t, log, putChange(inline, ref))
	var nodes registry.Change
	for i := range 3 * registry.MaxShared { // of one node
		nodes.Put = append(nodes.Put, registry.Alloc{ID: registry.AllocID(fmt.Sprint(i))})
	}
	for _, c := range []registry.Change{fits, nodes} {
		decide := func(registry.View) (registry.Change, error) { return c, nil }
		if _, err := log.Commit(t.Context(), decide); err != nil {
			t.Errorf("%d records of %s: %v", len(c.Put), c.Put[0].Key().Bucket, err)
		}
	}
	left, calls := 0, 0
	err := registry.EnsureAll(t.Context(), log, func(v registry.View) (registry.Change, error) {
		if left = len(v.AllClaims()); left > len(fits.Put) || calls > 2*len(fits.Put) {
			return registry.Change{}, fmt.Errorf("%d claims after %d calls", left, calls)
		}
		calls++
		return registry.Change{Delete: many.Delete[len(fits.Put)-left : min(len(fits.Put)-left+30, len(fits.Put))]}, nil
	})
	if err != nil || left != 0 {
		t.Errorf("EnsureAll leaves %d records: %v", left, err)
	}
}

func testIndexes(t *testing.T, open Open) {
	log, reopen := open(t)
	first := mustCommit(t, log, putChange(registry.Alloc{ID: "a"}))
	second := mustCommit(t, log, putChange(registry.Alloc{ID: "b"}, registry.Alloc{ID: "c"}))
	third := mustCommit(t, log, putChange(registry.Alloc{ID: "a", Job: "changed", CreateIndex: 4711}))
	if !(0 < first && first < second && second < third) {
		t.Errorf("indexes %d, %d, %d do not increase", first, second, third)
	}
	log = reopen()
	fourth := mustCommit(t, log, putChange(registry.Alloc{ID: "d"}))
	view(t, log, func(v registry.View) {
		for id, want := range map[registry.AllocID][2]registry.Seq{"a": {first, third}, "b": {second, second},
			"c": {second, second}, "d": {fourth, fourth}} {
			if a, _ := v.Alloc(id); a.CreateIndex != want[0] || a.ModifyIndex != want[1] {
				t.Errorf("alloc %s has indexes %d, %d, want %v", id, a.CreateIndex, a.ModifyIndex, want)
			}
		}
		if v.Index() < fourth || fourth <= third {
			t.Errorf("index is %d after a commit at %d, which came after %d", v.Index(), fourth, third)
		}
	})
}

func testAtomic(t *testing.T, open Open) {
	for _, shared := range []bool{true, false} {
		log, reopen := open(t)
		events := []registry.Event{{Kind: registry.EventAttached}, {Kind: registry.EventStaged}}
		change := registry.Change{Events: events}
		for seed, b := range registry.Buckets {
			// a record of a node's lease makes an event in a cluster
			if b.Shared() == shared && b != registry.BucketNodeLeases {
				gone := Record(t, b, seed+100)
				mustCommit(t, log, putChange(gone))
				change.Put, change.Delete = append(change.Put, Record(t, b, seed+1)), append(change.Delete, gone.Key())
			}
		}
		seq := mustCommit(t, log, change)
		viewTwice(t, log, reopen, func(when string, v registry.View) {
			for i, r := range change.Put {
				if got, want := v.Get(r.Key()), registry.Indexed(r, 0, seq); !reflect.DeepEqual(got, want) {
					t.Errorf("%s: %+v, want %+v", when, got, want)
				}
				if v.Get(change.Delete[i]) != nil {
					t.Errorf("%s: the deleted record of %s exists", when, change.Delete[i].Bucket)
				}
			}
			events, _ := v.Events(seq-1, 10)
			if len(events) != 2 || events[0].Seq != seq || events[0].Kind != registry.EventAttached ||
				events[1].Kind != registry.EventStaged {
				t.Errorf("%s: events are %v", when, events)
			}
		})
	}
}

func testDecisions(t *testing.T, open Open) {
	log, _ := open(t)
	reason := errors.New("no")
	add := func(id registry.AllocID, after int) registry.Decision {
		return func(v registry.View) (registry.Change, error) {
			if n := len(v.Allocs()); n != after {
				t.Errorf("the decision about %s sees %d allocs, want %d", id, n, after)
			}
			return putChange(registry.Alloc{ID: id}), nil
		}
	}
	first := mustCommit(t, log, registry.Change{})
	if seq, err := log.Commit(t.Context(), add("a", 0), add("b", 1)); err != nil || seq != first+2 {
		t.Errorf("index %d, %v; want that of the last change", seq, err)
	}
	if _, err := log.Commit(t.Context(), add("c", 2),
		func(registry.View) (registry.Change, error) { return putChange(registry.Alloc{ID: "d"}), reason },
		func(registry.View) (registry.Change, error) { panic("a decision after a refusal") }); err != reason {
		t.Errorf("error %v is not the refusal", err)
	}
	_, err := registry.Ensure(t.Context(), log,
		func(registry.View) (registry.Change, error) { return putChange(registry.Alloc{ID: "d"}), reason },
		func(registry.View) (registry.Change, error) { panic("a decision after a refusal") })
	if err != reason {
		t.Errorf("Ensure: error %v is not the refusal", err)
	}
	view(t, log, func(v registry.View) {
		if n := len(v.Allocs()); n != 3 || v.Index() != first+3 {
			t.Errorf("%d allocs at index %d, want what was decided before each refusal", n, v.Index())
		}
	})
}

func testEmptyChange(t *testing.T, open Open) {
	log, _ := open(t)
	applied := listen(log)
	change := putChange(registry.Alloc{ID: "a"})
	change.Events = make([]registry.Event, 3)
	mustCommit(t, log, change)
	var index registry.Seq
	view(t, log, func(v registry.View) { index = v.Index() })
	if seq := mustCommit(t, log, registry.Change{}); seq != index {
		t.Errorf("an empty change returns %d, the index is %d", seq, index)
	}
	view(t, log, func(v registry.View) {
		if v.Index() != index {
			t.Errorf("an empty change moved the index from %d to %d", index, v.Index())
		}
	})
	if reported := applied(); reported != nil && len(reported) != 1 {
		t.Errorf("an empty change was reported: %+v", reported)
	}
}

func testFinishedContext(t *testing.T, open Open) {
	log, _ := open(t)
	reason := errors.New("caller went away")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(reason)
	_, err := log.Commit(ctx, func(registry.View) (registry.Change, error) {
		return putChange(registry.Alloc{ID: "a"}), nil
	})
	if !errors.Is(err, reason) {
		t.Errorf("commit under a finished context: %v", err)
	}
	view(t, log, func(v registry.View) {
		if len(v.Allocs()) != 0 {
			t.Error("it was written")
		}
	})
}

func testDeletes(t *testing.T, open Open) {
	log, reopen := open(t)
	var last registry.Seq
	for _, r := range oneOfEach(t) {
		mustCommit(t, log, putChange(r))
		last = mustCommit(t, log, registry.Change{Delete: []registry.Key{r.Key()}})
		if again := mustCommit(t, log, registry.Change{Delete: []registry.Key{r.Key()}}); again < last {
			t.Errorf("a second deletion has index %d, after %d", again, last)
		}
	}
	log = viewTwice(t, log, reopen, func(when string, v registry.View) {
		for _, r := range oneOfEach(t) {
			b := r.Key().Bucket
			if v.Get(r.Key()) != nil || len(slices.Collect(v.Paths(b, ""))) != 0 {
				t.Errorf("%s: %s still has records", when, b)
			}
		}
		if v.Index() < last {
			t.Errorf("%s: index fell from %d to %d", when, last, v.Index())
		}
	})
	// A record that is put again after its deletion is a new one.
	seq := mustCommit(t, log, putChange(registry.Alloc{ID: Filled[registry.Alloc](t, 3).ID}))
	view(t, log, func(v registry.View) {
		if all := v.Allocs(); len(all) != 1 || all[0].CreateIndex != seq {
			t.Errorf("recreated record is %+v, want CreateIndex %d", all, seq)
		}
	})
}

// testPaths: Paths returns the paths that begin with the prefix, and no others, in order, and stops when its caller
// does. A path has the length of the ID, in two bytes, before the ID: so shorter IDs come first.
func testPaths(t *testing.T, open Open) {
	log, _ := open(t)
	mustCommit(t, log, putChange(registry.Alloc{ID: "b"}, registry.Alloc{ID: "a"}, registry.Alloc{ID: "ab"},
		registry.Alloc{ID: "aa"}))
	path := func(id registry.AllocID) string { return registry.AllocRecord(id).Path }
	two := path("aa")[:3] // the prefix of all IDs of two letters that begin with a
	view(t, log, func(v registry.View) {
		for prefix, want := range map[string][]string{
			"": {path("a"), path("b"), path("aa"), path("ab")}, two: {path("aa"), path("ab")},
			path("b"): {path("b")}, path("c"): nil, path("abc"): nil, "\xff": nil,
		} {
			if got := slices.Collect(v.Paths(registry.BucketAllocs, prefix)); !slices.Equal(got, want) {
				t.Errorf("the paths below %q are %q, want %q", prefix, got, want)
			}
		}
		for got := range v.Paths(registry.BucketAllocs, "") {
			if got != path("a") {
				t.Errorf("%q is first", got)
			}
			break
		}
	})
}
