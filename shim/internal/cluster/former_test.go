package cluster

import (
	"testing"
	"time"

	"holdfast/internal/etcdtest"
	"holdfast/registry"
)

// TestFormerExecutorHandsOverWithEvidence has a call of a former executor run on at its plugin. The node hands over once
// the plugin has answered the same call, or has exited; an open call and one that has ended elsewhere are alike.
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
