package cluster

import (
	"fmt"
	"testing"

	"github.com/hashicorp/go-hclog"

	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/controller"
)

// TestDecisionThatReadsManyRecords reads more single records than a transaction of etcd can have conditions. If one of
// them changes, the decision is made again.
func TestDecisionThatReadsManyRecords(t *testing.T) {
	const count = 300
	client := parallelWithEtcd(t)
	n, other := newNode(t, client, "node"), newNode(t, client, "other")
	var records []registry.Record
	for i := range count {
		records = append(records, volumeOf(fmt.Sprint("v-", i), fmt.Sprint("v-", i)))
	}
	registrytest.Put(t, n, records...)
	calls := 0
	_, err := n.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
		var capacity int64
		for i := range count {
			key := registry.VolumeKey{Plugin: "p", External: registry.ExternalID(fmt.Sprint("v-", i))}
			read, _ := v.VolumeByKey(key)
			capacity += read.Capacity
		}
		if calls++; calls == 1 {
			changed := records[count-1].(registry.Volume)
			changed.Capacity = 4711
			registrytest.Put(t, other, changed)
		}
		sum := volumeOf("sum", "sum")
		sum.Capacity = capacity
		return registry.Change{Put: []registry.Record{sum}}, nil
	})
	if err != nil || calls != 2 {
		t.Errorf("%d decisions, %v", calls, err)
	}
	look(t, n, func(v registry.View) {
		if sum, _ := v.Volume(volumeOf("sum", "").VolumeName()); sum.Capacity != 4711 {
			t.Errorf("the decision has read %d", sum.Capacity)
		}
	})
}

// hereOnly is the controller's view of a node that does not use the volume.
type hereOnly struct{ controller.Node }

func (hereOnly) Name() registry.NodeName { return "n" }

// TestVolumeIsDetachedFromManyNodes takes down more attachments of a volume than etcd changes in one transaction.
func TestVolumeIsDetachedFromManyNodes(t *testing.T) {
	n := newNode(t, parallelWithEtcd(t), "n")
	v := volumeOf("vol", "vol")
	records := []registry.Record{v}
	for i := range 300 {
		at := registry.NodeName(fmt.Sprint("node-", i))
		records = append(records, registry.Attachment{Volume: v.VolumeKey(), Name: v.VolumeName(), Node: at,
			NodeID: registry.NodeID(at), State: registry.MarkDone})
	}
	registrytest.Put(t, n, records...)
	calls := callsOf(n.State)
	calls.Node = "n"
	c := controller.New(calls, nil, hereOnly{}, hclog.NewNullLogger())
	force := registry.Force{By: "ada", Confirm: "vol"}
	if _, err := c.DetachVolume(t.Context(), registry.Call{}, v.VolumeName(), "", force); err != nil {
		t.Fatal(err)
	}
	look(t, n, func(v registry.View) {
		if left := v.AllAttachments(); len(left) > 0 {
			t.Errorf("%d attachments are left", len(left))
		}
	})
}

// TestLostNodeHasExecutedManyPlugins declares a node out of service that is the executor of more plugins than etcd
// changes in one transaction.
func TestLostNodeHasExecutedManyPlugins(t *testing.T) {
	client := parallelWithEtcd(t)
	a := newMember(t, client, "a")
	records := []registry.Record{registry.Node{Name: "gone", State: registry.NodeReady}}
	for i := range 300 {
		plugin := registry.PluginID(fmt.Sprint("p-", i))
		records = append(records, registry.Executor{Plugin: plugin, Holder: "gone", Term: 1})
	}
	registrytest.Put(t, a, records...)
	if r, err := a.OutOfService(t.Context(), "gone", "ada", ""); err != nil || r.State != registry.NodeOutOfService {
		t.Fatalf("%v, %v", r, err)
	}
	look(t, a, func(v registry.View) {
		if left := executorFor(v, "gone"); len(left) > 0 {
			t.Errorf("the node still has %v", left)
		}
		events, _ := v.Events(0, 1000)
		declared := 0
		for _, e := range events {
			if e.Kind == registry.EventNodeOutOfService {
				declared++
			}
		}
		if declared != 1 {
			t.Errorf("declared %d times", declared)
		}
	})
}
