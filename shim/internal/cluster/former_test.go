package cluster

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// TestFormerExecutorHandsOverWithEvidence has a call of a former executor run on at its plugin. The node hands over
// once the plugin has answered the repeated call, or has exited. This holds whether or not the call is still open at
// the next executor.
func TestFormerExecutorHandsOverWithEvidence(t *testing.T) {
	a := newMember(t, parallelWithEtcd(t), "a")
	a.resign(t)
	key := volumeOf("vol", "vol").VolumeKey()
	open := registry.Intent{Volume: key, RPC: registry.DeleteVolumeRPC, Senders: []registry.NodeName{"a", "b"}}
	late := registry.LateCall{Plugin: "p", Node: "a", RPC: registry.DeleteVolumeRPC, For: "default/vol"}
	for name, test := range map[string]struct {
		call registry.Record
		end  func()
	}{
		"an answer":                {late, func() { a.busy.Store(false) }},
		"an answer to an open one": {open, func() { a.busy.Store(false) }},
		"the plugin exits":         {open, a.exit},
	} {
		a.busy.Store(true)
		a.plugins.exited.Store(false)
		asked := a.asked.Load()
		executor := registry.Executor{Plugin: "p", Holder: "b", Former: []registry.NodeName{"a"}}
		commit(t, a, registry.Change{Put: []registry.Record{test.call, executor}})
		until(t, name, func() bool { return a.asked.Load() > asked })
		look(t, a, func(v registry.View) {
			if e, _ := v.Executor("p"); len(e.Former) != 1 || v.Get(test.call.Key()) == nil {
				t.Errorf("%s: %+v while the call runs", name, e)
			}
		})
		test.end()
		until(t, name, func() bool { return len(a.executor(t).Former) == 0 && len(a.lateCalls(t)) == 0 })
		commit(t, a, registry.Change{Delete: []registry.Key{open.Key()}})
	}
}

// TestOneLateCallHoldsUpNoOther repeats two late calls of a former executor. One repetition is refused. The other call
// is handed over.
func TestOneLateCallHoldsUpNoOther(t *testing.T) {
	a := newMember(t, parallelWithEtcd(t), "a")
	a.resign(t)
	refused := registry.LateCall{
		Plugin: "p", Node: "a", RPC: registry.DeleteVolumeRPC, For: "default/refused", Failed: true,
	}
	answered := registry.LateCall{Plugin: "p", Node: "a", RPC: registry.ControllerPublishRPC, For: "default/answered"}
	elsewhere := answered
	elsewhere.Node = "c"
	commit(t, a, registry.Change{Put: []registry.Record{registry.Executor{Plugin: "p", Holder: "b",
		Former: []registry.NodeName{"a", "c"}}, refused, answered, elsewhere}})
	late := func(want ...registry.LateCall) bool { return slices.EqualFunc(a.lateCalls(t), want, sameCall) }
	until(t, "the end of the other call", func() bool { return late(refused, elsewhere) })
	if former := a.executor(t).Former; len(former) != 2 {
		t.Errorf("former executors are %v", former)
	}
	a.exit()
	until(t, "the end of both", func() bool { return late(elsewhere) && len(a.executor(t).Former) == 1 })
}

func sameCall(a, b registry.LateCall) bool { return a.Node == b.Node && a.Same(b) }

// TestSilentPluginDelaysNoOther hands over the calls of two plugins, of which the first does not answer.
func TestSilentPluginDelaysNoOther(t *testing.T) {
	a := newMember(t, parallelWithEtcd(t), "a")
	a.resign(t)
	a.plugins.silent.Store(true)
	var records []registry.Record
	for _, plugin := range []registry.PluginID{"a", "p"} {
		records = append(records, registry.Executor{Plugin: plugin, Holder: "b", Former: []registry.NodeName{"a"}},
			registry.LateCall{Plugin: plugin, Node: "a", RPC: registry.DeleteVolumeRPC, For: "vol"})
	}
	begin := time.Now()
	commit(t, a, registry.Change{Put: records})
	until(t, "the other hand-over", func() bool { return len(a.executor(t).Former) == 0 })
	if took := time.Since(begin); took > repeatLimit/2 {
		t.Errorf("it took %s", took)
	}
	if late := a.lateCalls(t); len(late) != 1 || late[0].Plugin != "a" {
		t.Errorf("late calls %+v", late)
	}
}

