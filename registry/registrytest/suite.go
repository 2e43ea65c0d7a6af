package registrytest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"sync"
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
		{"ErrorOfDecide", testDecideError},
		{"EmptyChange", testEmptyChange},
		{"FinishedContext", testFinishedContext},
		{"DecideSeesEarlierCommits", testConcurrency},
		{"ViewStaysAsItIs", testIsolation},
		{"ReadersNeverSeeHalf", testReaders},
		{"NothingIsShared", testNothingShared},
		{"Deletes", testDeletes},
		{"PrefixesAreNotIds", testPrefixes},
		{"VolumesByName", testVolumesNamed},
		{"VolumesByAlloc", testVolumesOf},
		{"ListOrder", testOrder},
		{"EventsAreNumbered", testEvents},
		{"EventsTellTheRecord", testEventInstance},
		{"EventsArePruned", testPruning},
		{"AppliedInOrder", testApplied},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, open) })
	}
}

// at commits a change that does not depend on anything, and returns its index.
func at(t *testing.T, log registry.State, c registry.Change) registry.Seq {
	t.Helper()
	seq, err := log.Commit(t.Context(), func(registry.View) (registry.Change, error) { return c, nil })
	if err != nil {
		t.Fatal(err)
	}
	return seq
}

func puts(records ...registry.Record) registry.Change { return registry.Change{Put: records} }

func look(t *testing.T, log registry.State, read func(registry.View)) {
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
	case <-time.After(30 * time.Second):
		t.Fatalf("%s does not end", what)
	}
}

// kind says how to make and read records of one type.
type kind struct {
	make func(t testing.TB, seed int) registry.Record
	get  func(registry.View, registry.Record) (registry.Record, bool)
	all  func(registry.View) []registry.Record
}

func kindOf[T registry.Record](get func(registry.View, T) (T, bool), all func(registry.View) []T) kind {
	return kind{
		make: func(t testing.TB, seed int) registry.Record { return Filled[T](t, seed) },
		get:  func(v registry.View, r registry.Record) (registry.Record, bool) { return get(v, r.(T)) },
		all: func(v registry.View) []registry.Record {
			if all == nil {
				return nil
			}
			var out []registry.Record
			for _, r := range all(v) {
				out = append(out, r)
			}
			return out
		},
	}
}

func only[T any](list []T, holds func(T) bool) (T, bool) {
	for _, r := range list {
		if holds(r) {
			return r, true
		}
	}
	var none T
	return none, false
}

// in limits a kind to the records of one bucket, for a type whose records lie in two. set makes a record one of the
// bucket.
func in[T registry.Record](b registry.Bucket, k kind, set func(*T)) kind {
	return kind{
		make: func(t testing.TB, seed int) registry.Record {
			r := Filled[T](t, seed)
			set(&r)
			return r
		},
		get: k.get,
		all: func(v registry.View) []registry.Record {
			return slices.DeleteFunc(k.all(v), func(r registry.Record) bool { return r.Key().Bucket != b })
		},
	}
}

var volumes = kindOf(
	func(v registry.View, r registry.Volume) (registry.Volume, bool) {
		return v.Volume(r.VolumeName())
	}, registry.View.Volumes)

var intents = kindOf(func(v registry.View, r registry.Intent) (registry.Intent, bool) {
	if r.RPC.OnNode() {
		return v.NodeIntent(r.Volume)
	}
	return v.Intent(r.Volume)
}, registry.View.Intents)

