package alloc_test

import (
	"slices"
	"testing"
	"testing/synctest"

	"holdfast/registry"
)

// The result of a step and the intent of the next one are one transaction: what an alloc waits for on a machine that is busy is mostly the disk.
func TestStepsShareCommits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, 1)
		n.caps = []string{"STAGE_UNSTAGE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME"}
		n.startPlugin()
		n.startShim()
		n.introduce()
		var commits []registry.Change
		n.log.OnApplied(func(a registry.Applied) { commits = append(commits, a.Change) })
		if _, err := n.shim.allocs.Prepare(t.Context(), registry.Call{}, n.group("alloc-0", wish{volumes: []int{0}})); err != nil {
			t.Fatal(err)
		}
		compare(t, "up", commits, []string{"preparing, claimed", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume", "ready"})
		commits = nil
		if err := n.shim.allocs.Release(t.Context(), registry.Call{}, "alloc-0"); err != nil {
			t.Fatal(err)
		}
		compare(t, "down", commits, []string{"releasing", "NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "gone"})
		n.settle()
		n.judge()
	})
}

// compare holds commits against what each is about.
func compare(t *testing.T, what string, commits []registry.Change, want []string) {
	t.Helper()
	var got []string
	for _, c := range commits {
		got = append(got, about(c))
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s: commits are %q, want %q", what, got, want)
	}
}

// about is the call that a commit opens, or else what it says of the alloc.
func about(c registry.Change) (what string) {
	for _, r := range c.Put {
		switch r := r.(type) {
		case registry.Intent:
			return string(r.RPC)
		case registry.Alloc:
			what = string(r.State)
		case registry.Claim:
			what += ", claimed"
		}
	}
	if slices.Contains(c.Delete, registry.AllocRecord("alloc-0")) {
		what += "gone"
	}
	return what
}
