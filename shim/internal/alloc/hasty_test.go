package alloc_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
)

// A release finds a stage that may still run: cut off by its caller, or by the end of its shim. It is undone after its end and not beside it, however
// long it takes; and at once if its plugin was started anew.
func TestNothingIsUndoneThatStillRuns(t *testing.T) {
	const runs = time.Minute
	for what, c := range map[string]struct {
		meanwhile   func(n *node)
		least, most time.Duration // until the volume is released
		again       int           // how often the stage is asked for again
	}{
		"the alloc is not wanted any more": {func(*node) {}, runs, 2 * runs, 20},
		"the shim has died":                {func(n *node) { n.crash(); n.startShim(); n.introduce() }, runs, 2 * runs, 20},
		"the plugin was started anew":      {func(n *node) { n.plugin.Load().end(true); n.startPlugin(); n.removed(); n.introduce() }, 0, runs / 2, 0},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := newNode(t, 0)
				n.caps = []string{"STAGE_UNSTAGE_VOLUME"}
				n.startPlugin()
				n.startShim()
				n.introduce()
				if err := n.plugin.Load().Script(csifake.Rule{RPC: "NodeStageVolume", Times: 1, Delay: csifake.Duration(runs)}); err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, errors.New("it is not wanted any more"))
				defer cancel()
				if _, err := n.shim.allocs.Prepare(ctx, registry.Call{}, n.group("alloc-0", wish{volumes: []int{0}})); err == nil {
					t.Fatal("it was prepared")
				}
				began := time.Now()
				c.meanwhile(n)
				if err := n.shim.allocs.Release(n.shim.ctx, registry.Call{}, "alloc-0"); err != nil {
					t.Error(err)
				}
				if took := time.Since(began); took < c.least-time.Second || took > c.most {
					t.Errorf("it was released after %v", took)
				}
				staged := slices.DeleteFunc(journal.Calls(n.journal.Lines()), func(c journal.Call) bool { return c.RPC != "NodeStageVolume" })
				if again := len(staged) - 1; again > c.again {
					t.Errorf("the stage was asked for %d times more", again)
				}
				n.settle()
				n.judge()
			})
		})
	}
}

// removed has the plugin's instances deregistered, as the end of its task does.
func (n *node) removed() {
	_, err := n.log.Commit(context.Background(), func(v registry.View) (registry.Change, error) {
		return registry.RemoveTaskChange(v, time.Now(), registry.TaskKey{Alloc: "plugin", Task: "p"}), nil
	})
	if err != nil {
		n.t.Fatal(err)
	}
}
