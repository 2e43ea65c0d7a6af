package alloc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/registry"
)

// use is how a volume is used on this node, as one request sees it.
type use struct {
	own    bool // published for the request, or maybe
	others bool // published for somebody else, or maybe
	staged bool // or maybe
}

// use looks. Who holds a claim and has not come so far stages the volume again, so a claim is no use.
func (h *hold) use(ctx context.Context) (u use, err error) {
	err = h.log.View(ctx, func(v registry.View) error {
		for _, r := range v.Refs(h.key.Volume) {
			own := r.ClaimKey() == h.key
			u.own, u.others = u.own || own, u.others || !own
		}
		p, _ := v.Placement(h.key.Volume)
		u.staged = p.Stage != registry.MarkNone
		return nil
	})
	return u, err
}

// back undoes the request: unpublish, unstage and detach after the last user, then the claim. Each step only after the one before. After
// a round of tries it gives the volume's lane back.
func (h *hold) back(ctx context.Context) error {
	if released, err := h.light(ctx); err != nil || released {
		return err
	}
	leave, err := h.turn(ctx, fmt.Sprintf("the release of alloc %s", h.key.Alloc))
	if err != nil {
		return err
	}
	defer leave()
	h.by.RetryUntil = time.Now().Add(roundLimit)
	u, err := h.use(ctx)
	if err != nil {
		return err
	}
	if u.own || u.staged && !u.others {
		if _, err := h.awaitNode(ctx, h.key.Volume.Plugin); err != nil {
			return err
		}
	}
	if err := h.settleDown(ctx, func(open registry.Intent) bool { return h.undoes(open, u) }); err != nil {
		return err
	}
	h.step = registry.StepUnpublish
	if err := h.node.Unpublish(ctx, h.by, h.key); err != nil {
		return err
	}
	if !u.others {
		if err := h.dismount(ctx); err != nil {
			return err
		}
	}
	h.step = registry.StepClaim
	_, err = h.claims.Release(ctx, h.key)
	return err
}

// light gives the claim up without the volume's turn, where nothing was published for the request and somebody else has claimed the volume:
// he takes down what is staged and attached. A plugin that hangs for the one does not hold up the other.
func (h *hold) light(ctx context.Context) (done bool, err error) {
	own, others := false, false
	err = h.log.View(ctx, func(v registry.View) error {
		for _, r := range v.Refs(h.key.Volume) {
			own = own || r.ClaimKey() == h.key
		}
		for _, c := range v.Claims(h.key.Volume) {
			others = others || c.ClaimKey() != h.key && c.Node == h.host.Node
		}
		return nil
	})
	if err != nil || own || !others {
		return false, err
	}
	h.step = registry.StepClaim
	_, err = h.claims.Release(ctx, h.key)
	if errors.Is(err, registry.ErrConflict) {
		return false, nil // the other one was quicker: this is the last claim now
	}
	return err == nil, err
}

// undoes says whether the way down may follow the open call: it undoes what was made for the request, and as the last user also the stage
// and the attachment, unless something still stands on them.
func (h *hold) undoes(open registry.Intent, u use) bool {
	if open.Alloc != "" {
		return h.own(open)
	}
	return !u.own && !u.others
}

// dismount has the volume unstaged and detached.
func (h *hold) dismount(ctx context.Context) error {
	h.step = registry.StepUnstage
	if err := h.node.Unstage(ctx, h.by, h.key.Volume); err != nil {
		return err
	}
	if err := h.controller.AwaitDetach(ctx, h.by, h.key.Volume, h.awaits(ctx, registry.RoleController)); err != nil {
		return err
	}
	h.waited(ctx)
	h.step = registry.StepDetach
	return h.controller.Detach(ctx, h.by, h.key.Volume)
}
