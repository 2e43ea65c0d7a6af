package node

import (
	"context"
	"errors"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Settle has an open call of a node come to a certain end: by the same call again, which has the same arguments as it is made of what was
// recorded; a publish whose secrets cannot be had any more, or whose stage is gone, is undone instead, which needs neither. nil says that it
// has an end, whichever. Whoever calls it holds the volume's lane.
func (s *Stager) Settle(ctx context.Context, by intent.Caller, open registry.Intent) error {
	return intent.Settled(s.again(ctx, by, open))
}

// again makes the open call once more.
func (s *Stager) again(ctx context.Context, by intent.Caller, open registry.Intent) error {
	st, err := s.state(ctx, open.Volume)
	if err != nil {
		return err
	}
	if open.RPC == registry.NodeExpandRPC {
		return s.Grow(ctx, by, open.Volume)
	}
	inst, err := s.await(ctx, by, open.Volume.Plugin)
	if err != nil {
		return err
	}
	switch open.RPC {
	case registry.NodeStageRPC:
		return s.stage(ctx, by, st.volume, st.place.Staged, st.place, inst)
	case registry.NodeUnstageRPC:
		return s.unstage(ctx, by, st.place)
	case registry.NodePublishRPC, registry.NodeUnpublishRPC:
		r, found := st.ref(registry.ClaimKey{Volume: open.Volume, Alloc: open.Alloc, Request: open.Request})
		if !found {
			return registry.Errorf(registry.ErrDamaged, "%s, and no record says what was published", intent.Describe(open))
		}
		return s.publishAgain(ctx, by, open, st, r, inst)
	}
	return registry.Errorf(registry.ErrInternal, "%s is no call of a node", open.RPC)
}

func (s *Stager) publishAgain(
	ctx context.Context, by intent.Caller, open registry.Intent, st state, r registry.Ref, inst registry.Instance,
) error {
	stands, err := s.stands(st)
	if err != nil {
		return err
	}
	if open.RPC == registry.NodePublishRPC && (stands || st.place.Stage == registry.MarkNone) {
		_, err := s.publish(ctx, by, st.volume, r, st, inst)
		if _, sent := errors.AsType[*registry.CallError](err); err == nil || sent || ctx.Err() != nil {
			return err
		}
	}
	return s.unpublish(ctx, by, r, open.Name)
}
