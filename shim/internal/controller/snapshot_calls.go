package controller

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// SnapshotDriver makes the CSI calls for snapshots.
type SnapshotDriver interface {
	CreateSnapshot(context.Context, registry.InstanceKey, csi.CreateSnapshotRequest) (csi.Snapshot, error)
	DeleteSnapshot(context.Context, registry.InstanceKey, csi.SnapshotRequest) error
	GetSnapshot(context.Context, registry.InstanceKey, csi.SnapshotRequest) (csi.Snapshot, error)
	CreateGroupSnapshot(context.Context, registry.InstanceKey, csi.CreateSnapshotRequest) (csi.GroupSnapshot, error)
	DeleteGroupSnapshot(context.Context, registry.InstanceKey, csi.SnapshotRequest) error
	GetGroupSnapshot(context.Context, registry.InstanceKey, csi.SnapshotRequest) (csi.GroupSnapshot, error)
	SnapshotBlocks(context.Context, registry.InstanceKey, csi.BlocksRequest, func(registry.Blocks) error) error
	ListSnapshots(ctx context.Context, at registry.InstanceKey, volume registry.ExternalID, token string) (
		page []csi.Snapshot, next string, err error)
}

// snapshotRef names the record of a snapshot.
type snapshotRef struct {
	name    snapshotName
	created registry.Seq // CreateIndex: a later record with the same name is another snapshot
}

// find returns the record.
func (r snapshotRef) find(view registry.View) (snap registry.VolumeSnapshot, found bool) {
	snap, found = r.name.find(view)
	return snap, found && snap.CreateIndex == r.created
}

// work is the operation that a caller wants on one snapshot.
type work struct {
	snapshotRef
	wanted func(registry.VolumeSnapshot) bool // reports whether the snapshot needs no further call
	// ModifyIndex of the record as the caller stored it; 0: the caller stored no record, or has sent a call since
	fresh registry.Seq
}

// isFresh reports whether neither this caller nor Run has sent a call for the current state of the snapshot.
func (w *work) isFresh(snap registry.VolumeSnapshot) bool {
	return w.fresh != 0 && w.fresh == snap.ModifyIndex
}

func finished(snap registry.VolumeSnapshot) bool { return !snap.State.Unfinished() }

// readyBackoff is the wait between two calls that ask whether a snapshot is ready_to_use.
var readyBackoff = intent.Backoff{First: 200 * time.Millisecond, Max: 30 * time.Second}

// errElsewhere means that another node makes the calls for a snapshot.
var errElsewhere = errors.New("another node makes its calls")

// errChanged means that a call was not sent, because the record of its snapshot has changed meanwhile.
var errChanged = errors.New("the record of the snapshot has changed")

// senders returns the nodes where the call for the current state of the snapshot may run. It includes this node, which
// is about to send the call. ErrUnavailable: a former executor may still send another call for the snapshot.
// nil: there is no cluster.
func (s *Snapshots) senders(view registry.View, snap registry.VolumeSnapshot) ([]registry.NodeName, error) {
	if s.volumes.Executors == nil {
		return nil, nil
	}
	executor, err := s.volumes.Executors.Check(view, snap.ExecutedBy())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errElsewhere, err)
	}
	if err := view.BlocksSnapshot(executor, lateSnapshot(snap)); err != nil {
		return nil, err
	}
	return intent.WithSender(snap.Senders, executor.Holder), nil
}

// changingRPC returns the deletion for a snapshot that is being deleted, otherwise the creation.
func changingRPC(snap registry.VolumeSnapshot) registry.RPC {
	if snap.State != registry.SnapshotDeleting {
		snap.State = registry.SnapshotCreating
	}
	return nextRPC(snap, registry.Instance{})
}

