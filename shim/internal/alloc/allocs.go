package alloc

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
	log        registry.State
	plugins    Plugins
	claims     Claims
	controller Controller
	node       Node
	locks      *intent.Locks
	host       Host
	clock      Clock
	logger     hclog.Logger

	// Calm is how long Run waits before it looks for what nobody claims: the shim before may just have done so. Breath is how long it waits before it
	// goes on with releases that the last shim had begun, but for those that are called for: others are to be answered first. Set before Run.
	Calm, Breath time.Duration

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

// Clock is the time as records keep it.
type Clock struct {
	Now  func() time.Time         // wall time, for people
	Boot func() registry.BootTime // for deadlines that outlive the process
}

// Host is what Hello told of the host.
type Host struct {
	Node       registry.NodeName
	Operations []hooks.Operation
}

var errReleased = errors.New("the alloc is being released")

// NewAllocs starts nothing; Run does.
func NewAllocs(log registry.State, p Plugins, cl Claims, co Controller, n Node, locks *intent.Locks, h Host, c Clock, logger hclog.Logger) *Allocs {
	return &Allocs{
		log: log, plugins: p, claims: cl, controller: co, node: n, locks: locks, host: h, clock: c, logger: logger,
		busy: map[registry.AllocID]*work{}, loose: map[registry.VolumeKey]bool{},
	}
}

// Run takes down what the last shim had begun to take down, what nobody claims, and what is released from now on, until ctx ends.
func (a *Allocs) Run(ctx context.Context) error {
	var releasing []registry.AllocID
	err := a.log.View(ctx, func(v registry.View) error {
		for _, al := range v.AllocsWhere(func(al registry.Alloc) bool { return al.State == registry.AllocReleasing }) {
			releasing = append(releasing, al.ID)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("load allocs: %w", err)
	}
	a.crew.start(func(ctx context.Context) {
		wait := a.Breath
		for _, id := range releasing {
			if !passed(ctx, wait) {
				return
			}
			a.teardown(id)
			wait = between(a.Breath, len(releasing))
		}
	})
	a.crew.start(func(ctx context.Context) {
		if passed(ctx, a.Calm) {
			a.lookAround(ctx)
		}
	})
	return a.crew.run(ctx)
}

// passed waits, and says whether ctx has not ended before.
func passed(ctx context.Context, wait time.Duration) bool {
	if wait <= 0 {
		return ctx.Err() == nil
	}
	select {
	case <-time.After(wait):
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}

// together is how long it takes at most to begin what does not begin at once after a breath.
const together = time.Second

// between is what passes between the beginnings of n things after a breath: who is served meanwhile does not meet them all at once.
func between(breath time.Duration, n int) time.Duration {
	return min(breath/10, together/time.Duration(n))
}

// lookAround takes down what nobody claims.
func (a *Allocs) lookAround(ctx context.Context) {
	persist(ctx, func(pause time.Duration) error {
		err := a.TakeDownUnclaimed(ctx)
		if err != nil && ctx.Err() == nil {
			a.logger.Warn("what nobody claims cannot be looked for yet", "again_in", pause, "error", err)
		}
		return err
	})
}

// Prepare claims, attaches, stages and publishes what the alloc asks for, and says what to apply to its tasks. Called again, it finds
// what is done already. When it fails, what it has done stands until it is called again or the alloc is released.
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
func (a *Allocs) prepare(ctx context.Context, call registry.Call, g hooks.AllocGroup, spec hooks.GroupSpec) (map[string]hooks.Plan, error) {
	if err := a.admit(ctx, g); err != nil {
		return nil, err
	}
	published := map[registry.RequestName]hooks.Published{}
	for _, r := range inVolumeOrder(spec.Volumes) {
		h := &hold{Allocs: a, by: intent.Caller{Call: call}, key: registry.ClaimKey{Alloc: g.Alloc, Request: r.Name}, parts: spec.Parts(r.Name)}
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
func plansOf(g hooks.AllocGroup, spec hooks.GroupSpec, published map[registry.RequestName]hooks.Published, h Host) (map[string]hooks.Plan, error) {
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

// admit records the alloc, unless it is known. An alloc that was stopped before is not recorded after that: its volumes would never be taken back.
func (a *Allocs) admit(ctx context.Context, g hooks.AllocGroup) error {
	_, err := registry.Ensure(ctx, a.log, func(v registry.View) (registry.Change, error) {
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
			ID: g.Alloc, Job: g.Job, Group: g.Group, Namespace: g.Namespace, Index: g.Index, Node: a.host.Node, Sealed: g.Sealed,
			State: registry.AllocPreparing, Since: a.clock.Now(),
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

// begin waits until no other Prepare is under way for the alloc, and makes this one cancellable by a Release. A Release that came while it
// waited is meant for it too.
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
func (a *Allocs) ready(ctx context.Context, call registry.Call, id registry.AllocID, plans map[string]hooks.Plan) error {
	_, err := a.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
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
	err := a.log.View(ctx, func(v registry.View) error {
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
