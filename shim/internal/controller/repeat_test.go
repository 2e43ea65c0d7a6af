package controller

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// lateCalls returns calls for a volume that a former executor has begun.
func lateCalls() map[string]registry.LateCall {
	v := ready()
	v.Expansion = registry.Expansion{Asked: registry.CapacityRange{Required: 2 << 30}, Usage: usage()}
	v.Modification.Asked = map[string]string{"tier": "hot"}
	made := ready()
	made.State, made.External = registry.VolumeCreating, ""
	at := registry.Attachment{
		Volume: key, Name: name, Node: "n1", NodeID: "i-1", State: registry.MarkSent, Usage: usage(),
	}
	calls := map[string]registry.LateCall{"CreateVolume": {
		For: name.String(), Node: "n1", RPC: registry.CreateVolumeRPC, Hash: createHash(made), Volume: &made,
	}}
	for rpc, request := range map[registry.RPC]any{
		registry.DeleteVolumeRPC:        csi.DeleteRequest{VolumeID: key.External},
		registry.ControllerUnpublishRPC: csi.DetachRequest{VolumeID: key.External, Node: at.NodeID},
		registry.ControllerExpandRPC: csi.ExpandRequest{VolumeID: key.External, Range: v.Expansion.Asked,
			Usage: v.Expansion.Usage},
		registry.ControllerModifyRPC: csi.ModifyRequest{VolumeID: key.External, Mutable: v.Modification.Asked},
	} {
		calls[string(rpc)] = registry.LateCall{
			For: name.String(), Node: "n1", RPC: rpc, Hash: intent.Hash(rpc, request), Volume: &v, Attachment: &at,
		}
	}
	return calls
}

// updatedSince returns the volume after the late calls: it was updated, and is to be deleted.
func updatedSince() registry.Volume {
	v := ready()
	v.State, v.MountFlags = registry.VolumeDeleting, "noatime"
	return v
}

// TestOnlyAnAnswerEndsALateCall repeats calls of a former executor. A call has ended once the plugin has answered it.
// It has not ended if the plugin was not reached, or did not look at the volume. An update of the volume does not
// change the call.
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
			{uncertain("INTERNAL", false), true},
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

// moved is an Executors for which the records of each call have changed.
type moved struct{ intent.Executors }

func (moved) Repeating(context.Context, registry.PluginID, registry.LateCall) error {
	return registry.Errorf(registry.ErrConflict, "its records have changed")
}

// TestLateCallIsNotSentAgainstTheRecords changes the records of a late call before the call is sent again.
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
	newer := lateCalls()["ControllerExpandVolume"]
	newer.RPC = "ControllerFutureVolume"
	d := open(t, of(registry.CreateDelete), updatedSince())
	wantErr(t, "a call of a newer shim", d.Controller.Repeat(t.Context(), registry.Instance{}, newer),
		registry.ErrUnsupported, "does not know the call")
}

// TestNoSnapshotIsMadeWithoutARecord repeats the creation of a snapshot with a record. It is not repeated for a
// snapshot that was deregistered.
func TestNoSnapshotIsMadeWithoutARecord(t *testing.T) {
	snap := registry.VolumeSnapshot{SnapshotSpec: snapSpec, Plugin: key.Plugin, Source: key.External,
		State: registry.SnapshotCreating}
	snap.Name = "s1"
	d := openSnapshots(t, of(), answer(snapReady))
	d.desk.put(snap)
	instance, _ := d.desk.Controller.Plugins.Find(registry.RoleController, key.Plugin)
	noErr(t, "", d.Snapshots.Repeat(t.Context(), instance, lateSnapshot(snap)))
	d.wantJournal(createCall)
	d.desk.drop(snap.Key())
	wantErr(t, "without a record", d.Snapshots.Repeat(t.Context(), instance, lateSnapshot(snap)),
		registry.ErrConflict, "")
	d.wantJournal()
}

// asRecorded takes each node for the executor that the record names.
type asRecorded struct{ intent.Executors }

func (asRecorded) Check(v registry.View, by registry.ExecutorKey) (registry.Executor, error) {
	executor, _ := v.Executor(by.Plugin)
	return executor, nil
}

func (asRecorded) OneInstance(registry.PluginID) bool { return true }

