package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Waits and back-offs of this package.
const (
	pluginWait   = time.Minute            // for a plugin, where the caller sets no deadline
	roundLimit   = 30 * time.Second       // of waits and retries in one try to release a volume
	retryFirst   = 200 * time.Millisecond // between two tries to release an alloc
	retryCeiling = 30 * time.Second
)

// Allocs prepares and releases the volumes of allocs.
type Allocs struct {
	intent.Calls
	controller Controller
	stager     *Stager
	host       Host
	logger     hclog.Logger
	// AwaitAdmitted waits until volumes may be staged and published on this node. It calls waits with what it waits
	// for. nil: they always may, because there is no cluster.
	AwaitAdmitted func(ctx context.Context, waits func(what string)) error

	workers workers
	mu      sync.Mutex // guards busy and unclaimed; held only for map access
	// busy maps an alloc to its running Prepare or release.
	busy map[registry.AllocID]*work
	// unclaimed is the set of volumes without a claim that are being released.
	unclaimed map[registry.VolumeKey]bool
}

// work is a running Prepare or release.
type work struct {
	release bool
	done    chan struct{} // closed at its end

	// of a Prepare
	cancel  context.CancelCauseFunc
	stopped atomic.Bool // a Release has cancelled it

	// of a release
	abort    context.CancelFunc // ends it, so that a release by force can begin
	endCause error              // why it ended before it was done. Readable once done is closed
	kept     bool               // it has kept the alloc's record for the host. Readable once done is closed
}

// Host describes the host, as reported by Hello.
type Host struct {
	Node       registry.NodeName
	Operations []hooks.Operation
}

var errReleased = errors.New("the alloc is being released")

// NewAllocs returns the Allocs of a node. It starts nothing; Run does.
func NewAllocs(calls intent.Calls, c Controller, s *Stager, h Host, logger hclog.Logger) *Allocs {
	return &Allocs{
		Calls: calls, controller: c, stager: s, host: h, logger: logger,
		busy: map[registry.AllocID]*work{}, unclaimed: map[registry.VolumeKey]bool{},
	}
}

// clustered reports whether other nodes use the same volumes.
func (a *Allocs) clustered() bool { return a.AwaitAdmitted != nil }

