package cluster

import (
	"errors"
	"slices"
	"testing"
	"time"

	"holdfast/internal/etcdtest"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// TestFormerExecutorHandsOverWithEvidence has a call of a former executor run on at its plugin. The node hands over once
// the plugin has answered the same call, or has exited. It makes no difference whether the call has ended at the next
// executor.
func TestFormerExecutorHandsOverWithEvidence(t *testing.T) {
	a := newExecuting(t, newNode(t, etcdtest.Start(t), "a"))
	a.setHealthy(false)
	key := volumeOf("vol", "vol").VolumeKey()
	open := registry.Intent{Volume: key, RPC: registry.DeleteVolumeRPC, Senders: []registry.NodeName{"a", "b"}}
	open.Volume.Plugin = "p"
	late := registry.LateCall{Node: "a", RPC: registry.DeleteVolumeRPC, For: "default/vol"}
	for name, test := range map[string]struct {
		late []registry.LateCall
		open []registry.Record
		end  func()
	}{
		"an answer":                {[]registry.LateCall{late}, nil, func() { a.busy.Store(false) }},
		"an answer to an open one": {nil, []registry.Record{open}, func() { a.busy.Store(false) }},
		"the plugin exits":         {nil, []registry.Record{open}, func() { a.plugins.exited.Store(true); a.Executors.changed.fire() }},
	} {
		a.busy.Store(true)
		a.plugins.exited.Store(false)
		asked := a.asked.Load()
		executor := registry.Executor{Plugin: "p", Holder: "b", Former: []registry.NodeName{"a"}, Late: test.late}
		put(t, a, registry.Change{Put: append(test.open, executor)})
		until(t, name, func() bool { return a.asked.Load() > asked })
		if e := a.executor(t); len(e.Former) != 1 || len(e.Late) != len(test.late) {
			t.Errorf("%s: %+v while the call runs", name, e)
		}
		test.end()
		until(t, name, func() bool { e := a.executor(t); return len(e.Former)+len(e.Late) == 0 })
		if len(test.open) > 0 {
			put(t, a, registry.Change{Delete: []registry.Key{open.Key()}})
		}
	}
}

// TestOneLateCallHoldsUpNoOther repeats two late calls of a former executor. One of them is refused; the other is handed over.
func TestOneLateCallHoldsUpNoOther(t *testing.T) {
	a := newExecuting(t, newNode(t, etcdtest.Start(t), "a"))
	a.setHealthy(false)
	refused := registry.LateCall{Node: "a", RPC: registry.DeleteVolumeRPC, For: "default/refused", Failed: true}
	answered := registry.LateCall{Node: "a", RPC: registry.ControllerPublishRPC, For: "default/answered"}
	elsewhere := answered
	elsewhere.Node = "c"
	put(t, a, registry.Change{Put: []registry.Record{registry.Executor{Plugin: "p", Holder: "b",
		Former: []registry.NodeName{"a", "c"}, Late: []registry.LateCall{refused, answered, elsewhere}}}})
	late := func(want ...registry.LateCall) bool { return slices.EqualFunc(a.executor(t).Late, want, sameCall) }
	until(t, "the end of the other call", func() bool { return late(refused, elsewhere) })
	if former := a.executor(t).Former; len(former) != 2 {
		t.Errorf("former executors are %v", former)
	}
	a.plugins.exited.Store(true)
	a.Executors.changed.fire()
	until(t, "the end of both", func() bool { return late(elsewhere) && len(a.executor(t).Former) == 1 })
}

func sameCall(a, b registry.LateCall) bool { return a.Node == b.Node && a.Same(b) }

// TestCallThatBeginsWhileTheExecutorLeaves has a call begin while its node gives up the plugin. The node is a former
// executor until the plugin has answered the call once more.
func TestCallThatBeginsWhileTheExecutorLeaves(t *testing.T) {
	client := etcdtest.Start(t)
	n, other := newNode(t, client, "a"), newNode(t, client, "other")
	a := newExecuting(t, n)
	a.await(t, true)()
	a.busy.Store(true)
	open := registry.Intent{Volume: volumeOf("vol", "vol").VolumeKey(), RPC: registry.DeleteVolumeRPC,
		Senders: []registry.NodeName{"a"}}
	open.Volume.Plugin = "p"
	n.kv = &late{KV: n.kv, before: func() {
		if _, err := registrytest.Write(t.Context(), other, registry.Change{Put: []registry.Record{open}}); err != nil {
			t.Error(err)
		}
	}}
	a.setHealthy(false)
	a.await(t, false)
	if former := a.executor(t).Former; !slices.Equal(former, []registry.NodeName{"a"}) {
		t.Errorf("former executors are %v while the call runs", former)
	}
	a.busy.Store(false)
	until(t, "the hand-over", func() bool { return len(a.executor(t).Former) == 0 })
}

// TestRepetitionIsCheckedBeforeItIsSent changes the records after a node has decided to repeat a call.
func TestRepetitionIsCheckedBeforeItIsSent(t *testing.T) {
	a := newExecuting(t, newNode(t, etcdtest.Start(t), "a"))
	a.busy.Store(true) // it never hands over
	a.await(t, true)()
	a.setHealthy(false)
	a.await(t, false)
	open := registry.Intent{Volume: volumeOf("vol", "vol").VolumeKey(), Name: volumeOf("vol", "vol").VolumeName(),
		RPC: registry.DeleteVolumeRPC, Senders: []registry.NodeName{"a"}}
	open.Volume.Plugin = "p"
	call := registry.LateCall{Node: "a", RPC: open.RPC, For: open.Name.String()}
	refused := call
	refused.Failed = true
	executor := registry.Executor{Plugin: "p", Holder: "b", Former: []registry.NodeName{"a"}}
	check := func(state string, want error) {
		t.Helper()
		if err := a.Repeating(t.Context(), "p", call); !errors.Is(err, want) {
			t.Errorf("%s: %v", state, err)
		}
	}
	put(t, a, registry.Change{Put: []registry.Record{open, executor}})
	check("it is open", nil)
	executor.Late = []registry.LateCall{call}
	put(t, a, registry.Change{Put: []registry.Record{executor}, Delete: []registry.Key{open.Key()}})
	check("it has ended elsewhere", nil)
	executor.Late = []registry.LateCall{refused}
	put(t, a, registry.Change{Put: []registry.Record{executor}})
	check("it was refused elsewhere", registry.ErrConflict)
	executor.Late = nil
	put(t, a, registry.Change{Put: []registry.Record{open, executor}})
	a.setHealthy(true)
	a.await(t, true)()
	check("the node is the executor again", registry.ErrConflict)
	a.cut()
	a.boot.Add(int64(2 * time.Second))
	check("the lease may have ended", registry.ErrUnavailable)
}

func put(t *testing.T, x *executing, change registry.Change) {
	t.Helper()
	if _, err := x.testNode.State.Commit(t.Context(), func(registry.View) (registry.Change, error) {
		return change, nil
	}); err != nil {
		t.Fatal(err)
	}
}

func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}
