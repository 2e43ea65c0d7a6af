package controller

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// resumeBackoff is the wait between two tries of an operation without a caller.
var resumeBackoff = intent.Backoff{First: time.Second, Max: time.Minute}

// Run finishes creations, deletions, expansions, modifications and detaches that have no caller any more, until ctx
// ends. An earlier process began them, or they had no certain answer. Run repeats each as the same call until it is
// done or has certainly failed. It sends one try at a time, so that other operations on the volume get the lock in
// between. The state and the open intent of the volume record the progress.
func (m *Controller) Run(ctx context.Context) error {
	r := resumer{Controller: m, under: map[registry.VolumeName]bool{}}
	defer r.all.Wait()
	for first := true; ; first = false {
		names, err := m.unfinished(ctx)
		if err != nil {
			return fmt.Errorf("load unfinished operations on volumes: %w", err)
		}
		wait := resumeBackoff.Delay(1, rand.Float64())
		if first {
			wait = 0
		}
		for _, name := range names {
			r.start(ctx, name, wait)
		}
		select {
		case <-m.wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// wakeRun makes Run look for unfinished operations.
func (m *Controller) wakeRun() {
	select {
	case m.wake <- struct{}{}:
	default: // Run has yet to take the pending token
	}
}

// resumer tracks the volumes that Run is working on.
type resumer struct {
	*Controller
	all   sync.WaitGroup
	mu    sync.Mutex // guards under; held for no longer than a look-up
	under map[registry.VolumeName]bool
}

func (r *resumer) start(ctx context.Context, name registry.VolumeName, wait time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.under[name] {
		return
	}
	r.under[name] = true
	r.all.Go(func() {
		r.finish(ctx, name, wait)
		r.mu.Lock()
		delete(r.under, name)
		r.mu.Unlock()
		r.wakeRun() // another operation may have been left unfinished meanwhile
	})
}

// finish retries until the volume has no unfinished operation, or ctx ends.
func (r *resumer) finish(ctx context.Context, name registry.VolumeName, wait time.Duration) {
	for try := uint64(1); ; try++ {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
		wait = resumeBackoff.Delay(try, rand.Float64())
		over, err := r.tryOnce(ctx, name, wait)
		if over || ctx.Err() != nil {
			return
		}
		r.logger.Warn("an operation on a volume is not finished yet", "volume", name.String(),
			"again_in", wait.String(), "error", err)
	}
}

// tryOnce tries once and reports whether the operations on the volume are over. wait is the delay before the next try.
func (m *Controller) tryOnce(ctx context.Context, name registry.VolumeName, wait time.Duration) (over bool, err error) {
	over, err = m.tryVolume(ctx, name, wait)
	detached, failed := m.resumeDetach(ctx, name) // an open expansion has to end before
	return over && detached, errors.Join(err, failed)
}

// tryVolume tries once to finish the operation of the volume's record. It waits for the plugin without the lock.
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
	v, found, err = m.unfinishedOne(ctx, name)
	if err != nil || !found {
		return err == nil, err
	}
	call, err := m.operation(ctx, v)
	if err != nil {
		return false, err
	}
	switch v.State {
	case registry.VolumeCreating, registry.VolumeUncertain:
		if v.DeleteWith != "" {
			err = m.deleteUnfinished(ctx, call, v, wait)
			break
		}
		err = m.create(ctx, call, v.VolumeSpec, attempt{policy: singleTry(registry.CreateVolumeRPC), again: wait})
	case registry.VolumeDeleting:
		err = m.delete(ctx, call, v, singleTry, wait)
	default:
		err = m.resumeAlteration(ctx, v)
	}
	if _, found, look := m.unfinishedOne(ctx, name); look == nil && !found {
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

// operation returns the operation ID of the volume's open call.
func (m *Controller) operation(ctx context.Context, v registry.Volume) (call registry.Call, err error) {
	err = m.State.View(ctx, func(view registry.View) error {
		for _, open := range intents(view, v) {
			call.ID = open.Operation
		}
		return nil
	})
	return call, err
}

// singleTry returns a policy with a single try per call. Run itself retries.
func singleTry(rpc registry.RPC) intent.Policy {
	return intent.PolicyOf(rpc).Once()
}

// unfinished lists the volumes with an unfinished operation.
func (m *Controller) unfinished(ctx context.Context) (names []registry.VolumeName, err error) {
	var volumes []registry.Volume
	err = m.State.View(ctx, func(view registry.View) error { volumes = view.Volumes(); return nil })
	for _, v := range volumes {
		open, failed := m.unfinishedVolume(ctx, v)
		if failed != nil {
			return nil, failed
		}
		if open {
			names = append(names, v.VolumeName())
		}
	}
	if err != nil {
		return nil, err
	}
	list, err := m.detaching(ctx, registry.VolumeName{})
	for _, at := range list {
		names = append(names, at.Name)
	}
	return names, err
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

// Wake makes Run look for unfinished operations, because this node may have become the executor of their plugin.
func (m *Controller) Wake() { m.wakeRun() }

// unfinishedAtController reports whether an operation is unfinished at the controller. A creation that certainly ended
// without a usable volume needs a person, and does not count.
func (m *Controller) unfinishedAtController(view registry.View, v registry.Volume) bool {
	if v.Unwanted() {
		return true
	}
	return slices.ContainsFunc(intents(view, v), func(open registry.Intent) bool {
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
	return m.grow(ctx, intent.Caller{RetryUntil: time.Now().Add(resumeBackoff.First)}, v.VolumeKey(), false)
}