// Run releases allocs and unclaimed volumes until ctx ends. It resumes the releases that an earlier shim began.
func (a *Allocs) Run(ctx context.Context) error {
	var releasing []registry.AllocID
	err := a.State.View(ctx, func(v registry.View) error {
		for _, al := range v.AllocsWhere(func(al registry.Alloc) bool { return al.State == registry.AllocReleasing }) {
			releasing = append(releasing, al.ID)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("load allocs: %w", err)
	}
	for _, id := range releasing {
		a.startRelease(id)
	}
	a.workers.start(func(ctx context.Context) {
		persist(ctx, a.logger, "cannot list unclaimed volumes yet", func(time.Duration) error {
			return a.TakeDownUnclaimed(ctx)
		})
	})
	return a.workers.run(ctx)
}

// Prepare claims, attaches, stages and publishes the volumes of the alloc, and returns the plan of each task.
// It is idempotent. After a failure the completed steps remain until the next Prepare or the Release of the alloc.
func (a *Allocs) Prepare(ctx context.Context, call registry.Call, g hooks.AllocGroup) (map[string]hooks.Plan, error) {
	spec, err := groupSpec(g)
	if err != nil {
		return nil, err
	}
	ctx, finish, err := a.beginPrepare(ctx, g.Alloc)
	if err != nil {
		return nil, err
	}
	defer finish()
	return a.prepare(ctx, call, g, spec)
}

// prepare mounts the volumes of an alloc in order, and records that the alloc is ready. After a failure it records why,
// and mounts no further volume.
func (a *Allocs) prepare(
	ctx context.Context, call registry.Call, g hooks.AllocGroup, spec hooks.GroupSpec,
) (map[string]hooks.Plan, error) {
	published := map[registry.RequestName]hooks.Published{}
	requests := inVolumeOrder(spec.Volumes)
	if len(requests) == 0 {
		if err := a.admit(ctx, g); err != nil {
			return nil, err
		}
	}
	for i, r := range requests {
		req := &request{
			Allocs: a, by: intent.Caller{Call: call},
			key:   registry.ClaimKey{Alloc: g.Alloc, Request: r.Name},
			parts: spec.Parts(r.Name),
		}
		if i == len(requests)-1 { // the commit that ends the last request makes the alloc ready
			req.then = func(v registry.View, at hooks.Published) (registry.Change, error) {
				all := maps.Clone(published)
				all[r.Name] = at
				plans, err := plansOf(g, spec, all, a.host)
				if err != nil {
					return registry.Change{}, err
				}
				return readyChange(v, call, g.Alloc, plans)
			}
		}
		at, err := req.mountRequest(ctx, g, r)
		if err != nil {
			// The alloc's record, which admit makes if it is missing, says why Prepare failed. If ctx has ended, the
			// wait that the record has already says more than err.
			if ctx.Err() == nil && a.admit(ctx, g) == nil {
				req.recordFailure(ctx, err, time.Time{})
			}
			return nil, fmt.Errorf("volume %q of alloc %s: %w", r.Name, g.Alloc, err)
		}
		published[r.Name] = at
	}
	plans, err := plansOf(g, spec, published, a.host)
	if err != nil {
		return nil, err
	}
	_, err = registry.Ensure(ctx, a.State, func(v registry.View) (registry.Change, error) {
		return readyChange(v, call, g.Alloc, plans)
	})
	return plans, err
}

// plansOf returns the plan of each task of the alloc.
func plansOf(
	g hooks.AllocGroup, spec hooks.GroupSpec, published map[registry.RequestName]hooks.Published, h Host,
) (map[string]hooks.Plan, error) {
	plans, err := hooks.Mounts(spec, published, g.Isolated)
	if err != nil {
		return nil, fmt.Errorf("alloc %s: %w", g.Alloc, err)
	}
	for task, plan := range plans {
		if err := plan.Supported(h.Operations); err != nil {
			return nil, fmt.Errorf("task %q of alloc %s: %w", task, g.Alloc, err)
		}
	}
	return plans, nil
}

// admit records the alloc, unless it is known.
func (a *Allocs) admit(ctx context.Context, g hooks.AllocGroup) error {
	_, err := registry.Ensure(ctx, a.State, a.admission(ctx, g))
	return err
}

// admission returns the decision that admit commits. A Release cancels ctx. After that the alloc must not be recorded:
// no other Release would take its volumes down.
func (a *Allocs) admission(ctx context.Context, g hooks.AllocGroup) registry.Decision {
	return func(v registry.View) (registry.Change, error) {
		al, known := v.Alloc(g.Alloc)
		switch {
		case ctx.Err() != nil:
			return registry.Change{}, context.Cause(ctx)
		case known && al.State == registry.AllocReleasing:
			return registry.Change{}, releasedError(g.Alloc)
		case known:
			return registry.Change{}, nil
		}
		return registry.Change{Put: []registry.Record{registry.Alloc{
			ID: g.Alloc, Job: g.Job, Group: g.Group, Namespace: g.Namespace, Index: g.Index, Node: a.host.Node,
			Sealed: g.Sealed,
			State:  registry.AllocPreparing, Since: a.Now(),
		}}}, nil
	}
}

func releasedError(id registry.AllocID) error {
	return registry.Errorf(registry.ErrConflict, "%w: alloc %s; wait for it, and place a new alloc", errReleased, id)
}

// beginPrepare waits until no other Prepare runs for the alloc, and makes this one cancellable by a Release. A Release
// during the wait cancels it too.
func (a *Allocs) beginPrepare(ctx context.Context, id registry.AllocID) (context.Context, func(), error) {
	preparing, cancel := context.WithCancelCause(ctx)
	w := &work{cancel: cancel, done: make(chan struct{})}
	for other := a.addWork(id, w); other != nil; other = a.addWork(id, w) {
		if err := other.awaitPrepare(ctx, id); err != nil {
			cancel(nil)
			return nil, nil, err
		}
	}
	return preparing, func() { cancel(nil); a.endWork(id, w) }, nil
}

// addWork makes w the work of the alloc, unless there is other work, which it returns.
func (a *Allocs) addWork(id registry.AllocID, w *work) (other *work) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if other = a.busy[id]; other == nil {
		a.busy[id] = w
	}
	return other
}

// awaitPrepare waits for the end of another Prepare of the alloc. It returns an error if w is a release, or if a
// Release has stopped w.
func (w *work) awaitPrepare(ctx context.Context, id registry.AllocID) error {
	if w.release {
		return releasedError(id)
	}
	select {
	case <-w.done:
	case <-ctx.Done():
		return fmt.Errorf("wait for an earlier call for alloc %s: %w", id, context.Cause(ctx))
	}
	if w.stopped.Load() {
		return releasedError(id)
	}
	return nil
}

// stopPrepare cancels the running Prepare of the alloc, if any.
func (a *Allocs) stopPrepare(id registry.AllocID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if w := a.busy[id]; w != nil && !w.release {
		w.stop()
	}
}

// stop cancels a Prepare because of a Release.
func (w *work) stop() {
	w.stopped.Store(true)
	w.cancel(errReleased)
}

// endWork records that the work has ended, and wakes its waiters.
func (a *Allocs) endWork(id registry.AllocID, w *work) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.busy[id] == w {
		delete(a.busy, id)
	}
	close(w.done)
}

// readyChange returns the change that records that all volumes of the alloc are published, with the answer of the call.
// It is empty if that is recorded already. It fails if the alloc is being released, or has no record.
func readyChange(
	v registry.View, call registry.Call, id registry.AllocID, plans map[string]hooks.Plan,
) (registry.Change, error) {
	al, known := v.Alloc(id)
	if !known || al.State == registry.AllocReleasing {
		return registry.Change{}, releasedError(id)
	}
	op, _ := v.Operation(call.ID)
	if al.State == registry.AllocReady && len(al.Waiting) == 0 && (call.ID == "" || len(op.Answer) > 0) {
		return registry.Change{}, nil
	}
	al.State, al.Waiting = registry.AllocReady, nil
	return registry.Change{Put: append(call.Answered(plans), al)}, nil
}

