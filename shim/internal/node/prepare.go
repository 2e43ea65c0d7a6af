package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Waits and back-offs of this package.
const (
	pluginWait   = time.Minute            // for a plugin, where the caller sets no deadline
	roundLimit   = 30 * time.Second       // of waits and further tries, while a volume is taken back
	retryFirst   = 200 * time.Millisecond // between two tries to take an alloc down
	retryCeiling = 30 * time.Second
)

// Allocs holds the volumes of allocs.
type Allocs struct {
	intent.Calls
	controller Controller
	mounter    Mounter
	host       Host
	logger     hclog.Logger

	crew crew
	mu   sync.Mutex // guards busy and loose; held for no longer than a look-up
	// busy is what is under way for each alloc: one Prepare, or one teardown.
	busy map[registry.AllocID]*work
	// loose is the volumes that nobody claims and that are being taken down.
	loose map[registry.VolumeKey]bool
}

// work is a Prepare or a teardown under way.
type work struct {
	teardown bool
	stopped  atomic.Bool // a Prepare that a Release has ended
	cancel   context.CancelCauseFunc
	done     chan struct{}
	cut      error // why it has ended before it was done: that of the crew. Readable once done is closed
}

// Host is what Hello told of the host.
type Host struct {
	Node       registry.NodeName
	Operations []hooks.Operation
}

var errReleased = errors.New("the alloc is being released")

// NewAllocs starts nothing; Run does.
func NewAllocs(calls intent.Calls, c Controller, m Mounter, h Host, logger hclog.Logger) *Allocs {
	return &Allocs{
		Calls: calls, controller: c, mounter: m, host: h, logger: logger,
		busy: map[registry.AllocID]*work{}, loose: map[registry.VolumeKey]bool{},
	}
}

// Run takes down what the last shim had begun to take down, what nobody claims, and what is released from now on, until
// ctx ends.
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
		a.teardown(id)
	}
	a.crew.start(a.lookAround)
	return a.crew.run(ctx)
}

// lookAround takes down what nobody claims.
func (a *Allocs) lookAround(ctx context.Context) {
	persist(ctx, func(pause time.Duration) error {
		err := a.TakeDownUnclaimed(ctx)
		if err != nil && ctx.Err() == nil {
			a.logger.Warn("cannot list unclaimed volumes yet", "again_in", pause, "error", err)
		}
		return err
	})
}

// Prepare claims, attaches, stages and publishes what the alloc asks for, and says what to apply to its tasks. Called
// again, it finds what is done already. When it fails, what it has done stands until it is called again or the alloc is
// released.
func (a *Allocs) Prepare(ctx context.Context, call registry.Call, g hooks.AllocGroup) (map[string]hooks.Plan, error) {
	spec, err := config.OpenGroup(g.Sealed)
	if err == nil {
		spec, err = spec.For(g.Alloc, g.Index)
	}
	if err != nil {
		return nil, fmt.Errorf("alloc %s: %w", g.Alloc, err)
	}
	ctx, finish, err := a.begin(ctx, g.Alloc)
	if err != nil {
		return nil, err
	}
	defer finish()
	return a.prepare(ctx, call, g, spec)
}

// prepare brings the volumes of an alloc up, one after the other, and records that the alloc is ready.
func (a *Allocs) prepare(
	ctx context.Context, call registry.Call, g hooks.AllocGroup, spec hooks.GroupSpec,
) (map[string]hooks.Plan, error) {
	if err := a.admit(ctx, g); err != nil {
		return nil, err
	}
	published := map[registry.RequestName]hooks.Published{}
	for _, r := range inVolumeOrder(spec.Volumes) {
		h := &hold{Allocs: a, by: intent.Caller{Call: call}, key: registry.ClaimKey{Alloc: g.Alloc, Request: r.Name},
			parts: spec.Parts(r.Name)}
		at, err := h.up(ctx, g, r)
		if err != nil {
			if ctx.Err() == nil { // else what it waited for says more
				h.failed(ctx, err, time.Time{})
			}
			return nil, fmt.Errorf("volume %q of alloc %s: %w", r.Name, g.Alloc, err)
		}
		published[r.Name] = at
	}
	plans, err := plansOf(g, spec, published, a.host)
	if err != nil {
		return nil, err
	}
	return plans, a.ready(ctx, call, g.Alloc, plans)
}

// plansOf is what to apply to the alloc's tasks.
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

// admit records the alloc, unless it is known. An alloc that was stopped before is not recorded after that: its volumes
// would never be taken back.
func (a *Allocs) admit(ctx context.Context, g hooks.AllocGroup) error {
	_, err := registry.Ensure(ctx, a.State, func(v registry.View) (registry.Change, error) {
		al, known := v.Alloc(g.Alloc)
		switch {
		case ctx.Err() != nil:
			return registry.Change{}, context.Cause(ctx)
		case known && al.State == registry.AllocReleasing:
			return registry.Change{}, isReleased(g.Alloc)
		case known:
			return registry.Change{}, nil
		}
		return registry.Change{Put: []registry.Record{registry.Alloc{
			ID: g.Alloc, Job: g.Job, Group: g.Group, Namespace: g.Namespace, Index: g.Index, Node: a.host.Node,
			Sealed: g.Sealed,
			State:  registry.AllocPreparing, Since: a.Now(),
		}}}, nil
	})
	if err != nil {
		return fmt.Errorf("record alloc %s: %w", g.Alloc, err)
	}
	return nil
}