// TestRepetitionsBackOff repeats many calls at a plugin that answers with errors.
func TestRepetitionsBackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex // guards the variables below
		running, most, asked := 0, 0, map[registry.LateCall]int{}
		e := &Executors{plugins: &testPlugins{}}
		e.repeat = func(_ context.Context, _ registry.Instance, call registry.LateCall) error {
			mu.Lock()
			running++
			most = max(most, running)
			asked[call]++
			mu.Unlock()
			time.Sleep(time.Second)
			mu.Lock()
			defer mu.Unlock()
			running--
			return errors.New("it still runs")
		}
		h := handOver{Executors: e, plugin: "p"}
		var calls []registry.LateCall
		for i := range 100 {
			calls = append(calls, registry.LateCall{Plugin: "p", For: fmt.Sprint(i), RPC: registry.DeleteVolumeRPC})
		}
		for begin := time.Now(); time.Since(begin) < 10*time.Minute; time.Sleep(time.Second) {
			if _, err := h.repeatAll(t.Context(), calls); err == nil {
				t.Fatal("the calls have ended")
			}
		}
		if n := asked[calls[0]]; n < 12 || n > 30 || most != repeatsAtOnce {
			t.Errorf("a call was repeated %d times in 10 minutes, %d calls at once", n, most)
		}
		calls[0].Failed = true
		if _, _ = h.repeatAll(t.Context(), calls[:1]); asked[calls[0]] != 1 {
			t.Error("a call that has changed was not repeated at once")
		}
		e.plugins.(*testPlugins).exited.Store(true)
		if ended, err := h.repeatAll(t.Context(), calls); err != nil || !ended[calls[99].Key()] {
			t.Errorf("the plugin has exited: %v", err)
		}
	})
}

// TestExecutorAgainSettlesItsEarlierCalls has a node become the executor again while a call of its first term is under
// way. The node waits for that call, but not for its new calls, of which one is always under way.
func TestExecutorAgainSettlesItsEarlierCalls(t *testing.T) {
	a := newMember(t, parallelWithEtcd(t), "a")
	first, traffic := a.await(t, true), a.await(t, true)
	again := a.executor(t)
	again.Term, again.Former = again.Term+2, []registry.NodeName{"a"}
	commit(t, a, registry.Change{Put: []registry.Record{again,
		registry.LateCall{Plugin: "p", Node: "a", RPC: registry.DeleteVolumeRPC, For: "vol"}}})
	settled := func() bool {
		next := a.await(t, true)
		traffic()
		traffic = next
		return len(a.executor(t).Former) == 0
	}
	for range 50 {
		if settled() {
			t.Error("the calls are settled while an earlier one is under way")
		}
		time.Sleep(10 * time.Millisecond)
	}
	first()
	until(t, "the earlier calls are settled", settled)
	traffic()
	if late := a.lateCalls(t); len(late) > 0 || a.asked.Load() == 0 {
		t.Errorf("late calls %+v, repeated %d times", late, a.asked.Load())
	}
}