// inVolumeOrder sorts the requests by volume. All allocs use the same order, so that two allocs never deadlock.
func inVolumeOrder(requests []hooks.VolumeRequest) []hooks.VolumeRequest {
	return slices.SortedFunc(slices.Values(requests), func(x, y hooks.VolumeRequest) int {
		return cmp.Or(cmp.Compare(x.Source, y.Source), cmp.Compare(x.Name, y.Name))
	})
}

// Sync begins the release of every known alloc that is not in living, and returns the IDs of these allocs.
func (a *Allocs) Sync(ctx context.Context, living []registry.AllocID) ([]registry.AllocID, error) {
	var gone []registry.AllocID
	err := a.State.View(ctx, func(v registry.View) error {
		for _, al := range v.Allocs() {
			if !slices.Contains(living, al.ID) {
				gone = append(gone, al.ID)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for _, id := range gone {
		if _, err := a.recordRelease(ctx, registry.Call{}, id, false); err != nil {
			return nil, err
		}
		a.startRelease(id)
	}
	return gone, nil
}

// mountRequest claims, attaches, stages and publishes the volume of the request. The publish creates an inline volume.
func (req *request) mountRequest(
	ctx context.Context, g hooks.AllocGroup, r hooks.VolumeRequest,
) (at hooks.Published, err error) {
	if err := req.awaitAdmitted(ctx, g); err != nil {
		return at, err
	}
	vol, claim, err := req.claim(ctx, g, r)
	if err != nil {
		return at, err
	}
	node, err := req.awaitNode(ctx, vol.Plugin)
	if err != nil {
		return at, err
	}
	if err := req.awaitAttach(ctx, vol); err != nil {
		return at, err
	}
	unlock, err := req.lock(ctx, fmt.Sprintf("a mount for alloc %s", g.Alloc))
	if err != nil {
		return at, err
	}
	defer unlock()
	if err := req.settleForMount(ctx); err != nil {
		return at, err
	}
	return req.mount(ctx, vol, claim.Usage, node)
}

// awaitAttach waits until the volume's plugin can attach it, if the volume needs that.
func (req *request) awaitAttach(ctx context.Context, vol registry.Volume) error {
	ctx, cancel := req.waitContext(ctx)
	defer cancel()
	to, err := req.attachTo(ctx, "")
	if err != nil {
		return err
	}
	return req.controller.AwaitAttach(ctx, vol, to, req.recordControllerWait(ctx))
}

// mount attaches, stages and publishes the volume, sets the ownership of its files, and then mounts its parts. Without
// an expansion, stage and publish are one series of calls.
func (req *request) mount(
	ctx context.Context, vol registry.Volume, u registry.Usage, node registry.Instance,
) (hooks.Published, error) {
	u, err := req.withMountGroup(ctx, u, node)
	if err != nil {
		return hooks.Published{}, err
	}
	req.step = registry.StepAttach
	to, err := req.attachTo(ctx, node.Fingerprint.NodeID)
	if err != nil {
		return hooks.Published{}, err
	}
	if err := req.controller.Attach(ctx, req.by, vol, u, to); err != nil {
		return hooks.Published{}, err
	}
	expands, err := req.stager.ExpansionPending(ctx, req.key.Volume)
	if err != nil {
		return hooks.Published{}, err
	}
	if expands {
		req.step = registry.StepStage
		if err := req.stager.Stage(ctx, req.by, vol, u); err != nil {
			return hooks.Published{}, err
		}
		if err := req.grow(ctx); err != nil {
			return hooks.Published{}, err
		}
	}
	if expands || len(req.parts) > 0 || u.Ownership != (registry.Ownership{}) {
		req.then = nil // the publish is not the last step
	}
	req.step = registry.StepPublish
	at, err := req.stager.Publish(ctx, req.by, vol, req.key, u, req.then)
	if err != nil {
		return hooks.Published{}, err
	}
	if err := req.grow(ctx); err != nil {
		return hooks.Published{}, err
	}
	if err := req.setOwnership(ctx, u); err != nil {
		return hooks.Published{}, err
	}
	at.Parts, err = req.stager.MountParts(ctx, req.key, req.parts)
	return at, err
}

// attachTo returns this node as the target of an attach.
func (req *request) attachTo(ctx context.Context, id registry.NodeID) (to intent.AttachTo, err error) {
	to = intent.AttachTo{Node: req.host.Node, ID: id}
	err = req.State.View(ctx, func(v registry.View) error {
		to.Used = req.stager.usedHere(v, req.key.Volume)
		return nil
	})
	return to, err
}

// grow completes a pending expansion on this node (Stager.Grow), and records the node's progress in the volume.
func (req *request) grow(ctx context.Context) error {
	outerStep := req.step
	req.step = registry.StepExpand
	done, err := req.stager.Grow(ctx, req.by, req.key.Volume, false)
	if err == nil {
		err = req.controller.NodeExpanded(ctx, req.key.Volume, done)
	}
	if err == nil {
		req.step = outerStep
	}
	return err
}