func (asRecorded) Sending(context.Context, registry.ExecutorKey) (done func(), err error) {
	return func() {}, nil
}

var takenOver = registry.Executor{Plugin: key.Plugin, Holder: "n2", Former: []registry.NodeName{"n1"}}

// wantLate compares the late calls of the former executor, and their field Failed.
func (d *desk) wantLate(want ...string) {
	d.t.Helper()
	var got []string
	if err := d.log.View(d.t.Context(), func(v registry.View) error {
		for _, late := range v.LateCalls(key.Plugin, "n1") {
			got = append(got, fmt.Sprintf("%s of %s, failed: %t", late.RPC, late.For, late.Failed))
		}
		return nil
	}); err != nil || !slices.Equal(got, want) {
		d.t.Errorf("late calls %q, want %q: %v", got, want, err)
	}
}

// TestCallThatIsGivenUpMayRunAtTheFormerExecutor gives up open calls that a former executor has begun. Other calls wait
// until these have ended.
func TestCallThatIsGivenUpMayRunAtTheFormerExecutor(t *testing.T) {
	v := ready()
	v.Expansion = registry.Expansion{Asked: registry.CapacityRange{Required: 2 << 30}, Usage: usage()}
	expansion := registry.Intent{
		Volume: key, Name: name, RPC: registry.ControllerExpandRPC, Hash: "h", Code: "INTERNAL",
		Outcome: registry.OutcomeUncertain, Senders: []registry.NodeName{"n1", "n2"},
	}
	d := open(t, of(registry.CreateDelete, registry.AttachDetach), v, takenOver, expansion, attachedTo("n3"))
	d.Controller.Executors = asRecorded{}
	if left, err := d.LeaveAlteration(t.Context(), key); !left || err != nil {
		t.Errorf("%t, %v", left, err)
	}
	d.wantLate("ControllerExpandVolume of data, failed: false")
	wantErr(t, "the detach", d.Controller.Detach(t.Context(), by, key, "n3"), registry.ErrUnavailable, "")
	d.expect()

	for _, rpc := range []registry.RPC{registry.ControllerPublishRPC, registry.ControllerUnpublishRPC} {
		attaching, at := expansion, attachedTo("n3")
		attaching.RPC, attaching.Node, at.State = rpc, at.NodeID, registry.MarkSent
		d = open(t, of(registry.CreateDelete, registry.AttachDetach), v, takenOver, attaching, at)
		d.Controller.Executors = asRecorded{}
		noErr(t, "", d.Abandon(t.Context(), at.AttachmentKey(), registry.Forced{By: "ada"}, "its plugin is gone"))
		d.wantLate(string(rpc) + " of data, failed: false")
		instance, _ := d.Controller.Plugins.Find(registry.RoleController, key.Plugin)
		var late registry.LateCall
		if err := d.log.View(t.Context(), func(v registry.View) error {
			late = v.LateCalls(key.Plugin, "n1")[0]
			return v.Blocks(takenOver, registry.Intent{Volume: key, Name: name, RPC: registry.DeleteVolumeRPC})
		}); !errors.Is(err, registry.ErrUnavailable) {
			t.Errorf("another call after %s was abandoned: %v", rpc, err)
		}
		if rpc == registry.ControllerPublishRPC { // if repeated, it would attach without a record
			wantErr(t, "an abandoned attachment is repeated", d.Controller.Repeat(t.Context(), instance, late),
				registry.ErrConflict, "")
		}
		d.expect()
	}

	deletion := expansion
	deletion.RPC = registry.DeleteVolumeRPC
	v.State = registry.VolumeDeleting
	d = open(t, of(), v, takenOver, deletion)
	d.Controller.Executors = asRecorded{}
	noErr(t, "", d.Controller.Deregister(t.Context(), name))
	d.wantLate("DeleteVolume of data, failed: true")

	for state, rpc := range map[registry.SnapshotState]string{registry.SnapshotDeleting: "DeleteSnapshot",
		registry.SnapshotCreating: "CreateSnapshot", registry.SnapshotReady: ""} {
		snap := registry.VolumeSnapshot{SnapshotSpec: snapSpec, Plugin: key.Plugin, Source: key.External, State: state,
			Senders: []registry.NodeName{"n1"}}
		s := openSnapshots(t, of())
		s.put(snap, takenOver)
		s.desk.Controller.Executors = asRecorded{}
		noErr(t, "", s.Deregister(t.Context(), call, snapName))
		if rpc == "" {
			s.wantLate()
		} else {
			s.wantLate(rpc + " of snapshot default/s1, failed: true")
		}
	}
}

