package host

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// keeper has one shim active until ctx ends: it starts one that dies again, carries out swaps, and stands by while the new one bakes. All of it
// is done on one goroutine, so there is never more than one change of shim at a time.
type keeper struct {
	*Host
	active *shim
	born   time.Time
	wait   *backoff
	baking *bake // nil: no swap is young
}

// bake is a swap whose old shim stands by.
type bake struct {
	swapped Swapped
	parked  *shim // nil: it has died since
	digest  digest
	over    *time.Timer
}

// ask is a swap that is prepared: its candidate has rehearsed.
type ask struct {
	ctx    context.Context
	swap   *swap
	fresh  *shim
	digest digest
	done   chan error
}

// keep returns what went wrong with the end of the last shim.
func (h *Host) keep(ctx context.Context, first *shim) error {
	k := &keeper{Host: h, active: first, born: time.Now(), wait: newBackoff()}
	for {
		select {
		case <-k.active.process.Done():
			if !k.died(ctx) {
				return k.unpark(ctx)
			}
		case <-k.parkedDied():
			k.config.Logger.Warn("the shim that stands by has died; a rollback would start its binary anew")
			k.baking.parked.cancel()
			k.baking.parked = nil
		case <-k.baked():
			k.commit(ctx)
		case a := <-h.swaps:
			k.commit(ctx)
			a.done <- k.swap(ctx, a)
			if k.active == nil && !k.restart(ctx) {
				return k.unpark(ctx)
			}
		case <-ctx.Done():
			return errors.Join(k.active.end(ctx), k.unpark(ctx))
		}
	}
}

func (k *keeper) parkedDied() <-chan struct{} {
	if k.baking == nil || k.baking.parked == nil {
		return nil
	}
	return k.baking.parked.process.Done()
}

func (k *keeper) baked() <-chan time.Time {
	if k.baking == nil {
		return nil
	}
	return k.baking.over.C
}

// died deals with the death of the active shim, and says whether there is another one.
func (k *keeper) died(ctx context.Context) bool {
	dead := k.active
	k.gate.close(dead.process.Err())
	if err := dead.end(ctx); err != nil {
		k.config.Logger.Warn("a dead shim has left something", "error", err)
	}
	why := withLastWords(dead.process.Err(), dead.process)
	k.gate.close(why)
	if k.baking != nil {
		return k.rollBack(ctx, why)
	}
	k.config.Logger.Error("the shim has died; it is started again", "error", why)
	return k.restart(ctx)
}

// restart starts the shim's binary until one is active or ctx ends, with a back-off that a minute of good life resets.
func (k *keeper) restart(ctx context.Context) bool {
	if time.Since(k.born) > goodLife {
		k.wait = newBackoff()
	}
	k.active = k.Host.restart(ctx, k.wait)
	if k.active == nil {
		return false
	}
	k.is(k.active)
	return true
}

// is has calls go to the shim.
func (k *keeper) is(sh *shim) {
	k.active, k.born = sh, time.Now()
	k.gate.open(sh)
}

// swap hands over to the candidate.
func (k *keeper) swap(ctx context.Context, a *ask) error {
	old := k.active
	a.swap.old = old
	active, err := a.swap.handOver(a.ctx)
	switch active {
	case side(a.fresh):
		k.active, k.born = a.fresh, time.Now()
		k.answerFor(a.fresh)
		was := k.running.now()
		k.running.set(a.digest)
		k.baking = &bake{swapped: a.swap.report, digest: was, over: time.NewTimer(k.config.Bake)}
		if !gone(old) {
			k.baking.parked = old
		}
	case side(old):
		k.active = old
	default:
		k.gate.close(err)
		k.active = nil
		_ = old.end(ctx)
	}
	return err
}

// commit ends the bake: the old shim is not needed any more.
func (k *keeper) commit(ctx context.Context) {
	if k.baking == nil {
		return
	}
	b := k.baking
	if err := k.unpark(ctx); err != nil {
		k.config.Logger.Warn("the replaced shim has left something", "error", err)
	}
	b.swapped.Outcome = SwapCommitted
	k.history.add(b.swapped)
}

// unpark ends the shim that stands by, if there is one.
func (k *keeper) unpark(ctx context.Context) error {
	b := k.baking
	k.baking = nil
	if b == nil {
		return nil
	}
	b.over.Stop()
	if b.parked == nil {
		return nil
	}
	return b.parked.end(ctx)
}

// rollBack has the old shim take over from one that died young, or its binary.
func (k *keeper) rollBack(ctx context.Context, why error) bool {
	b := k.baking
	k.baking = nil
	b.over.Stop()
	b.swapped.Outcome, b.swapped.Failed, b.swapped.Reason = SwapRolledBack, SwapBake, why.Error()
	k.history.add(b.swapped)
	k.running.set(b.digest)
	k.config.Logger.Error("the new shim has died; the old one takes over again", "error", why)
	if b.parked == nil {
		return k.restart(ctx)
	}
	if err := k.revive(ctx, b.parked); err != nil {
		k.config.Logger.Error("the old shim cannot take over again; its binary is started", "error", err)
		_ = b.parked.end(ctx)
		return k.restart(ctx)
	}
	k.is(b.parked)
	return true
}

// revive makes a shim active that stood by.
func (k *keeper) revive(ctx context.Context, sh *shim) error {
	ctx, cancel := context.WithTimeout(ctx, activateLater)
	defer cancel()
	if _, err := sh.activate(ctx, left{}); err != nil {
		return fmt.Errorf("activate: %w", err)
	}
	return nil
}
