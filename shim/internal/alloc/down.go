package alloc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"holdfast/registry"
)

// Release takes back what the alloc holds. It answers when all is taken back, or when ctx ends; then it goes on by itself, over
// restarts too. An alloc that is not known is released already.
func (a *Allocs) Release(ctx context.Context, call registry.Call, id registry.AllocID) error {
	a.stop(id) // before the record is looked for: a Prepare may be about to make it
	known, err := a.releasing(ctx, call, id)
	if err != nil || !known {
		return err
	}
	w := a.teardown(id)
	if w == nil {
		return registry.Errorf(registry.ErrUnavailable, "alloc %s will be released by the next shim: this one ends", id)
	}
	select {
	case <-w.done:
	case <-ctx.Done():
		return fmt.Errorf("alloc %s is still being released, and that goes on: %w", id, errors.Join(context.Cause(ctx), a.why(ctx, id)))
	}
	return a.gone(ctx, call, id)
}

// releasing records that the alloc is being taken down: from now on it is, whatever happens. The first call that wants it is answered by the
// transaction that forgets the alloc.
func (a *Allocs) releasing(ctx context.Context, call registry.Call, id registry.AllocID) (known bool, err error) {
	_, err = a.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		al, ok := v.Alloc(id)
		known = ok
		switch {
		case !ok:
			return registry.Change{Put: call.Answered(struct{}{})}, nil
		case al.State == registry.AllocReleasing:
			return registry.Change{}, nil
		}
		al.State, al.Waits, al.Release = registry.AllocReleasing, "", call
		return registry.Change{Put: []registry.Record{al}}, nil
	})
	if err != nil {
		return false, fmt.Errorf("record the release of alloc %s: %w", id, err)
	}
	return known, nil
}

// teardown has the alloc taken down on a goroutine of the crew, once; nil if the crew has ended. It ends a Prepare that is under way.
func (a *Allocs) teardown(id registry.AllocID) *work {
	a.mu.Lock()
	defer a.mu.Unlock()
	earlier := a.busy[id]
	if earlier != nil && earlier.teardown {
		return earlier
	}
	w := &work{teardown: true, cancel: func(error) {}, done: make(chan struct{})}
	if earlier != nil {
		earlier.stop()
	}
	started := a.crew.start(func(ctx context.Context) {
		defer a.end(id, w)
		if earlier != nil {
			<-earlier.done
		}
		a.takeDown(ctx, id)
	})
	if !started {
		return nil
	}
	a.busy[id] = w
	return w
}

// errRound is why a try to take a volume back ends: others get its lane, and people see what is waited for.
var errRound = errors.New("no success within this try")

// takeDown tries until the alloc is gone or ctx ends.
func (a *Allocs) takeDown(ctx context.Context, id registry.AllocID) {
	wait := retryFirst
	for {
		err := a.down(ctx, id)
		if err == nil || ctx.Err() != nil {
			return
		}
		a.waits(ctx, id, err.Error())
		a.logger.Warn("an alloc cannot be released yet", "alloc", id, "again_in", wait, "error", err)
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
		wait = min(wait*2, retryCeiling)
	}
}

// down takes back every volume of the alloc, each in its own order, and then forgets the alloc. What fails for one volume does not hold
// up another one.
func (a *Allocs) down(ctx context.Context, id registry.AllocID) error {
	var claims []registry.Claim
	if err := a.log.View(ctx, func(v registry.View) error { claims = v.ClaimsOf(id); return nil }); err != nil {
		return err
	}
	slices.Reverse(claims)
	var errs []error
	for _, c := range claims {
		if err := a.takeBack(ctx, c); err != nil {
			errs = append(errs, fmt.Errorf("volume %s: %w", c.Name, err))
		}
	}
	if len(errs) > 0 {
		return errors.Join(errs...)
	}
	_, err := a.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		al, known := v.Alloc(id)
		if !known {
			return registry.Change{}, nil
		}
		return registry.Change{Put: al.Release.Answered(struct{}{}), Delete: []registry.Key{registry.AllocRecord(id)}}, nil
	})
	return err
}

// takeBack undoes one request: unpublish, unstage and detach after the last user, then the claim. Each step only after the one before. It
// has the volume's lane for one round at most.
func (a *Allocs) takeBack(ctx context.Context, c registry.Claim) error {
	leave, err := a.lanes.Enter(ctx, c.Volume, fmt.Sprintf("the release of alloc %s", c.Alloc))
	if err != nil {
		return err
	}
	defer leave()
	ctx, cancel := context.WithTimeoutCause(ctx, roundLimit, errRound)
	defer cancel()
	mounted, last, err := a.users(ctx, c)
	if err != nil {
		return err
	}
	if mounted {
		if _, err := a.awaitNode(ctx, c.Alloc, c.Volume.Plugin); err != nil {
			return err
		}
	}
	var call registry.Call
	if err := a.node.Unpublish(ctx, call, c.ClaimKey()); err != nil {
		return err
	}
	if last {
		if err := a.node.Unstage(ctx, call, c.Volume); err != nil {
			return err
		}
		if err := a.controller.Detach(ctx, call, c.Volume); err != nil {
			return err
		}
	}
	_, err = a.claims.Release(ctx, c.ClaimKey())
	return err
}

// users says whether anything of the claim may be mounted, and whether nobody else has the volume published on this node. Who holds a claim
// and has not come so far stages the volume again.
func (a *Allocs) users(ctx context.Context, c registry.Claim) (mounted, last bool, err error) {
	err = a.log.View(ctx, func(v registry.View) error {
		last = true
		for _, r := range v.Refs(c.Volume) {
			own := r.ClaimKey() == c.ClaimKey()
			mounted, last = mounted || own, last && own
		}
		if p, ok := v.Placement(c.Volume); ok && last {
			mounted = mounted || p.Stage != registry.MarkNone
		}
		return nil
	})
	return mounted, last, err
}

// gone is nil if the alloc is forgotten. Then the call is answered for good, whichever call began the release.
func (a *Allocs) gone(ctx context.Context, call registry.Call, id registry.AllocID) error {
	_, err := a.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		if al, known := v.Alloc(id); known {
			return registry.Change{}, registry.Errorf(registry.ErrUnavailable, "alloc %s is not released yet: %s", id, al.Waits)
		}
		if _, answered := v.Operation(call.ID); answered {
			return registry.Change{}, nil
		}
		return registry.Change{Put: call.Answered(struct{}{})}, nil
	})
	return err
}

// why is what the alloc's release waits for, as an error.
func (a *Allocs) why(ctx context.Context, id registry.AllocID) error {
	var waits string
	_ = a.log.View(context.WithoutCancel(ctx), func(v registry.View) error {
		al, _ := v.Alloc(id)
		waits = al.Waits
		return nil
	})
	if waits == "" {
		return nil
	}
	return registry.Errorf(registry.ErrUnavailable, "%s", waits)
}