// kinds has every bucket.
var kinds = map[registry.Bucket]kind{
	registry.BucketInstances: kindOf(
		func(v registry.View, r registry.Instance) (registry.Instance, bool) {
			return v.Instance(r.InstanceKey)
		}, registry.View.AllInstances),
	registry.BucketTasks: kindOf(
		func(v registry.View, r registry.Task) (registry.Task, bool) { return v.Task(r.TaskKey) }, registry.View.Tasks),
	registry.BucketAllocs: kindOf(
		func(v registry.View, r registry.Alloc) (registry.Alloc, bool) { return v.Alloc(r.ID) }, registry.View.Allocs),
	registry.BucketVolumes: in(registry.BucketVolumes, volumes, func(r *registry.Volume) { r.Ephemeral = false }),
	registry.BucketInlineVolumes: in(registry.BucketInlineVolumes, volumes, func(r *registry.Volume) {
		r.Created = false
	}),
	registry.BucketClaims: kindOf(func(v registry.View, r registry.Claim) (registry.Claim, bool) {
		return only(v.Claims(r.Volume), func(c registry.Claim) bool { return c.ClaimKey() == r.ClaimKey() })
	}, registry.View.AllClaims),
	registry.BucketAttachments: kindOf(
		func(v registry.View, r registry.Attachment) (registry.Attachment, bool) {
			return v.Attachment(r.AttachmentKey())
		},
		registry.View.AllAttachments),
	registry.BucketStagings: kindOf(
		func(v registry.View, r registry.Staging) (registry.Staging, bool) {
			return v.Staging(r.Volume)
		}, registry.View.Stagings),
	registry.BucketRefs: kindOf(func(v registry.View, r registry.Ref) (registry.Ref, bool) {
		return only(v.Refs(r.Volume), func(c registry.Ref) bool { return c.ClaimKey() == r.ClaimKey() })
	}, registry.View.AllRefs),
	registry.BucketIntents: in(registry.BucketIntents, intents, func(r *registry.Intent) {
		r.RPC = registry.CreateVolumeRPC
	}),
	registry.BucketNodeIntents: in(registry.BucketNodeIntents, intents, func(r *registry.Intent) {
		r.RPC = registry.NodeStageRPC
	}),
	registry.BucketRequests: kindOf(
		func(v registry.View, r registry.Operation) (registry.Operation, bool) { return v.Operation(r.ID) }, nil),
}

// unset are the fields that no record of a bucket has.
var unset = map[registry.Bucket][]string{registry.BucketVolumes: {".Ephemeral"},
	registry.BucketInlineVolumes: {".Created"}}

// testRoundTrip sets every field of every record, by reflection, and compares before and after the log was reopened.
func testRoundTrip(t *testing.T, open Open) {
	log, reopen := open(t)
	var written []registry.Record
	for seed, b := range registry.Buckets {
		k, known := kinds[b]
		if !known {
			t.Fatalf("bucket %s is not tested", b)
		}
		r := k.make(t, seed+1)
		written = append(written, r.Indexed(0, at(t, log, puts(r))))
	}
	check := func(when string) {
		look(t, log, func(v registry.View) {
			for _, want := range written {
				k := kinds[want.Key().Bucket]
				got, found := k.get(v, want)
				if !found || !reflect.DeepEqual(got, want) {
					t.Errorf("%s: %s reads\n%+v, want\n%+v", when, want.Key().Bucket, got, want)
				} else if zero := Zeros(got); !slices.Equal(zero, unset[want.Key().Bucket]) {
					t.Errorf("%s: %T has no %v", when, got, zero)
				}
				if all := k.all(v); want.Key().Bucket != registry.BucketRequests &&
					!reflect.DeepEqual(all, []registry.Record{want}) {
					t.Errorf("%s: all %s are %+v", when, want.Key().Bucket, all)
				}
			}
		})
	}
	check("committed")
	log = reopen()
	check("reopened")
	look(t, log, func(v registry.View) { checkOtherReads(t, v, written) })
}

// checkOtherReads finds records by other fields than their key.
func checkOtherReads(t *testing.T, v registry.View, written []registry.Record) {
	for _, r := range written {
		var got []registry.Record
		switch r := r.(type) {
		case registry.Volume:
			if found, ok := v.VolumeByKey(r.VolumeKey()); ok {
				got = append(got, found)
			}
			if same := v.VolumesWhere(func(o registry.Volume) bool {
				return o.VolumeName() == r.VolumeName()
			}); len(same) != 1 || !among(same, r) {
				t.Errorf("by the name of volume %s %d are found: %v", r.ID, len(same), same)
			}
			if same := v.VolumesNamed(r.Plugin, r.Name); r.Created && (len(same) != 1 || !among(same, r)) {
				t.Errorf("by the name that volume %s was created under %d are found: %v", r.ID, len(same), same)
			}
		case registry.Alloc:
			if same := v.AllocsWhere(func(o registry.Alloc) bool {
				return o.ID == r.ID
			}); len(same) != 1 || !among(same, r) {
				t.Errorf("by the id of alloc %s %d are found: %v", r.ID, len(same), same)
			}
			continue
		case registry.Attachment:
			got = append(got, kindOf(nil, func(v registry.View) []registry.Attachment {
				return v.Attachments(r.Volume)
			}).all(v)...)
		case registry.Claim:
			got = append(got, kindOf(nil, func(v registry.View) []registry.Claim {
				return v.ClaimsOf(r.Alloc)
			}).all(v)...)
		case registry.Instance:
			got = append(got, kindOf(nil, func(v registry.View) []registry.Instance {
				return v.Instances(r.Role, r.Plugin)
			}).all(v)...)
		default:
			continue
		}
		if !reflect.DeepEqual(got, []registry.Record{r}) {
			t.Errorf("%T found by another field: %+v", r, got)
		}
	}
}