// TestSnapshotAndChangesOfItsVolumeExcludeEachOther lets a former executor begin a snapshot or an expansion of a
// volume. The next executor waits before it sends the other kind of call for the volume.
func TestSnapshotAndChangesOfItsVolumeExcludeEachOther(t *testing.T) {
	snap := registry.VolumeSnapshot{SnapshotSpec: snapSpec, Plugin: key.Plugin, Source: key.External,
		State: registry.SnapshotCreating, Senders: []registry.NodeName{"n1", "n2"}}
	snap.Name = "s1"
	snap.Failure.Code = "INTERNAL" // the answer to the executor's own call
	taking := lateSnapshot(snap)
	taking.Node = "n1"
	expansion := registry.Intent{Volume: key, Name: name, RPC: registry.ControllerExpandRPC, Code: "INTERNAL",
		Outcome: registry.OutcomeUncertain, Senders: []registry.NodeName{"n1"}}
	v := ready()
	expanding := registry.LateCall{Plugin: key.Plugin, For: name.String(), Node: "n1", RPC: expansion.RPC, Volume: &v}
	caps := of(registry.CreateDelete, registry.CreateSnapshot, registry.ControllerExpand, registry.ExpandsOffline,
		registry.AttachDetach)
	for what, begun := range map[string]registry.Record{"a late snapshot": taking, "an open snapshot": snap,
		"a late expansion": expanding, "an open expansion": expansion} {
		for _, executor := range []registry.Executor{takenOver, takenOver.Settled("n1")} {
			d := openSnapshots(t, caps, answer(snapReady))
			d.put(begun, executor, attachedTo("n3"))
			d.desk.Controller.Executors = asRecorded{}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			waits, err := len(executor.Former) > 0, error(nil)
			if strings.Contains(what, "expansion") {
				_, err = d.Snapshots.Create(ctx, call, snapSpec)
			} else {
				if err := d.desk.Controller.Detach(ctx, by, key, "n3"); err != nil {
					t.Errorf("a detach during %s: %v", what, err)
				}
				d.desk.expect("ControllerUnpublishVolume vol-data i-n3")
				_, err = d.desk.Controller.Expand(ctx, call, name, upTo(2<<30, 0))
			}
			sent := len(d.plugin.journal)+len(d.desk.journal) > 0
			named := err != nil && strings.Contains(err.Error(), "node n1 has begun")
			if named != waits || sent == waits {
				t.Errorf("during %s, waits: %t: %v, %q%q", what, waits, err, d.plugin.journal, d.desk.journal)
			}
		}
	}
}

// TestAnsweredCallWaitsForTheOneThatMayRun decides about an open snapshot and an open expansion of a former executor.
// If the plugin there has answered one of them with an error, only the other one is repeated. If it has answered
// neither, both wait.
func TestAnsweredCallWaitsForTheOneThatMayRun(t *testing.T) {
	snap := registry.VolumeSnapshot{SnapshotSpec: snapSpec, Plugin: key.Plugin, Source: key.External,
		State: registry.SnapshotCreating}
	snap.Name = "s1"
	expansion := registry.Intent{Volume: key, Name: name, RPC: registry.ControllerExpandRPC, Hash: "h"}
	n1 := []registry.NodeName{"n1"}
	for what, test := range map[string]struct{ snapshot, expansion []registry.NodeName }{
		"the expansion was answered": {n1, nil}, "the snapshot was answered": {nil, n1}, "none was answered": {n1, n1},
	} {
		snap.Senders, expansion.Senders = test.snapshot, test.expansion
		d := open(t, of(), ready(), snap, expansion, takenOver)
		if err := d.log.View(t.Context(), func(v registry.View) error {
			expand := v.Blocks(takenOver, expansion)
			take := v.BlocksSnapshot(takenOver, lateSnapshot(snap))
			if (expand != nil) != (test.snapshot != nil) || (take != nil) != (test.expansion != nil) {
				t.Errorf("%s: the expansion: %v; the snapshot: %v", what, expand, take)
			}
			return errors.Join(v.Blocks(takenOver.Settled("n1"), expansion),
				v.BlocksSnapshot(takenOver.Settled("n1"), lateSnapshot(snap)))
		}); err != nil {
			t.Error(err)
		}
	}
}

