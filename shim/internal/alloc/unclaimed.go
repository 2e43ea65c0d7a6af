package alloc

import (
	"context"
	"fmt"
	"time"

	"holdfast/registry"
)

// TakeDownUnclaimed has what is staged or attached without a claim unstaged and detached. It only begins that: it goes on until it is done,
// or somebody claims the volume.
func (a *Allocs) TakeDownUnclaimed(ctx context.Context) error {
	var loose []registry.Placement
	err := a.log.View(ctx, func(v registry.View) error {
		for _, p := range v.Placements() {
			if unclaimed(v, p.Volume) {
				loose = append(loose, p)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("load placements: %w", err)
	}
	for _, p := range loose {
		a.takeDownUnclaimed(p)
	}
	return nil
}

// unclaimed says whether nobody uses the volume or is about to, and something of it is left.
func unclaimed(v registry.View, key registry.VolumeKey) bool {
	_, placed := v.Placement(key)
	return placed && len(v.Claims(key)) == 0 && len(v.Refs(key)) == 0
}

func (a *Allocs) takeDownUnclaimed(p registry.Placement) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.loose[p.Volume] {
		return
	}
	a.loose[p.Volume] = a.crew.start(func(ctx context.Context) {
		a.untilDown(ctx, p)
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.loose, p.Volume)
	})
}

// untilDown tries until nothing is left of the volume, it is claimed, or ctx ends.
func (a *Allocs) untilDown(ctx context.Context, p registry.Placement) {
	persist(ctx, func(pause time.Duration) error {
		h := &hold{Allocs: a, key: registry.ClaimKey{Volume: p.Volume}, name: p.Name}
		err := h.clear(ctx)
		if err != nil && ctx.Err() == nil {
			a.logger.Warn("a volume that nobody claims cannot be taken down yet", "volume", p.Name, "again_in", pause, "error", err)
		}
		return err
	})
}

// clear unstages and detaches a volume that nobody claims.
func (h *hold) clear(ctx context.Context) (err error) {
	leave, err := h.turn(ctx, "the end of what nobody claims")
	if err != nil {
		return err
	}
	defer leave()
	var still bool
	var p registry.Placement
	err = h.log.View(ctx, func(v registry.View) error {
		still = unclaimed(v, h.key.Volume)
		p, _ = v.Placement(h.key.Volume)
		return nil
	})
	if err != nil || !still {
		return err
	}
	h.by.RetryUntil = time.Now().Add(roundLimit)
	if p.Stage != registry.MarkNone {
		if _, err := h.awaitNode(ctx, p.Volume.Plugin); err != nil {
			return err
		}
	}
	if err := h.settleDown(ctx, func(open registry.Intent) bool { return open.Alloc == "" }); err != nil {
		return err
	}
	return h.dismount(ctx)
}
