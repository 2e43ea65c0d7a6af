package e2e

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

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

// forcedLife is a volume whose release fails until it is forced.
func (tr *traffic) forcedLife(id string) {
	tr.lives.RLock()
	defer tr.lives.RUnlock()
	h, name := tr.host, volumeName(id)
	group := host.AllocGroup{}
	if !tr.call("", nil, func(ctx context.Context) error { return createText(ctx, h, volumeText("fake", id, "")) }) ||
		!tr.call("Parse", nil, func(ctx context.Context) (err error) {
			group, err = parseGroup(ctx, h, "alloc-"+id, groupText(request{source: id}))
			return err
		}) ||
		!tr.call("PrepareAlloc", nil, func(ctx context.Context) error { return errOf(h.PrepareAlloc(ctx, group)) }) {
		return
	}
	var forced atomic.Bool
	tr.plugin.On("NodeUnpublishVolume").Volume(csifake.VolumeID(id)).Answer(
		func(_ context.Context, _, reply proto.Message, err error) (proto.Message, error) {
			if !forced.Load() {
				return nil, status.Error(codes.Unavailable, "not before the force")
			}
			return reply, err
		})
	limited, cancel := context.WithTimeout(context.WithoutCancel(tr.stopped), waitLimit)
	defer cancel()
	released := background(func() error { return h.ReleaseAlloc(limited, group.Alloc) })
	isForced := background(func() error {
		err := h.Watch(limited, host.WatchOptions{}, func(event host.Event) error {
			if event.Kind == registry.EventForced && event.Alloc == group.Alloc {
				return errForced
			}
			return nil
		})
		forced.Store(true)
		return err
	})
	tr.waitUntil(id+" is being released", func() bool {
		list, _, err := h.Allocs(limited, host.AllocQuery{ID: group.Alloc})
		return err == nil && len(list) == 1 && list[0].State == registry.AllocReleasing
	})
	tr.call("ForceReleaseAlloc", nil, func(ctx context.Context) error {
		return errOf(h.ForceReleaseAlloc(ctx, group.Alloc, host.Force{By: "e2e", Confirm: string(group.Alloc)}))
	})
	if err := tr.result("the event of "+id, isForced); !errors.Is(err, errForced) {
		tr.t.Errorf("%s: no event says that the release is forced: %v", id, err)
	}
	if err := tr.result("the release of "+id, released); err != nil {
		tr.t.Errorf("%s: the release ended with %v", id, err)
	}
	tr.call("", nil, func(ctx context.Context) error { return h.DeleteVolume(ctx, name) })
}

var errForced = errors.New("the release is forced")

// lostNode is a node with attachments that nothing uses.
const lostNode = "lost"

func lostVolume(n int) string { return fmt.Sprintf("lost-%d", n) }

// lostVolumes names more volumes than one test detaches.
func lostVolumes() (ids []string) {
	for n := range 500 {
		ids = append(ids, lostVolume(n))
	}
	return ids
}

// detachLost detaches a volume from the lost node. Its pause makes lostVolumes last.
func (tr *traffic) detachLost(n int) {
	tr.call("DetachVolume", nil, func(ctx context.Context) error {
		return errOf(tr.host.DetachVolume(ctx, volumeName(lostVolume(n)), lostNode, host.Force{By: "e2e"}))
	})
	sleep(tr.stopped, time.Second)
}
