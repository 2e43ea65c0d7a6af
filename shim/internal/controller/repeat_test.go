package controller

import (
	"context"
	"errors"
	"testing"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// lateCalls are calls for a volume that a former executor has begun.
func lateCalls() map[string]registry.LateCall {
	v := ready()
	v.Expansion = registry.Expansion{Asked: registry.CapacityRange{Required: 2 << 30}, Usage: usage()}
	v.Modification.Asked = map[string]string{"tier": "hot"}
	made := ready()
	made.State, made.External = registry.VolumeCreating, ""
	at := registry.Attachment{Volume: key, Name: name, Node: "n1", NodeID: "i-1", State: registry.MarkSent, Usage: usage()}
	calls := map[string]registry.LateCall{"CreateVolume": {For: name.String(), Node: "n1", RPC: registry.CreateVolumeRPC,
		Hash: asked(made), Volume: &made}}
	for rpc, request := range map[registry.RPC]any{
		registry.DeleteVolumeRPC:        csi.DeleteRequest{VolumeID: key.External},
		registry.ControllerUnpublishRPC: csi.DetachRequest{VolumeID: key.External, Node: at.NodeID},
		registry.ControllerExpandRPC: csi.ExpandRequest{VolumeID: key.External, Range: v.Expansion.Asked,
			Usage: v.Expansion.Usage},
		registry.ControllerModifyRPC: csi.ModifyRequest{VolumeID: key.External, Mutable: v.Modification.Asked},
	} {
		calls[string(rpc)] = registry.LateCall{For: name.String(), Node: "n1", RPC: rpc, Hash: intent.Hash(rpc, request),
			Volume: &v, Attachment: &at}
	}
	return calls
}

// updatedSince is the volume after the late calls: it was updated since, and is to be deleted.
func updatedSince() registry.Volume {
	v := ready()
	v.State, v.MountFlags = registry.VolumeDeleting, "noatime"
	return v
}

// TestOnlyAnAnswerEndsALateCall repeats calls of a former executor. Such a call has ended once the plugin has answered it,
// but not if the plugin was not reached, or did not look at the volume. An update of the volume does not change the call.
func TestOnlyAnAnswerEndsALateCall(t *testing.T) {
	for rpc, late := range lateCalls() {
		for _, c := range []struct {
			answer fault
			ended  bool
		}{
			{fault{}, true},
			{failed("FAILED_PRECONDITION"), true},
			{failed("UNAVAILABLE"), false}, // not sent
			{failed("PERMISSION_DENIED"), false},
			{uncertain("ABORTED", false), false},
		} {
			d := open(t, of(registry.CreateDelete), updatedSince())
			d.faults = []fault{c.answer}
			instance, _ := d.Controller.Plugins.Find(registry.RoleController, "ebs")
			err := d.Controller.Repeat(t.Context(), instance, late)
			if len(d.journal) != 1 || (err == nil) != c.ended {
				t.Errorf("%s with %q as the answer: %q, %v", rpc, c.answer.code, d.journal, err)
			}
		}
	}
}

// moved is what executors are to a node while the records of its calls change.
type moved struct{ intent.Executors }

func (moved) Repeating(context.Context, registry.PluginID, registry.LateCall) error {
	return registry.Errorf(registry.ErrConflict, "its records have changed")
}

// TestLateCallIsNotSentAgainstTheRecords has the records of a late call change before it is sent again.
func TestLateCallIsNotSentAgainstTheRecords(t *testing.T) {
	for rpc, late := range lateCalls() {
		d := open(t, of(registry.CreateDelete), updatedSince())
		d.Controller.Executors = moved{}
		instance, _ := d.Controller.Plugins.Find(registry.RoleController, "ebs")
		if err := d.Controller.Repeat(t.Context(), instance, late); !errors.Is(err, registry.ErrConflict) {
			t.Errorf("%s: %v", rpc, err)
		}
		d.expect()
	}
}

// TestNoSnapshotIsMadeWithoutARecord repeats the creation of a snapshot that has a record, and of one that was deregistered.
func TestNoSnapshotIsMadeWithoutARecord(t *testing.T) {
	snap := registry.VolumeSnapshot{SnapshotSpec: snapSpec, Plugin: key.Plugin, Source: key.External,
		State: registry.SnapshotCreating}
	snap.Name = "s1"
	d := openSnapshots(t, of(), answer(snapReady))
	d.desk.put(snap)
	instance, _ := d.desk.Controller.Plugins.Find(registry.RoleController, key.Plugin)
	if err := d.Snapshots.Repeat(t.Context(), instance, lateSnapshot(snap)); err != nil {
		t.Error(err)
	}
	d.wantJournal(createCall)
	d.desk.drop(snap.Key())
	if err := d.Snapshots.Repeat(t.Context(), instance, lateSnapshot(snap)); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("without a record: %v", err)
	}
	d.wantJournal()
}
