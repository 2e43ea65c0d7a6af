package alloc

import (
	"context"
	"fmt"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
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
	leave, err := h.turn(ctx, fmt.Sprintf("the release of alloc %s", h.key.Alloc))
	if err != nil {
		return err
	}
	defer leave()
	ctx = intent.Round(ctx, roundLimit)
	u, err := h.use(ctx)
	if err != nil {
		return err
	}
	if u.own || u.staged && !u.others {
		if _, err := h.awaitNode(ctx, h.key.Volume.Plugin); err != nil {
			return err
		}
	}
	if err := h.settle(ctx, func(open registry.Intent) bool { return h.undoes(open, u) }); err != nil {
		return err
	}
	h.step = registry.StepUnpublish
	if err := h.node.Unpublish(ctx, h.call, h.key); err != nil {
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
	if err := h.node.Unstage(ctx, h.call, h.key.Volume); err != nil {
		return err
	}
	if err := h.controller.AwaitDetach(ctx, h.key.Volume, h.awaits(ctx)); err != nil {
		return err
	}
	h.waited(ctx)
	h.step = registry.StepDetach
	return h.controller.Detach(ctx, h.call, h.key.Volume)
}