// TestCallThatBeginsWhileTheExecutorLeaves has a call begin while its node gives up the plugin. The node is a former
// executor until the plugin has answered the repeated call.
func TestCallThatBeginsWhileTheExecutorLeaves(t *testing.T) {
	client := parallelWithEtcd(t)
	n, other := newNode(t, client, "a"), newNode(t, client, "other")
	a := n.asMember(t)
	a.await(t, true)()
	a.busy.Store(true)
	open := registry.Intent{Volume: volumeOf("vol", "vol").VolumeKey(), RPC: registry.DeleteVolumeRPC,
		Senders: []registry.NodeName{"a"}}
	n.kv = calling(n.kv, func() {
		if _, err := registrytest.Write(t.Context(), other, registry.Change{Put: []registry.Record{open}}); err != nil {
			t.Error(err)
		}
	})
	a.setHealthy(false)
	a.await(t, false)
	if former := a.executor(t).Former; !slices.Equal(former, []registry.NodeName{"a"}) {
		t.Errorf("former executors are %v while the call runs", former)
	}
	a.busy.Store(false)
	until(t, "the hand-over", func() bool { return len(a.executor(t).Former) == 0 })
}

// TestManyCallsAreOpenAtATakeover ends many calls at the next executor, while each may still run at the former one.
// Their records are too many and too large for one request to etcd. Other calls for their volumes wait until the former
// executor has handed over or was fenced.
func TestManyCallsAreOpenAtATakeover(t *testing.T) {
	client := parallelWithEtcd(t)
	a := newMember(t, client, "a")
	a.resign(t)
	b := newMember(t, client, "b")
	b.await(t, true)()
	const calls = registry.Batch + 1
	for _, test := range []struct {
		size int // of the record of a call, in bytes
		end  func()
	}{
		{16000, func() { a.busy.Store(false) }},
		{1, func() {
			commit(t, b, registry.Change{Put: []registry.Record{b.executor(t).Left("a", time.Now())}})
		}},
	} {
		a.busy.Store(true)
		var opens []registry.Intent
		var records []registry.Record
		for i := range calls {
			v := volumeOf(fmt.Sprint("vol-", i), fmt.Sprint("vol-", i))
			v.Parameters = map[string]string{"text": strings.Repeat("x", test.size)}
			opens = append(opens, registry.Intent{
				Volume: v.VolumeKey(), Name: v.VolumeName(), RPC: registry.ControllerExpandRPC,
				Hash: "hash", Senders: []registry.NodeName{"a", "b"},
			})
			records = append(records, v, opens[i])
		}
		for batch := range slices.Chunk(records, batchSize) {
			commit(t, b, registry.Change{Put: batch})
		}
		executor := b.executor(t)
		executor.Former = []registry.NodeName{"a"}
		commit(t, b, registry.Change{Put: []registry.Record{executor}})
		var ends sync.WaitGroup
		for some := range slices.Chunk(opens, 20) {
			ends.Go(func() {
				for _, open := range some {
					if _, err := b.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
						change := registry.Change{Delete: []registry.Key{open.Key()}}
						return change.And(v.Ended(v.LateCallOf(open), open.Senders)), nil
					}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		ends.Wait()
		blocked := func() (is bool) {
			look(t, b, func(v registry.View) {
				e, _ := v.Executor("p")
				other := opens[7]
				other.RPC = registry.ControllerUnpublishRPC
				is = v.Blocks(e, other) != nil
				if v.Blocks(e, opens[7]) != nil {
					t.Error("the same call waits")
				}
			})
			return is
		}
		if n := len(b.lateCalls(t)); n != calls || !blocked() {
			t.Errorf("%d late calls of %d, blocked: %t", n, calls, blocked())
		}
		test.end()
		until(t, "no former executor", func() bool { return len(b.executor(t).Former) == 0 })
		if blocked() {
			t.Error("another call waits")
		}
		until(t, "the records are gone", func() bool { return len(b.lateCalls(t)) == 0 })
	}
}

// TestCallIsGivenUpWhileItsExecutorIsSuspect has another node give up a call of an executor that has lost its lease.
// Other calls for the volume wait until that node is back and its plugin has answered the call. This holds whether or
// not another node takes over before the call is given up.
func TestCallIsGivenUpWhileItsExecutorIsSuspect(t *testing.T) {
	t.Parallel()
	for _, takenOver := range []bool{false, true} {
		t.Run(fmt.Sprintf("taken over before: %t", takenOver), func(t *testing.T) { giveUpWhileSuspect(t, takenOver) })
	}
}

func giveUpWhileSuspect(t *testing.T, takenOver bool) {
	client := parallelWithEtcd(t)
	a := newMember(t, client, "a")
	a.busy.Store(true)
	a.await(t, true)()
	b := newMember(t, client, "b")
	if !takenOver {
		b.setHealthy(false)
	}
	v := volumeOf("vol", "vol")
	open := registry.Intent{Volume: v.VolumeKey(), Name: v.VolumeName(), RPC: registry.ControllerUnpublishRPC,
		Senders: []registry.NodeName{"a"}}
	commit(t, a, registry.Change{Put: []registry.Record{v, open}})
	a.cut()
	b.seeAlive(t, "a", false)
	if takenOver {
		b.await(t, true)()
	}
	if _, err := b.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
		change := registry.Change{Delete: []registry.Key{open.Key()}}
		return change.And(v.GivenUp(v.LateCallOf(open), open.Senders, "b")), nil
	}); err != nil {
		t.Fatal(err)
	}
	b.setHealthy(true)
	b.await(t, true)()
	next := open
	next.RPC, next.Senders = registry.DeleteVolumeRPC, nil
	blocked := func() (err error) {
		look(t, b, func(v registry.View) {
			e, _ := v.Executor("p")
			err = v.Blocks(e, next)
		})
		return err
	}
	if err := blocked(); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("another call: %v", err)
	}
	a.run(t, a.session.Run)
	until(t, "a repetition", func() bool { return a.asked.Load() > 0 })
	if err := blocked(); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("another call while the first one runs: %v", err)
	}
	a.busy.Store(false)
	until(t, "the hand-over", func() bool { return blocked() == nil })
}

