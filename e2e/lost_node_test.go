package e2e

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"sync/atomic"
	"testing"

	bolt "go.etcd.io/bbolt"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/registry"
)

// fakeNodeID is the ID of every node at csifake.
const fakeNodeID = "node-1"

// leaveAttached makes the state say that volumes are attached to a node that nothing else is known of. No plugin runs.
func (e *env) leaveAttached(node registry.NodeName, volumes []string) {
	e.t.Helper()
	e.must(e.host.Close())
	e.changeState(func(tx *bolt.Tx) error {
		const bucket = "attachments"
		var tally struct {
			Records uint64 `json:"records"`
			Sum     uint64 `json:"sum"` // of checksums
		}
		var errs []error
		for _, id := range volumes {
			at := registry.Attachment{
				Volume: registry.VolumeKey{Plugin: "fake", External: registry.ExternalID(csifake.VolumeID(id))},
				Name:   volumeName(id), Node: node, NodeID: fakeNodeID, State: registry.MarkDone,
				CreateIndex: 1, ModifyIndex: 1,
			}
			text, err := json.Marshal(at)
			key := []byte(at.Key().Path)
			value := sealed(bucket, key, text)
			tally.Records, tally.Sum = tally.Records+1, tally.Sum+uint64(binary.BigEndian.Uint32(value))
			errs = append(errs, err, tx.Bucket([]byte(bucket)).Put(key, value))
		}
		text, err := json.Marshal(tally)
		key := []byte("tally:" + bucket)
		return errors.Join(append(errs, err, tx.Bucket([]byte("meta")).Put(key, sealed("meta", key, text)))...)
	})
	e.open()
}

// A volume is detached from a lost node only after the host has fenced it, and not if that fails. After a shim was
// killed in the middle, the node is fenced again before the call is repeated.
func TestLostNodeIsFencedBeforeItsVolumeIsDetached(t *testing.T) {
	t.Parallel()
	const rpc, fences = "ControllerUnpublishVolume", 3
	e := unopenedEnv(t, allCaps...)
	var fenced atomic.Int64
	var before [fences]int // calls that had begun when the node was fenced
	e.config.Fence = func(_ context.Context, node string) error {
		n := fenced.Add(1)
		calls, err := csifake.Calls(e.journal, rpc)
		if n <= fences {
			before[n-1] = len(calls)
		}
		switch {
		case node != lostNode || err != nil:
			t.Errorf("fence %s, %v", node, err)
		case n == 1:
			return errors.New("the power switch does not answer")
		}
		return nil
	}
	e.open()
	e.leaveAttached(lostNode, []string{"vol"})
	plugin := e.addPlugin("plugin", csifake.Monolith)
	detach := func() error {
		return errOf(e.host.DetachVolume(e.ctx(), volumeName("vol"), "", host.Force{By: "e2e"}))
	}
	e.wantWords("detach without a fence", detach(), "fence node lost", "the power switch does not answer")
	e.wantCalls(0)
	gate := plugin.On(rpc).Times(1).Hold()
	done := background(detach)
	<-gate.Arrived()
	e.replaceShimByKill()
	gate.Open()
	e.must(e.result("the detach", done))
	if err := detach(); !errors.Is(err, host.ErrNotFound) {
		t.Errorf("detach again: %v", err)
	}
	if n := fenced.Load(); n < fences || before != [fences]int{0, 0, 1} {
		t.Errorf("the node was fenced %d times, after so many calls: %v", n, before)
	}
	for _, c := range e.wantOneRequest(rpc, 2) {
		if c.Volume != csifake.VolumeID("vol") || c.Node != fakeNodeID {
			t.Errorf("%+v", c)
		}
	}
	e.stopPlugin(plugin)
}