// recordSender records that this node begins a call for the snapshot, and returns its record.
func (s *Snapshots) recordSender(ctx context.Context, snap registry.VolumeSnapshot) (registry.VolumeSnapshot, error) {
	if s.volumes.Executors == nil {
		return snap, nil
	}
	_, err := registry.Ensure(ctx, s.volumes.State, func(view registry.View) (change registry.Change, err error) {
		now, found := view.Get(snap.Key()).(registry.VolumeSnapshot)
		if !found || now.CreateIndex != snap.CreateIndex {
			return change, nil // the outcome of the call will not be stored
		}
		known := len(now.Senders)
		if now.Senders, err = s.senders(view, now); err == nil && len(now.Senders) > known {
			change.Put = []registry.Record{now}
		}
		snap.Senders = now.Senders
		return change, err
	})
	return snap, err
}

// checkSend returns an error if the call for the snapshot must not be sent, such as errChanged. While this node was not
// the executor, another node may have begun a call for it or its volumes.
func (s *Snapshots) checkSend(ctx context.Context, snap registry.VolumeSnapshot) error {
	if s.volumes.Executors == nil {
		return nil
	}
	return s.volumes.State.View(ctx, func(view registry.View) error {
		now, found := view.Get(snap.Key()).(registry.VolumeSnapshot)
		if !found || now.CreateIndex != snap.CreateIndex || now.State != snap.State {
			return errChanged
		}
		senders, err := s.senders(view, now)
		if err == nil && len(senders) > len(now.Senders) {
			return errChanged
		}
		return err
	})
}

// endedChange extends a change that ends the call for the snapshot: it adds which former executors may still send that
// call. The call has ended if the change moves the record of the snapshot to another state or deletes it.
func (s *Snapshots) endedChange(
	view registry.View, was registry.VolumeSnapshot, change registry.Change,
) registry.Change {
	stays := slices.ContainsFunc(change.Put, func(r registry.Record) bool {
		next, is := r.(registry.VolumeSnapshot)
		return is && next.Key() == was.Key() && next.State == was.State
	})
	if stays {
		return change
	}
	late := lateSnapshot(was)
	late.Failed = was.State == registry.SnapshotDeleting && len(change.Put) > 0
	return change.And(view.Ended(late, was.Senders))
}

// finish makes calls until the snapshot is gone or in the wanted state, until the retry policy gives up, or until ctx
// ends.
func (s *Snapshots) finish(ctx context.Context, w *work) error {
	answers := map[string]int{} // by code
	for try := uint64(1); ; try++ {
		done, err := s.step(ctx, w)
		if done {
			return err
		}
		backoff := readyBackoff
		failure, is := errors.AsType[*registry.CallError](err)
		switch {
		case err == nil:
			clear(answers)
		case is:
			policy := intent.PolicyOf(policyRPC(failure.RPC))
			row := policy.Row(failure.Code)
			backoff = policy.Backoff
			if answers[failure.Code]++; answers[failure.Code] >= row.Tries {
				return fmt.Errorf("%w; %s", err, row.Advice)
			}
		case ctx.Err() == nil: // secrets that cannot be read, for example
			return errors.Join(err, s.forget(ctx, w))
		default:
			return err
		}
		if !intent.Sleep(ctx, backoff.Delay(try, rand.Float64())) {
			if err == nil {
				return context.Cause(ctx)
			}
			return fmt.Errorf("%w (given up: %w)", err, context.Cause(ctx))
		}
	}
}

// forget removes the record of a new snapshot for which no call was sent. If the record stayed, it would hold up other
// operations on the volumes. With the lock of the snapshot's name, Run sends no call meanwhile.
func (s *Snapshots) forget(ctx context.Context, w *work) error {
	unlock, err := s.volumes.Locks.Lock(ctx, w.name, "the end of its creation")
	if err != nil {
		return err
	}
	defer unlock()
	_, err = registry.Ensure(ctx, s.volumes.State, func(view registry.View) (change registry.Change, err error) {
		if snap, found := w.find(view); found && snap.State == registry.SnapshotCreating && w.isFresh(snap) {
			change.Delete = []registry.Key{snap.Key()}
		}
		return change, nil
	})
	return err
}

