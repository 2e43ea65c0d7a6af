package cluster

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Reaper releases the volumes of lost nodes. If this node itself was declared lost, Reaper takes down its volumes
// before the node does anything else.
type Reaper struct {
	*Node
	release Releaser
	allocs  Allocs

	running running[registry.AttachmentKey]
	mu      sync.Mutex // guards clean
	// clean has the epoch of each lost node that has nothing left. Such a node gets nothing new before it is back, and
	// the record of a node that never comes back stays. So clean saves searching all claims again for such nodes.
	clean map[registry.NodeName]uint64
}

// Releaser releases a volume of a lost node: its attachment and claims.
type Releaser interface {
	// ReleaseLost releases the volume. It does nothing if the node is not lost any more.
	ReleaseLost(context.Context, registry.AttachmentKey) error
}

// Allocs are the allocs of this node.
type Allocs interface {
	// Lose begins to release all volumes of this node. It may be called repeatedly.
	Lose(ctx context.Context, why string) error
}

// NewReaper returns the reaper of a node.
func NewReaper(n *Node, release Releaser, allocs Allocs) *Reaper {
	return &Reaper{Node: n, release: release, allocs: allocs, clean: map[registry.NodeName]uint64{}}
}

// Run releases volumes until ctx ends.
func (r *Reaper) Run(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	const failing = "cannot release the volumes of lost nodes"
	return r.session.runSteps(ctx, &r.changes, r.log, failing, func(ctx context.Context) error {
		due, err := r.due(ctx)
		for _, k := range due {
			if r.running.begin(k) {
				all.Go(func() {
					r.reap(ctx, k)
					r.running.end(k)
					r.changes.fire() // the volume may be due again
				})
			}
		}
		return errors.Join(err, r.unmark(ctx), r.endUses(ctx), r.comeBack(ctx))
	})
}

// due lists the volumes that lost nodes still have and that this node may release. It updates clean.
func (r *Reaper) due(ctx context.Context) (list []registry.AttachmentKey, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	found := map[registry.AttachmentKey]bool{} // attached or not
	err = r.State.View(ctx, func(v registry.View) error {
		gone := r.gone(v)
		for name, epoch := range gone {
			if r.clean[name] == epoch {
				delete(gone, name)
			}
			r.clean[name] = epoch // unless something is found below
		}
		if len(gone) == 0 {
			return nil
		}
		for _, c := range v.AllClaims() {
			if _, is := gone[c.Node]; is {
				found[registry.AttachmentKey{Volume: c.Volume, Node: c.Node}] = false
			}
		}
		for _, at := range v.AllAttachments() {
			// only its own node can detach a stored volume
			if _, is := gone[at.Node]; is && !v.StoredOn(at.Volume, at.Node) {
				found[at.AttachmentKey()] = true
			}
		}
		for k, attached := range found {
			delete(r.clean, k.Node)
			if r.mayRelease(v, k, attached) {
				list = append(list, k)
			}
		}
		return nil
	})
	if err != nil {
		clear(r.clean)
	}
	return list, err
}

// endUses deletes the records of mounts that clients of CSI endpoints have on lost nodes. Uses by controller calls
// stay: their clients can end them at another endpoint.
func (r *Reaper) endUses(ctx context.Context) error {
	return registry.EnsureAll(ctx, r.State, func(v registry.View) (change registry.Change, err error) {
		gone := r.gone(v)
		if len(gone) == 0 {
			return change, nil
		}
		for _, use := range v.AllEndpointUses() {
			_, is := gone[use.Node]
			isMount := intent.RoleOf(use.Call) == registry.RoleNode
			if is && isMount && len(change.Delete) < registry.Batch {
				change.Delete = append(change.Delete, use.Key())
			}
		}
		return change, nil
	})
}

// gone returns the epochs of the other nodes that were declared lost and are not alive again.
func (r *Reaper) gone(v registry.View) map[registry.NodeName]uint64 {
	epochs := map[registry.NodeName]uint64{}
	for _, node := range v.Nodes() {
		_, alive := v.NodeLease(node.Name)
		if node.Lost() && !alive && node.Name != r.State.node {
			epochs[node.Name] = node.Epoch
		}
	}
	return epochs
}

