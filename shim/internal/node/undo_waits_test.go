package node_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
)

// A release finds a stage that an earlier shim has left at its plugin. It is undone after its end and not beside it; at
// once if the plugin was started anew; and beside it only if it has no end within a round.
func TestNothingIsUndoneThatStillRuns(t *testing.T) {
	for what, c := range map[string]struct {
		stage       csifake.Rule
		anew        bool // the plugin is started anew
		least, most time.Duration
		beside      bool // the undo is sent beside it
	}{
		"it is long": {csifake.Rule{Delay: csifake.Duration(20 * time.Second)}, false, 15 * time.Second,
			28 * time.Second, false},
		"its plugin has ended": {csifake.Rule{Delay: csifake.Duration(20 * time.Second)}, true, 0, 2 * time.Second,
			false},
		"it has no end in time": {csifake.Rule{Delay: csifake.Duration(time.Minute)}, false, 30 * time.Second,
			2 * time.Minute, true},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newHistoryEnv(t, 1)
				n.caps = []string{"STAGE_UNSTAGE_VOLUME"}
				n.startPlugin()
				n.startShim()
				n.introduce()
				c.stage.RPC, c.stage.Times = "NodeStageVolume", 1
				if err := n.plugin.Load().Script(c.stage); err != nil {
					t.Fatal(err)
				}
				first, group := n.shim, n.group("alloc-0", wish{volumes: []int{0}})
				n.allocs.Go(func() { _, _ = first.allocs.Prepare(first.ctx, registry.Call{}, group) })
				time.Sleep(time.Second)
				n.crash()
				if c.anew {
					n.plugin.Load().end(true)
					n.startPlugin()
				}
				n.startShim()
				if c.anew {
					n.removed()
				}
				n.introduce()
				began := time.Now()
				if err := n.shim.allocs.Release(n.shim.ctx, registry.Call{}, "alloc-0"); err != nil {
					t.Error(err)
				}
				if took := time.Since(began); took < c.least || took > c.most {
					t.Errorf("it was released after %v", took)
				}
				if found := journal.Check(n.journal.Lines(),
					journal.Options{Strict: true}); len(found) > 0 != c.beside {
					t.Errorf("the journal: %v", found)
				}
				n.settle()
				n.judge()
			})
		})
	}
}

// removed has the plugin's instances deregistered, as the end of its task does.
func (n *historyEnv) removed() {
	_, err := n.log.Commit(context.Background(), func(v registry.View) (registry.Change, error) {
		return registry.RemoveTaskChange(v, time.Now(), registry.TaskKey{Alloc: "plugin", Task: "p"}), nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
}