// TestSendingWaitsForCommitsInDoubt asks whether a call may be sent while a commit of the node has no known outcome.
func TestSendingWaitsForCommitsInDoubt(t *testing.T) {
	a := newMember(t, parallelWithEtcd(t), "a")
	a.await(t, true)()
	doubts := a.doubts.Add(1)
	a.await(t, true)()
	if settled := a.settled.Load(); settled < doubts {
		t.Errorf("%d of %d commits are settled", settled, doubts)
	}
}

// TestRepetitionIsCheckedBeforeItIsSent changes the records after a node has decided to repeat a call.
func TestRepetitionIsCheckedBeforeItIsSent(t *testing.T) {
	a := newMember(t, parallelWithEtcd(t), "a")
	a.busy.Store(true) // so the node does not hand over
	a.makeFormer(t)
	open := registry.Intent{Volume: volumeOf("vol", "vol").VolumeKey(), Name: volumeOf("vol", "vol").VolumeName(),
		RPC: registry.DeleteVolumeRPC, Senders: []registry.NodeName{"a"}}
	call := registry.LateCall{Plugin: "p", Node: "a", RPC: open.RPC, For: open.Name.String()}
	refused := call
	refused.Failed = true
	executor := registry.Executor{Plugin: "p", Holder: "b", Former: []registry.NodeName{"a"}}
	check := func(state string, want error) {
		t.Helper()
		if err := a.Executors.Repeating(t.Context(), "p", call); !errors.Is(err, want) {
			t.Errorf("%s: %v", state, err)
		}
	}
	commit(t, a, registry.Change{Put: []registry.Record{open, executor}})
	check("it is open", nil)
	commit(t, a, registry.Change{Put: []registry.Record{call}, Delete: []registry.Key{open.Key()}})
	check("it has ended elsewhere", nil)
	commit(t, a, registry.Change{Put: []registry.Record{refused}})
	check("it was refused elsewhere", registry.ErrConflict)
	commit(t, a, registry.Change{Put: []registry.Record{open}, Delete: []registry.Key{call.Key()}})
	a.setHealthy(true)
	a.await(t, true)()
	check("the node is the executor again", registry.ErrConflict)
	a.cut()
	a.boot.Add(int64(2 * time.Second))
	check("the lease may have ended", registry.ErrUnavailable)
}