func among[T any](list []T, r T) bool {
	return slices.ContainsFunc(list, func(o T) bool { return reflect.DeepEqual(o, r) })
}

func testIndexes(t *testing.T, open Open) {
	log, reopen := open(t)
	first := at(t, log, puts(registry.Alloc{ID: "a"}))
	second := at(t, log, puts(registry.Alloc{ID: "b"}, registry.Alloc{ID: "c"}))
	third := at(t, log, puts(registry.Alloc{ID: "a", Job: "changed", CreateIndex: 4711}))
	if !(0 < first && first < second && second < third) {
		t.Errorf("indexes %d, %d, %d do not increase", first, second, third)
	}
	log = reopen()
	fourth := at(t, log, puts(registry.Alloc{ID: "d"}))
	look(t, log, func(v registry.View) {
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
	log, reopen := open(t)
	gone := registry.Alloc{ID: "gone"}
	at(t, log, puts(gone))
	change := registry.Change{Delete: []registry.Key{gone.Key()},
		Events: []registry.Event{{Kind: registry.EventAttached}, {Kind: registry.EventStaged}}}
	for seed, b := range registry.Buckets {
		change.Put = append(change.Put, kinds[b].make(t, seed+1))
	}
	seq := at(t, log, change)
	for _, when := range []string{"committed", "reopened"} {
		look(t, log, func(v registry.View) {
			for _, r := range change.Put {
				got, _ := kinds[r.Key().Bucket].get(v, r)
				if want := r.Indexed(0, seq); !reflect.DeepEqual(got, want) {
					t.Errorf("%s: %+v, want %+v", when, got, want)
				}
			}
			if _, found := v.Alloc("gone"); found {
				t.Errorf("%s: the deleted record is there", when)
			}
			events, _ := v.Events(seq-1, 10)
			if len(events) != 2 || events[0].Seq != seq || events[0].Kind != registry.EventAttached ||
				events[1].Kind != registry.EventStaged {
				t.Errorf("%s: events are %v", when, events)
			}
		})
		if when == "committed" {
			log = reopen()
		}
	}
}

func testDecideError(t *testing.T, open Open) {
	log, _ := open(t)
	before := at(t, log, puts(registry.Alloc{ID: "a"}))
	reason := errors.New("no")
	_, err := log.Commit(t.Context(), func(registry.View) (registry.Change, error) {
		return puts(registry.Alloc{ID: "b"}), reason
	})
	if err != reason {
		t.Errorf("error %v is not what decide returned", err)
	}
	look(t, log, func(v registry.View) {
		if _, found := v.Alloc("b"); found || v.Index() != before {
			t.Errorf("a refused decision was written; index %d, was %d", v.Index(), before)
		}
	})
}

func testEmptyChange(t *testing.T, open Open) {
	log, _ := open(t)
	applied := listen(log)
	if seq := at(t, log, registry.Change{}); seq != 0 {
		t.Errorf("index of nothing is %d", seq)
	}
	at(t, log, registry.Change{Put: []registry.Record{registry.Alloc{ID: "a"}}, Events: make([]registry.Event, 3)})
	var index registry.Seq
	look(t, log, func(v registry.View) { index = v.Index() })
	if seq := at(t, log, registry.Change{}); seq != index {
		t.Errorf("an empty change returns %d, the index is %d", seq, index)
	}
	look(t, log, func(v registry.View) {
		if v.Index() != index {
			t.Errorf("an empty change moved the index from %d to %d", index, v.Index())
		}
	})
	if told := applied(); told != nil && len(told) != 1 {
		t.Errorf("an empty change was told: %+v", told)
	}
}

func testFinishedContext(t *testing.T, open Open) {
	log, _ := open(t)
	reason := errors.New("caller went away")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(reason)
	_, err := log.Commit(ctx, func(registry.View) (registry.Change, error) {
		return puts(registry.Alloc{ID: "a"}), nil
	})
	if !errors.Is(err, reason) {
		t.Errorf("commit under a finished context: %v", err)
	}
	look(t, log, func(v registry.View) {
		if len(v.Allocs()) != 0 {
			t.Error("it was written")
		}
	})
}

// testConcurrency counts in a record: each decision must see all earlier ones.
func testConcurrency(t *testing.T, open Open) {
	log, reopen := open(t)
	const writers, each = 8, 25
	var mu sync.Mutex
	seen := map[registry.Seq]bool{}
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for range each {
				seq, err := log.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
					counter, _ := v.Alloc("counter")
					return puts(registry.Alloc{ID: "counter", Index: counter.Index + 1},
						registry.Alloc{ID: registry.AllocID(fmt.Sprint("writer-", w))}), nil
				})
				mu.Lock()
				if err != nil || seen[seq] {
					t.Errorf("commit: index %d (used: %v), %v", seq, seen[seq], err)
				}
				seen[seq] = true
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	log = reopen()
	look(t, log, func(v registry.View) {
		if counter, _ := v.Alloc("counter"); counter.Index != writers*each || len(v.Allocs()) != writers+1 {
			t.Errorf("counted to %d of %d; %d records", counter.Index, writers*each, len(v.Allocs()))
		}
	})
}

func testIsolation(t *testing.T, open Open) {
	log, _ := open(t)
	before := at(t, log, puts(registry.Alloc{ID: "a", Job: "old"}))
	within(t, "a commit during a view", func() {
		err := log.View(t.Context(), func(v registry.View) error {
			if _, err := log.Commit(t.Context(), func(registry.View) (registry.Change, error) {
				return puts(registry.Alloc{ID: "a", Job: "new"}, registry.Alloc{ID: "b"}), nil
			}); err != nil {
				return err
			}
			if a, _ := v.Alloc("a"); a.Job != "old" || len(v.Allocs()) != 1 || v.Index() != before {
				t.Errorf("the view changed under its reader: %+v, index %d", v.Allocs(), v.Index())
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	look(t, log, func(v registry.View) {
		if a, _ := v.Alloc("a"); a.Job != "new" {
			t.Errorf("the next view has %+v", a)
		}
	})
}

func testReaders(t *testing.T, open Open) {
	log, _ := open(t)
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 2 {
		readers.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := log.View(t.Context(), func(v registry.View) error {
					a, _ := v.Alloc("a")
					b, _ := v.Alloc("b")
					if a.Index != b.Index || a.ModifyIndex != b.ModifyIndex {
						return fmt.Errorf("half a commit: %d and %d", a.Index, b.Index)
					}
					return nil
				}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for n := range 50 {
		at(t, log, puts(registry.Alloc{ID: "a", Index: uint64(n)}, registry.Alloc{ID: "b", Index: uint64(n)}))
	}
	close(stop)
	readers.Wait()
}

// testNothingShared changes what was written: the log must not notice. What is read may be shared with other readers.
func testNothingShared(t *testing.T, open Open) {
	log, _ := open(t)
	i := Filled[registry.Instance](t, 1)
	want := i.Clone()
	event := i.Clone()
	at(t, log, registry.Change{Put: []registry.Record{i},
		Events: []registry.Event{{Kind: registry.EventRegistered, Instance: &event}}})
	i.Options["x"], i.Fingerprint.Capabilities[0], event.Options["x"] = "changed", "changed", "changed"
	look(t, log, func(v registry.View) {
		if got, _ := v.Instance(i.InstanceKey); !got.Same(want) {
			t.Errorf("the record changed: %+v, want %+v", got, want)
		}
		if events, _ := v.Events(0, 1); !events[0].Instance.Same(want) {
			t.Errorf("the event's record changed: %+v", events[0].Instance)
		}
	})
}

func testDeletes(t *testing.T, open Open) {
	log, reopen := open(t)
	var keys []registry.Key
	for seed, b := range registry.Buckets {
		r := kinds[b].make(t, seed+1)
		keys = append(keys, r.Key())
		at(t, log, puts(r))
	}
	last := at(t, log, registry.Change{Delete: keys})
	if again := at(t, log, registry.Change{Delete: keys}); again < last {
		t.Errorf("deleting what is gone has index %d, after %d", again, last)
	}
	log = reopen()
	look(t, log, func(v registry.View) {
		for seed, b := range registry.Buckets {
			if _, found := kinds[b].get(v, kinds[b].make(t, seed+1)); found || len(kinds[b].all(v)) != 0 {
				t.Errorf("%s still has records", b)
			}
		}
		if v.Index() < last {
			t.Errorf("index fell from %d to %d", last, v.Index())
		}
	})
	// A record that comes back is a new one.
	seq := at(t, log, puts(registry.Alloc{ID: Filled[registry.Alloc](t, 3).ID}))
	look(t, log, func(v registry.View) {
		if all := v.Allocs(); len(all) != 1 || all[0].CreateIndex != seq {
			t.Errorf("recreated record is %+v, want CreateIndex %d", all, seq)
		}
	})
}

func testPrefixes(t *testing.T, open Open) {
	log, _ := open(t)
	key := registry.VolumeKey{Plugin: "p", External: "vol"}
	var change registry.Change
	for n, k := range []registry.VolumeKey{key, {Plugin: "p", External: "vol-2"}, {Plugin: "p", External: "vo"},
		{Plugin: "pv", External: "ol"}, {Plugin: "p-2", External: "vol"}} {
		alloc := registry.AllocID("alloc" + fmt.Sprint(n))
		change.Put = append(change.Put,
			registry.Claim{Volume: k, Alloc: alloc, Request: "r"}, registry.Ref{Volume: k, Alloc: alloc, Request: "r"},
			registry.Claim{Volume: k, Alloc: alloc + "-x", Request: "r"},
			registry.Ref{Volume: k, Alloc: alloc + "-x", Request: "r"},
			registry.Staging{Volume: k, Boot: k.String()}, registry.Intent{Volume: k, Hash: k.String()},
			registry.Attachment{Volume: k, Node: "n"}, registry.Attachment{Volume: k, Node: "n-2"},
			registry.Staging{Volume: k, Boot: k.String()},
			registry.Instance{InstanceKey: registry.InstanceKey{Role: "r", Plugin: k.Plugin, Alloc: alloc, Task: "t"}})
	}
	at(t, log, change)
	look(t, log, func(v registry.View) {
		if c, r := v.Claims(key), v.Refs(key); len(c) != 2 || c[0].Volume != key || c[1].Volume != key || len(r) != 2 ||
			r[0].Volume != key || r[1].Volume != key {
			t.Errorf("claims and refs of %s are %+v and %+v", key, c, r)
		}
		if c := v.ClaimsOf("alloc0"); len(c) != 1 || c[0].Alloc != "alloc0" {
			t.Errorf("claims of alloc0 are %+v", c)
		}
		if p, _ := v.Staging(key); p.Boot != key.String() {
			t.Errorf("placement is %+v", p)
		}
		if a := v.Attachments(key); len(a) != 2 || a[0].Volume != key || a[1].Volume != key {
			t.Errorf("attachments of %s are %+v", key, a)
		}
		if s, _ := v.Staging(key); s.Boot != key.String() {
			t.Errorf("staging is %+v", s)
		}
		if i, _ := v.Intent(key); i.Hash != key.String() {
			t.Errorf("intent is %+v", i)
		}
		if is := v.Instances("r", "p"); len(is) != 3 {
			t.Errorf("instances of p are %+v", is)
		}
		if len(v.Instances("r", "")) != 0 || len(v.Claims(registry.VolumeKey{})) != 0 ||
			len(v.Claims(registry.VolumeKey{Plugin: "p"})) != 0 || len(v.ClaimsOf("")) != 0 {
			t.Error("an empty id finds records")
		}
	})
}

func testOrder(t *testing.T, open Open) {
	log, _ := open(t)
	instance := func(role registry.Role, plugin registry.PluginID, alloc registry.AllocID) registry.Instance {
		return registry.Instance{InstanceKey: registry.InstanceKey{Role: role, Plugin: plugin, Alloc: alloc, Task: "t"}}
	}
	at(t, log, puts(instance("r", "p", "old"), instance("r", "q", "x")))
	at(t, log, puts(instance("r", "p", "both-2"), instance("r", "p", "both-1"), instance("q", "p", "x")))
	at(t, log, puts(instance("r", "p", "new"), instance("r", "p", "old")))
	look(t, log, func(v registry.View) {
		var names []string
		for _, i := range v.AllInstances() {
			names = append(names, fmt.Sprint(i.Role, " ", i.Plugin, " ", i.Alloc))
		}
		if want := []string{"q p x", "r p new", "r p both-1", "r p both-2", "r p old", "r q x"}; !slices.Equal(names,
			want) {
			t.Errorf("all instances are %q, want %q", names, want)
		}
		if list := v.Instances("r", "p"); len(list) != 4 || list[0].Alloc != "new" || list[1].Alloc != "both-1" ||
			list[3].Alloc != "old" {
			t.Errorf("instances of p are %+v", list)
		}
	})
}