// mayRelease reports whether this node may release the volume of a lost node: if only that node could detach it, if
// this node is the plugin's executor, or if it is not attached and no executor is alive.
func (r *Reaper) mayRelease(v registry.View, k registry.AttachmentKey, attached bool) bool {
	if v.StoredOn(k.Volume, k.Node) {
		return true
	}
	volume, _ := v.VolumeByKey(k.Volume)
	if _, err := r.Executors.Check(v, registry.ExecutorKey{Plugin: k.Volume.Plugin, Node: volume.Node}); err == nil {
		return true
	}
	executor, _ := v.Executor(k.Volume.Plugin)
	return !attached && !v.Held(executor)
}

// reap releases a volume of a lost node. It retries until the volume is released, or is no longer due here.
func (r *Reaper) reap(ctx context.Context, k registry.AttachmentKey) {
	for try := uint64(1); ; try++ {
		err := r.release.ReleaseLost(ctx, k)
		if err == nil || ctx.Err() != nil {
			return
		}
		wait := reapBackoff.Delay(try, rand.Float64())
		r.log.Warn("cannot release a volume of a lost node yet", "node", k.Node, "volume", k.Volume.String(),
			"again_in", wait.String(), "error", err)
		if !intent.Sleep(ctx, wait) {
			return
		}
		if due, err := r.due(ctx); err == nil && !slices.Contains(due, k) {
			return
		}
	}
}

var reapBackoff = intent.Backoff{First: time.Second, Max: time.Minute}

// unmark removes the mark of a node that has died while it fenced this one.
func (r *Reaper) unmark(ctx context.Context) error {
	_, err := registry.Ensure(ctx, r.State, func(v registry.View) (registry.Change, error) {
		own, _ := v.Node(r.State.node)
		if own.Fencing.By == "" || fencerAlive(v, own.Fencing) {
			return registry.Change{}, nil
		}
		own.Fencing = registry.Fencing{}
		return registry.Change{Put: []registry.Record{own}}, nil
	})
	return err
}

// comeBack makes this node ready (or draining, if it was) after it was declared lost, once it has no mounts, claims and
// attachments left. Until then it makes the allocs release their volumes (Allocs.Lose).
func (r *Reaper) comeBack(ctx context.Context) error {
	var own registry.Node
	var takesDown, hasMounts, hasRecords bool
	err := r.State.View(ctx, func(v registry.View) error {
		own, _ = v.Node(r.State.node)
		if takesDown = r.State.mustTakeDown(v); !takesDown {
			return nil
		}
		hasMounts = mayHaveMounts(v)
		hasRecords = slices.ContainsFunc(v.AllClaims(), func(c registry.Claim) bool { return c.Node == own.Name }) ||
			slices.ContainsFunc(v.AllAttachments(), func(at registry.Attachment) bool { return at.Node == own.Name })
		return nil
	})
	if err != nil || !takesDown {
		return err
	}
	if hasMounts || hasRecords {
		err = r.allocs.Lose(ctx, own.String())
	}
	if !hasMounts {
		r.Executors.changed.fire() // this node may become the executor again: see Executors.take
	}
	if err != nil || hasMounts || hasRecords {
		return err
	}
	return r.declareBack(ctx, own.Epoch)
}

// declareBack makes this node ready or draining again, and records in the copy that the epoch's volumes are taken down.
func (r *Reaper) declareBack(ctx context.Context, epoch uint64) error {
	_, err := registry.Ensure(ctx, r.State, func(v registry.View) (registry.Change, error) {
		own, _ := v.Node(r.State.node)
		if own.Epoch != epoch || !own.Lost() {
			return registry.Change{}, nil
		}
		drain := own.Drain
		own.Drain, own.Deadline = registry.Drain{}, drain.Deadline
		if drain.By != "" {
			return r.declareChange(own, registry.NodeDraining, registry.EventNodeDraining, drain.By, drain.Reason), nil
		}
		return r.declareChange(own, registry.NodeReady, registry.EventNodeReady, "", ""), nil
	})
	if err != nil {
		return err
	}
	_, err = r.State.local.Commit(ctx, func(v registry.View) (registry.Change, error) {
		copied := r.State.copyIn(v)
		copied.Epoch = max(copied.Epoch, epoch)
		return registry.Change{Put: []registry.Record{copied}}, nil
	})
	r.changes.fire()
	return err
}