func isReleased(id registry.AllocID) error {
	return registry.Errorf(registry.ErrConflict, "%w: alloc %s; wait for it, and place a new alloc", errReleased, id)
}

// begin waits until no other Prepare is under way for the alloc, and makes this one cancellable by a Release. A Release
// that came while it waited is meant for it too.
func (a *Allocs) begin(ctx context.Context, id registry.AllocID) (context.Context, func(), error) {
	for {
		a.mu.Lock()
		other := a.busy[id]
		if other == nil {
			break
		}
		released := other.teardown
		a.mu.Unlock()
		if released {
			return nil, nil, isReleased(id)
		}
		select {
		case <-other.done:
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("wait for what is under way for alloc %s: %w", id, context.Cause(ctx))
		}
		if other.stopped.Load() {
			return nil, nil, isReleased(id)
		}
	}
	defer a.mu.Unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	w := &work{cancel: cancel, done: make(chan struct{})}
	a.busy[id] = w
	return ctx, func() { cancel(nil); a.end(id, w) }, nil
}

// stop ends a Prepare of the alloc that is under way, if there is one.
func (a *Allocs) stop(id registry.AllocID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if w := a.busy[id]; w != nil {
		w.stop()
	}
}

func (w *work) stop() {
	w.stopped.Store(true)
	w.cancel(errReleased)
}

func (a *Allocs) end(id registry.AllocID, w *work) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.busy[id] == w {
		delete(a.busy, id)
	}
	close(w.done)
}

// ready records that all volumes of the alloc are there. A Release that came meanwhile wins.
func (a *Allocs) ready(
	ctx context.Context, call registry.Call, id registry.AllocID, plans map[string]hooks.Plan,
) error {
	_, err := a.State.Commit(ctx, func(v registry.View) (registry.Change, error) {
		al, known := v.Alloc(id)
		if !known || al.State == registry.AllocReleasing {
			return registry.Change{}, isReleased(id)
		}
		al.State, al.Waiting = registry.AllocReady, nil
		return registry.Change{Put: append(call.Answered(plans), al)}, nil
	})
	return err
}

// inVolumeOrder is the requests in one order for everybody, so that two allocs never wait for each other's volumes.
func inVolumeOrder(requests []hooks.VolumeRequest) []hooks.VolumeRequest {
	return slices.SortedFunc(slices.Values(requests), func(x, y hooks.VolumeRequest) int {
		return cmp.Or(cmp.Compare(x.Source, y.Source), cmp.Compare(x.Name, y.Name))
	})
}

// Sync releases every alloc that is known and does not live.
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
		if _, err := a.releasing(ctx, registry.Call{}, id); err != nil {
			return nil, err
		}
		a.teardown(id)
	}
	return gone, nil
}

// up brings one request from nothing to a published volume: claim, attach, stage, publish. An inline volume is made by
// its publish.
func (h *hold) up(ctx context.Context, g hooks.AllocGroup, r hooks.VolumeRequest) (at hooks.Published, err error) {
	h.step = registry.StepClaim
	vol, err := h.volume(ctx, g, r)
	if err != nil {
		return at, err
	}
	h.name, h.key.Volume = vol.VolumeName(), vol.VolumeKey()
	claim, err := h.controller.Claim(ctx, registry.Claim{
		Volume: vol.VolumeKey(), Name: vol.VolumeName(), Alloc: g.Alloc, Request: r.Name, Node: h.host.Node,
		Usage: r.Usage,
	})
	if err != nil {
		return at, err
	}
	node, err := h.awaitNode(ctx, vol.Plugin)
	if err != nil {
		return at, err
	}
	if err := h.awaitAttach(ctx, vol); err != nil {
		return at, err
	}
	leave, err := h.turn(ctx, fmt.Sprintf("a mount for alloc %s", g.Alloc))
	if err != nil {
		return at, err
	}
	defer leave()
	if err := h.settle(ctx, func(open registry.Intent) bool {
		return h.own(open) && open.RPC == registry.NodePublishRPC
	}); err != nil {
		return at, err
	}
	return h.mount(ctx, vol, claim.Usage, node)
}

// awaitAttach waits until the volume's plugin can be asked to attach it, if it has to be.
func (h *hold) awaitAttach(ctx context.Context, vol registry.Volume) error {
	ctx, cancel := h.bounded(ctx)
	defer cancel()
	to, err := h.attachTo(ctx, "")
	if err != nil {
		return err
	}
	return h.controller.AwaitAttach(ctx, vol, to, h.awaits(ctx, registry.RoleController))
}

