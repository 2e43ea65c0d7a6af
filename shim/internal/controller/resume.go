package controller

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// resumeBackoff is the wait between two tries of an operation without a caller.
var resumeBackoff = intent.Backoff{First: time.Second, Max: time.Minute}

// resumeLimit bounds one try of an operation without a caller, the wait for the plugin included. A try that waits for a
// plugin that is gone holds up the deregistration of the volume, and does not notice that a snapshot was deregistered.
const resumeLimit = 10 * time.Minute

// Run finishes creations, deletions, expansions, modifications and detaches that have no caller any more, until ctx
// ends. An earlier process began them, or they had no certain answer. Run repeats each as the same call until it is
// done or has certainly failed. It sends one try at a time, so that other operations on the volume get the lock in
// between. The state and the open intent of the volume record the progress.
func (m *Controller) Run(ctx context.Context) error {
	return runUnfinished(ctx, m.wakeup, m.unfinished, m.resume)
}

// resume retries until the volume has no unfinished operation, or ctx ends.
func (m *Controller) resume(ctx context.Context, name registry.VolumeName, first bool) {
	wait := resumeBackoff.Delay(1, rand.Float64())
	if first {
		wait = 0
	}
	for try := uint64(1); intent.Sleep(ctx, wait); try++ {
		wait = resumeBackoff.Delay(try, rand.Float64())
		over, err := m.tryVolume(ctx, name, wait)
		detached, detachErr := m.resumeDetach(ctx, name) // an open expansion has to end before a detach
		if over && detached || ctx.Err() != nil {
			return
		}
		m.logger.Warn("an operation on a volume is not finished yet", "volume", name.String(),
			"again_in", wait.String(), "error", errors.Join(err, detachErr))
	}
}

// tryVolume tries once to finish the operation of the volume's record, and reports whether it is over. It waits for the
// plugin without the lock. wait is the delay before the next try, for display.
func (m *Controller) tryVolume(
	ctx context.Context, name registry.VolumeName, wait time.Duration,
) (over bool, err error) {
	v, found, err := m.unfinishedOne(ctx, name)
	if err != nil || !found {
		return err == nil, err
	}
	if err := m.awaitPlugin(ctx, v); err != nil {
		return false, err
	}
	unlock, err := m.Locks.Lock(ctx, name, "an operation without a caller")
	if err != nil {
		return false, err
	}
	defer unlock()
	ctx, cancel := context.WithTimeout(ctx, resumeLimit) // the plugin may have gone during the wait for the lock
	defer cancel()
	v, found, err = m.unfinishedOne(ctx, name)
	if err != nil || !found {
		return err == nil, err
	}
	var call registry.Call // of the open call
	err = m.State.View(ctx, func(view registry.View) error {
		for _, open := range openIntents(view, v) {
			call.ID = open.Operation
		}
		return nil
	})
	if err != nil {
		return false, err
	}
	switch v.State {
	case registry.VolumeCreating, registry.VolumeUncertain:
		if v.DeleteWith != "" {
			err = m.deleteUnfinished(ctx, call, v, wait)
			break
		}
		err = m.create(ctx, call, v.VolumeSpec, attempt{policy: singleTry(registry.CreateVolumeRPC), repeatAfter: wait})
	case registry.VolumeDeleting:
		err = m.delete(ctx, call, v, singleTry, wait)
	default:
		err = m.resumeAlteration(ctx, v)
	}
	if _, found, viewErr := m.unfinishedOne(ctx, name); viewErr == nil && !found {
		return true, nil // a certain failure has its own event
	}
	return false, err
}

// awaitPlugin waits up to resumeBackoff.Max for the plugin that the operation needs. That is the controller, or the
// node plugin if only the node's half of an expansion remains. The bound lets Run notice a deregistered volume.
func (m *Controller) awaitPlugin(ctx context.Context, v registry.Volume) error {
	open, err := m.openRPC(ctx, v)
	if err != nil {
		return err
	}
	role := registry.RoleController
	if v.State == registry.VolumeReady && (open == "" || open.OnNode()) {
		role = registry.RoleNode
	}
	ctx, cancel := context.WithTimeout(ctx, resumeBackoff.Max)
	defer cancel()
	_, err = m.Plugins.Await(ctx, role, v.Plugin)
	return err
}

// singleTry returns a policy with a single try per call. Run itself retries.
func singleTry(rpc registry.RPC) intent.Policy {
	return intent.PolicyOf(rpc).Once()
}

// unfinished lists the volumes with an unfinished operation.
func (m *Controller) unfinished(ctx context.Context) (names []registry.VolumeName, err error) {
	var volumes []registry.Volume
	err = m.State.View(ctx, func(view registry.View) error { volumes = view.Volumes(); return nil })
	if err != nil {
		return nil, fmt.Errorf("load unfinished operations on volumes: %w", err)
	}
	for _, v := range volumes {
		open, err := m.unfinishedVolume(ctx, v)
		if err != nil {
			return nil, fmt.Errorf("load unfinished operations on volumes: %w", err)
		}
		if open {
			names = append(names, v.VolumeName())
		}
	}
	list, err := m.detaching(ctx, registry.VolumeName{})
	if err != nil {
		return nil, fmt.Errorf("load unfinished detaches: %w", err)
	}
	for _, at := range list {
		names = append(names, at.Name)
	}
	return names, nil
}

// unfinishedOne returns the volume if it has an unfinished operation.
func (m *Controller) unfinishedOne(
	ctx context.Context, name registry.VolumeName,
) (v registry.Volume, found bool, err error) {
	err = m.State.View(ctx, func(view registry.View) error { v, found = view.Volume(name); return nil })
	if err != nil || !found {
		return v, false, err
	}
	found, err = m.unfinishedVolume(ctx, v)
	return v, found, err
}

// unfinishedVolume reports whether the volume has an unfinished operation, on this node or at its controller.
func (m *Controller) unfinishedVolume(ctx context.Context, v registry.Volume) (open bool, err error) {
	err = m.State.View(ctx, func(view registry.View) error {
		open = m.Executes(view, v.ExecutedBy()) == nil && m.unfinishedAtController(view, v)
		return nil
	})
	if err != nil || open || v.State != registry.VolumeReady || v.Expansion == (registry.Expansion{}) {
		return open, err
	}
	return m.node.Grows(ctx, v)
}

// unfinishedAtController reports whether an operation is unfinished at the controller. A creation that certainly ended
// without a usable volume needs a person, and does not count.
func (m *Controller) unfinishedAtController(view registry.View, v registry.Volume) bool {
	if v.Unwanted() {
		return true
	}
	return slices.ContainsFunc(openIntents(view, v), func(open registry.Intent) bool {
		if v.State == registry.VolumeReady {
			return open.RPC.Alters()
		}
		return open.RPC == registry.CreateVolumeRPC || open.RPC == registry.DeleteVolumeRPC
	})
}

// resumeAlteration continues an expansion or modification without a caller. The caller holds the lock of the volume's
// name.
func (m *Controller) resumeAlteration(ctx context.Context, v registry.Volume) error {
	unlock, err := m.Locks.Lock(ctx, v.VolumeKey(), "an operation without a caller")
	if err != nil {
		return err
	}
	defer unlock()
	if err := m.settleAlteration(ctx, intent.Caller{}, v.VolumeKey(), singleTry); err != nil {
		return err
	}
	return m.growOnNode(ctx, intent.Caller{RetryUntil: time.Now().Add(resumeBackoff.First)}, v.VolumeKey(), false)
}