// observed is asRecorded that calls a function before each call is sent.
type observed struct {
	asRecorded
	sending func()
}

func (o observed) Sending(context.Context, registry.ExecutorKey) (done func(), err error) {
	o.sending()
	return func() {}, nil
}

// TestSendersAreTheNodesWhereACallMayRun looks at the senders of calls before each try and after the last one. The
// executor is not among them after an error of its plugin that shows that the call has ended there.
func TestSendersAreTheNodesWhereACallMayRun(t *testing.T) {
	former, both := []registry.NodeName{"n1"}, []registry.NodeName{"n1", "n2"}
	deletion := registry.Intent{Volume: key, Name: name, RPC: registry.DeleteVolumeRPC, Senders: former,
		Hash: intent.Hash(registry.DeleteVolumeRPC, csi.DeleteRequest{VolumeID: key.External})}
	snap := registry.VolumeSnapshot{SnapshotSpec: snapSpec, Plugin: key.Plugin, Source: key.External,
		State: registry.SnapshotCreating, Senders: former}
	snap.Name = "s1"
	for code, last := range map[string][]registry.NodeName{"INTERNAL": former, "ABORTED": both, "UNAVAILABLE": both} {
		synctest.Test(t, func(t *testing.T) {
			caps := of(registry.CreateDelete, registry.CreateSnapshot)
			d := openSnapshots(t, caps, noAnswer("INTERNAL"), noAnswer(code))
			var senders [][]registry.NodeName
			look := func() {
				if err := d.log.View(t.Context(), func(v registry.View) error {
					for _, open := range v.Intents() {
						senders = append(senders, open.Senders)
					}
					for _, snap := range v.SnapshotRecords() {
						senders = append(senders, snap.Senders)
					}
					return nil
				}); err != nil {
					t.Error(err)
				}
			}
			d.desk.Controller.Executors, d.desk.Controller.Node = observed{sending: look}, "n2"
			d.faults = []fault{uncertain("INTERNAL", false), uncertain(code, false)}
			try := func(what string, do func(context.Context) error) {
				ctx, cancel := context.WithTimeout(t.Context(), 1400*time.Millisecond) // for two tries
				defer cancel()
				if err := do(ctx); err == nil {
					t.Errorf("%s has succeeded", what)
				}
				look()
				want := [][]registry.NodeName{both, both, last}
				if !slices.EqualFunc(senders, want, slices.Equal) {
					t.Errorf("senders of %s, answered with %s: %v, want %v", what, code, senders, want)
				}
				senders = nil
			}
			d.put(snap, takenOver)
			try("a snapshot", func(ctx context.Context) error {
				_, err := d.Snapshots.Create(ctx, call, snapSpec)
				return err
			})
			d.desk.drop(snap.Key())
			deleting := ready()
			deleting.State, deleting.Created = registry.VolumeDeleting, true
			d.put(deleting, deletion)
			try("a deletion", func(ctx context.Context) error { return d.desk.Controller.Delete(ctx, call, name) })
		})
	}
}

// TestExecutorThatWasInterruptedChecksBeforeItSends decides to send a call. Before the call is sent, another node takes
// over and begins a call. Then the first node is the executor again.
func TestExecutorThatWasInterruptedChecksBeforeItSends(t *testing.T) {
	v := ready()
	late := registry.LateCall{Plugin: key.Plugin, For: name.String(), Node: "n1", RPC: registry.ControllerExpandRPC,
		Volume: &v}
	d := openSnapshots(t, of(registry.CreateDelete, registry.CreateSnapshot), answer(snapReady))
	former := takenOver
	former.Former = nil
	d.put(former)
	d.desk.Controller.Executors = observed{sending: func() { d.put(late, takenOver) }}
	d.desk.Controller.Node = "n2"
	check := func(what string, do func(context.Context) error) {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		wantErr(t, what, do(ctx), nil, "node n1 has begun")
		d.desk.expect()
		d.wantJournal()
	}
	check("the deletion", func(ctx context.Context) error { return d.desk.Controller.Delete(ctx, call, name) })
	d.put(former, ready())
	check("the snapshot", func(ctx context.Context) error {
		_, err := d.Snapshots.Create(ctx, call, snapSpec)
		return err
	})
}