// mount has the volume attached, staged and published, and parts of it mounted, each only after the one before.
func (h *hold) mount(
	ctx context.Context, vol registry.Volume, u registry.Usage, node registry.Instance,
) (hooks.Published, error) {
	h.step = registry.StepAttach
	to, err := h.attachTo(ctx, node.Fingerprint.NodeID)
	if err != nil {
		return hooks.Published{}, err
	}
	if err := h.controller.Attach(ctx, h.by, vol, u, to); err != nil {
		return hooks.Published{}, err
	}
	h.step = registry.StepStage
	if err := h.mounter.Stage(ctx, h.by, vol, u); err != nil {
		return hooks.Published{}, err
	}
	if err := h.grow(ctx); err != nil {
		return hooks.Published{}, err
	}
	h.step = registry.StepPublish
	at, err := h.mounter.Publish(ctx, h.by, vol, h.key, u)
	if err != nil {
		return hooks.Published{}, err
	}
	if err := h.grow(ctx); err != nil {
		return hooks.Published{}, err
	}
	at.Parts, err = h.mounter.MountParts(ctx, h.key, h.parts)
	return at, err
}

// attachTo is this node, as a volume is attached to it.
func (h *hold) attachTo(ctx context.Context, id registry.NodeID) (to intent.AttachTo, err error) {
	to = intent.AttachTo{Node: h.host.Node, ID: id}
	err = h.State.View(ctx, func(v registry.View) error {
		p, _ := v.Staging(h.key.Volume)
		to.Used = p.State != registry.MarkNone || len(v.Refs(h.key.Volume)) > 0
		return nil
	})
	return to, err
}

// grow has an expansion seen to that was made while nobody used the volume here, once it is staged, or published if it
// has to be.
func (h *hold) grow(ctx context.Context) error {
	before := h.step
	h.step = registry.StepExpand
	done, err := h.mounter.Grow(ctx, h.by, h.key.Volume, false)
	if err == nil {
		err = h.controller.NodeExpanded(ctx, h.key.Volume, done)
	}
	if err == nil {
		h.step = before
	}
	return err
}

// volume is the volume that the request names, or makes.
func (h *hold) volume(ctx context.Context, g hooks.AllocGroup, r hooks.VolumeRequest) (vol registry.Volume, err error) {
	if r.Ephemeral != nil {
		return h.inline(ctx, g, r)
	}
	source := r.Source
	if r.PerAlloc {
		source = fmt.Sprintf("%s[%d]", source, g.Index)
	}
	id, err := registry.ParseVolumeID(source)
	if err != nil {
		return vol, err
	}
	h.name = registry.VolumeName{Namespace: g.Namespace, ID: id}
	err = h.State.View(ctx, func(v registry.View) error {
		var known bool
		vol, known = v.Volume(h.name)
		switch {
		case !known:
			return registry.Errorf(registry.ErrNotFound,
				"volume %s is not known in namespace %s; create or register it first", id, g.Namespace)
		case vol.Ephemeral:
			return registry.Errorf(registry.ErrConflict,
				"volume %s is an inline volume of alloc %s: no other alloc can use it", id, vol.Owner)
		}
		return nil
	})
	return vol, err
}

// inline makes the request's volume known, for as long as the alloc is.
func (h *hold) inline(ctx context.Context, g hooks.AllocGroup, r hooks.VolumeRequest) (vol registry.Volume, err error) {
	vol = inlineVolume(g, r)
	vol.Since = h.Now()
	h.name = vol.VolumeName()
	_, err = registry.Ensure(ctx, h.State, func(v registry.View) (registry.Change, error) {
		old, known := v.Volume(h.name)
		switch {
		case known && old.Owner != g.Alloc:
			return registry.Change{}, registry.Errorf(registry.ErrConflict,
				"volume %s has the name of an inline volume of alloc %s; rename it",
				h.name, g.Alloc)
		case known:
			vol = old
			return registry.Change{}, nil
		}
		return registry.Change{Put: []registry.Record{vol}}, nil
	})
	return vol, err
}

// inlineVolume is the volume that an ephemeral block asks for.
func inlineVolume(g hooks.AllocGroup, r hooks.VolumeRequest) registry.Volume {
	return registry.Volume{
		VolumeSpec: registry.VolumeSpec{
			Namespace: g.Namespace, ID: registry.InlineID(g.Alloc, r.Name), Name: string(r.Name),
			Plugin:   r.Ephemeral.Plugin,
			External: hooks.EphemeralID(g.Alloc, r.Name), Context: r.Ephemeral.Context, Secrets: r.Ephemeral.Secrets,
			Capabilities: []registry.VolumeCapability{{Access: r.Usage.Access, Attachment: r.Usage.Attachment}},
		},
		State: registry.VolumeReady, Ephemeral: true, Owner: g.Alloc,
	}
}