// policyRPC returns the RPC whose retry policy applies. GetSnapshot has the policy of CreateSnapshot.
func policyRPC(rpc registry.RPC) registry.RPC {
	switch rpc {
	case registry.GetSnapshotRPC:
		return registry.CreateSnapshotRPC
	case registry.GetGroupSnapshotRPC:
		return registry.CreateGroupSnapshotRPC
	}
	return rpc
}

// step makes the next call for a snapshot and stores the outcome. It does nothing if the snapshot is gone, or already
// in the wanted state. It sends no creation while an expansion or modification of a volume may still run. done means
// that no further step is needed, or that the error is final. step waits for the plugin without a lock.
func (s *Snapshots) step(ctx context.Context, w *work) (done bool, err error) {
	var snap registry.VolumeSnapshot
	read := func(view registry.View) error {
		var found bool
		snap, found = w.find(view)
		done = !found || w.wanted(snap)
		return nil
	}
	if err := s.volumes.State.View(ctx, read); err != nil || done {
		return done, err
	}
	inst, err := s.snapshotter(ctx, snap)
	if err != nil {
		return false, err
	}
	secrets, err := s.secrets(ctx, snap)
	if err != nil {
		return false, err
	}
	unlock, err := s.lock(ctx, snap)
	if err != nil {
		return false, err
	}
	defer unlock()
	wait := false // for an expansion or modification of a volume
	err = s.volumes.State.View(ctx, func(view registry.View) error {
		wait = slices.ContainsFunc(snap.VolumeKeys(), func(key registry.VolumeKey) bool {
			return alterationRuns(view, key)
		})
		return read(view)
	})
	if err != nil || done || wait && snap.State == registry.SnapshotCreating {
		return done, err
	}
	next, err := s.call(ctx, w, snap, inst, secrets)
	return next == nil || w.wanted(*next), err
}

func (s *Snapshots) secrets(
	ctx context.Context, snap registry.VolumeSnapshot,
) (map[string]registry.SecretValue, error) {
	if len(snap.Secrets) == 0 {
		return nil, nil
	}
	values, err := s.volumes.Secrets.Resolve(ctx, snap.Secrets)
	if err != nil {
		return nil, fmt.Errorf("secrets of %s: %w; restore it, or, if it is one of the volume, "+
			"give the volume another one with `volume update`", nameOf(snap.SnapshotSpec), err)
	}
	return values, nil
}

// lock takes the locks of the snapshot's name and of its volumes, in an order that all callers share.
func (s *Snapshots) lock(ctx context.Context, snap registry.VolumeSnapshot) (unlock func(), err error) {
	name := nameOf(snap.SnapshotSpec)
	keys := []intent.Key{name}
	for _, key := range snap.VolumeKeys() {
		keys = append(keys, key)
	}
	return s.volumes.Locks.LockAll(ctx, keys, "a call for "+name.String())
}

// alterationRuns reports whether an expansion or modification of the volume may still run at its plugin.
func alterationRuns(view registry.View, key registry.VolumeKey) bool {
	open, found := view.Intent(key)
	return found && open.RPC.Alters() && intent.MayRun(open)
}

// snapshotBeingTaken returns a snapshot of the volume whose creation may still run at the plugin. The shim that sent
// the call may have died before the plugin answered.
func snapshotBeingTaken(view registry.View, key registry.VolumeKey) (name snapshotName, found bool) {
	for _, snap := range view.SnapshotRecords() {
		mayRun := !intent.Answers(snap.Failure.Code) || snap.Failure.Code == "ABORTED"
		if snap.State == registry.SnapshotCreating && mayRun && slices.Contains(snap.VolumeKeys(), key) {
			return nameOf(snap.SnapshotSpec), true
		}
	}
	return name, false
}