// TestCallWithoutItsSenderIsNotSent decides to send a call. Then a commit removes the executor from the senders of the
// call, as a commit without a known outcome may do. The executor adds itself before it sends the call.
func TestCallWithoutItsSenderIsNotSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		deleting := ready()
		deleting.State, deleting.Created = registry.VolumeDeleting, true
		d := open(t, of(registry.CreateDelete), deleting, takenOver)
		var senders [][]registry.NodeName // before each try
		d.Controller.Node = "n2"
		d.Controller.Executors = observed{sending: func() {
			if err := d.log.View(t.Context(), func(v registry.View) error {
				for _, call := range v.Intents() {
					senders = append(senders, call.Senders)
					if call.Senders = nil; len(senders) == 1 {
						defer d.put(call)
					}
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
		}}
		noErr(t, "", d.Controller.Delete(t.Context(), call, name))
		n2 := []registry.NodeName{"n2"}
		if !slices.EqualFunc(senders, [][]registry.NodeName{n2, n2}, slices.Equal) {
			t.Errorf("senders before the tries: %v", senders)
		}
		d.expect("DeleteVolume vol-data")

		s := openSnapshots(t, of(registry.CreateSnapshot), answer(snapReady))
		s.put(takenOver)
		s.desk.Controller.Node = "n2"
		tries := 0
		s.desk.Controller.Executors = observed{sending: func() {
			if tries++; tries == 1 {
				snap := s.state()
				snap.Senders = nil
				s.put(snap)
			}
		}}
		if _, err := s.Snapshots.Create(t.Context(), call, snapSpec); err != nil || tries != 2 {
			t.Errorf("a snapshot after %d tries: %v", tries, err)
		}
		s.wantJournal(createCall)
	})
}

// TestDeletionWaitsForASnapshotThatIsTaken deletes a snapshot that a former executor's plugin may still take.
func TestDeletionWaitsForASnapshotThatIsTaken(t *testing.T) {
	snap := registry.VolumeSnapshot{SnapshotSpec: snapSpec, Plugin: key.Plugin, Source: key.External,
		State: registry.SnapshotProcessing, External: "snap-1", Senders: []registry.NodeName{"n1"}}
	snap.Name = "s1"
	for _, executor := range []registry.Executor{takenOver, takenOver.Settled("n1")} {
		d := openSnapshots(t, of(registry.CreateDelete, registry.CreateSnapshot), scriptedAnswer{})
		d.put(snap, executor)
		d.desk.Controller.Executors = asRecorded{}
		err := d.Snapshots.Delete(t.Context(), call, snapName)
		if waits := len(executor.Former) > 0; waits != errors.Is(err, registry.ErrUnavailable) {
			t.Errorf("waits: %t: %v", waits, err)
		} else if waits {
			d.wantJournal()
		} else {
			d.wantJournal("DeleteSnapshot snap-1")
		}
	}
}

// TestDeletionIsRepeatedOnceItHasSucceeded sends a deletion from the next executor. The plugin refuses it once. Only
// after a success may the former executor repeat its own deletion.
func TestDeletionIsRepeatedOnceItHasSucceeded(t *testing.T) {
	v := ready()
	v.Created = true
	deletion := registry.Intent{
		Volume: key, Name: name, RPC: registry.DeleteVolumeRPC, Senders: []registry.NodeName{"n1"},
		Hash: intent.Hash(registry.DeleteVolumeRPC, csi.DeleteRequest{VolumeID: key.External}),
	}
	deleting := v
	deleting.State = registry.VolumeDeleting
	d := open(t, of(registry.CreateDelete), deleting, takenOver, deletion)
	d.Controller.Executors = asRecorded{}
	d.faults = []fault{failed("FAILED_PRECONDITION"), failed("NOT_FOUND")}
	if err := d.Controller.Delete(t.Context(), call, name); err == nil {
		t.Error("it was not refused")
	}
	d.wantLate("DeleteVolume of data, failed: true")
	noErr(t, "", d.Controller.Delete(t.Context(), call, name))
	d.wantLate("DeleteVolume of data, failed: false")
	d.expect("DeleteVolume vol-data", "DeleteVolume vol-data")
}