// call makes one call. It returns the record after the call; nil: the record is gone. If the plugin may have got the
// call, call sets w.fresh to 0.
func (s *Snapshots) call(
	ctx context.Context, w *work, snap registry.VolumeSnapshot, inst registry.Instance,
	secrets map[string]registry.SecretValue,
) (next *registry.VolumeSnapshot, err error) {
	rpc := nextRPC(snap, inst)
	var answer snapshotAnswer
	deadline := intent.PolicyOf(policyRPC(rpc)).Deadline
	if snap, err = s.recordSender(ctx, snap); err != nil {
		return &snap, err
	}
	err = s.volumes.Once(ctx, snap.ExecutedBy(), deadline, func(ctx context.Context) (err error) {
		if err := s.checkSend(ctx, snap); err != nil {
			return err
		}
		answer, err = s.send(ctx, rpc, snap, inst.InstanceKey, secrets)
		return err
	})
	if errors.Is(err, errChanged) {
		return &snap, nil // the next step looks at the new record
	}
	failure, is := errors.AsType[*registry.CallError](err)
	if err != nil && !is {
		return &snap, err
	}
	if failure != nil && failure.Outcome == registry.OutcomeFailed && !intent.Answers(failure.Code) {
		return &snap, err // a code of gRPC itself: the call has not reached the plugin
	}
	fresh := w.isFresh(snap)
	w.fresh = 0
	if snap.State == registry.SnapshotDeleting {
		return s.storeDeleted(ctx, snap, rpc, failure, fresh)
	}
	taken := snap
	if failure == nil {
		limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), intent.Grace)
		err := s.volumes.State.View(limited, func(view registry.View) error { return answer.accept(view, &taken) })
		cancel()
		if err != nil {
			failure = badResponse(rpc, inst.InstanceKey, registry.ErrInternal,
				"the plugin's answer cannot be used: %v", err)
		}
	}
	return s.storeTaken(ctx, snap, taken, rpc, failure, fresh)
}

// nextRPC returns the call that the state of the snapshot asks for.
func nextRPC(snap registry.VolumeSnapshot, inst registry.Instance) registry.RPC {
	switch {
	case snap.State == registry.SnapshotDeleting && snap.IsGroup():
		return registry.DeleteGroupSnapshotRPC
	case snap.State == registry.SnapshotDeleting:
		return registry.DeleteSnapshotRPC
	case snap.State == registry.SnapshotProcessing && snap.IsGroup():
		return registry.GetGroupSnapshotRPC
	case snap.IsGroup():
		return registry.CreateGroupSnapshotRPC
	case snap.State == registry.SnapshotProcessing && inst.Fingerprint.Has(registry.GetSnapshot):
		return registry.GetSnapshotRPC
	}
	return registry.CreateSnapshotRPC
}

// snapshotAnswer is the plugin's description of a snapshot or group snapshot. After a deletion it is zero.
type snapshotAnswer struct {
	one   csi.Snapshot
	group csi.GroupSnapshot
}

// send makes the call.
func (s *Snapshots) send(
	ctx context.Context, rpc registry.RPC, snap registry.VolumeSnapshot, at registry.InstanceKey,
	secrets map[string]registry.SecretValue,
) (answer snapshotAnswer, err error) {
	create := csi.CreateSnapshotRequest{
		Name: snap.Name, Volume: snap.Source, Parameters: snap.Parameters, Secrets: secrets,
	}
	known := csi.SnapshotRequest{Snapshot: snap.External, Secrets: secrets,
		Private: csi.Private{Contexts: []map[string]string{snap.Parameters}}}
	for _, m := range snap.Members {
		create.Volumes = append(create.Volumes, m.Source)
	}
	if snap.IsGroup() {
		known.Members = snap.Externals()
	}
	switch rpc {
	case registry.DeleteSnapshotRPC:
		err = s.driver.DeleteSnapshot(ctx, at, known)
	case registry.DeleteGroupSnapshotRPC:
		err = s.driver.DeleteGroupSnapshot(ctx, at, known)
	case registry.GetSnapshotRPC:
		answer.one, err = s.driver.GetSnapshot(ctx, at, known)
	case registry.CreateSnapshotRPC:
		answer.one, err = s.driver.CreateSnapshot(ctx, at, create)
	case registry.GetGroupSnapshotRPC:
		answer.group, err = s.driver.GetGroupSnapshot(ctx, at, known)
	case registry.CreateGroupSnapshotRPC:
		answer.group, err = s.driver.CreateGroupSnapshot(ctx, at, create)
	}
	return answer, err
}
