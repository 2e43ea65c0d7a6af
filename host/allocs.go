package host

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// PrepareAlloc claims, attaches, stages and publishes the alloc's volumes, and returns what to apply to its tasks, by
// name. No task of the alloc may start before PrepareAlloc has returned. PrepareAlloc may be called again after an
// error. ReleaseAlloc undoes it after success and after an error, and ends a PrepareAlloc under way with ErrConflict.
func (h *Host) PrepareAlloc(ctx context.Context, g AllocGroup) (map[string]Plan, error) {
	req := &pb.PrepareRequest{Call: mutating(), Alloc: wire.AllocGroupProto(g)}
	if _, err := wire.AllocGroup(req.GetAlloc()); err != nil {
		return nil, err // not added to the workload: no shim could start with it
	}
	limited, done := h.prepares.begin(ctx, g.Alloc)
	undo := h.workload.putAlloc(g)
	reply, err := call(limited, h, writes, pb.NewAllocsClient, pb.AllocsClient.Prepare, req)
	if releasing := limited.Err() != nil && ctx.Err() == nil; releasing && err != nil {
		h.workload.removeAlloc(g.Alloc)
		err = context.Cause(limited)
	}
	if errors.Is(err, ErrInvalid) { // after any other error, the shim may have done a part
		undo()
	}
	done()
	if err != nil {
		return nil, h.withWaits(ctx, g.Alloc, err)
	}
	return wire.Plans(reply.GetPlans())
}

// Feasible returns every reason why PrepareAlloc could not claim and mount the alloc's volumes on this node now. If
// there is no reason, it could. The index is that of the state for which the answer is true. A scheduler asks this
// before it places the alloc. It changes nothing and calls no plugin. ErrConflict: the alloc is being released here.
func (h *Host) Feasible(ctx context.Context, g AllocGroup) ([]Infeasible, Seq, error) {
	reply, err := call(ctx, h, reads, pb.NewAllocsClient, pb.AllocsClient.Feasible,
		&pb.FeasibleRequest{Call: &pb.Call{}, Alloc: wire.AllocGroupProto(g)})
	return convert(reply.GetReasons(), wire.Infeasible), Seq(reply.GetIndex()), err
}

// ReleaseAlloc unpublishes, unstages and detaches the alloc's volumes and releases its claims. All tasks of the alloc
// must have ended. It is legal in any state and any number of times. After an error, call it again: the shim continues
// only a release that has reached it. A volume whose create block has on_stop = "delete" is deleted once ReleaseAlloc
// was called for its last alloc. A release by Sync deletes no volume, as the host may have lost records of allocs.
func (h *Host) ReleaseAlloc(ctx context.Context, id AllocID) error {
	return h.releaseAlloc(ctx, id, false)
}

// ReplaceAlloc is ReleaseAlloc for an alloc that is followed by another one with the same volumes, as at a restart. It
// keeps volumes with on_stop = "delete" for the new alloc, unless ReleaseAlloc is called for the old one too before the
// release of the old one ends.
func (h *Host) ReplaceAlloc(ctx context.Context, id AllocID) error {
	return h.releaseAlloc(ctx, id, true)
}

func (h *Host) releaseAlloc(ctx context.Context, id AllocID, keep bool) error {
	req := &pb.ReleaseAllocRequest{Call: mutating(), Alloc: string(id), KeepVolumes: keep}
	h.prepares.stop(ctx, id)
	_, err := call(ctx, h, writes, pb.NewAllocsClient, pb.AllocsClient.Release, req)
	h.workload.removeAlloc(id) // not before: Sync to a shim that takes over during the call would not list the alloc
	return h.withWaits(ctx, id, err)
}

// explainLimit bounds the call that explains an error after the caller's time is up.
const explainLimit = 250 * time.Millisecond

// withWaits adds to a deadline error what the alloc waits for.
func (h *Host) withWaits(ctx context.Context, id AllocID, err error) error {
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), explainLimit)
	defer cancel()
	list, _, listErr := h.Allocs(ctx, AllocQuery{ID: id})
	if listErr != nil || len(list) == 0 || len(list[0].Waiting) == 0 {
		return err
	}
	return fmt.Errorf("alloc %s: %s: %w", id, registry.Waits(list[0].Waiting), err)
}

// prepareCalls are the PrepareAlloc calls under way. A release first ends those of its alloc and waits for their end.
// Otherwise a held or repeated PrepareAlloc could reach a shim after the release, and nothing would undo it. The zero
// value is ready.
type prepareCalls struct {
	mu    sync.Mutex // guards calls; held only to read or change it
	calls map[*prepareCall]bool
}

type prepareCall struct {
	alloc  registry.AllocID
	cancel context.CancelCauseFunc
	ended  chan struct{}
}

// begin returns a context that a release of the alloc ends. The caller calls done when the call has ended.
func (p *prepareCalls) begin(ctx context.Context, id registry.AllocID) (limited context.Context, done func()) {
	limited, cancel := context.WithCancelCause(ctx)
	call := &prepareCall{id, cancel, make(chan struct{})}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.calls == nil {
		p.calls = map[*prepareCall]bool{}
	}
	p.calls[call] = true
	return limited, func() {
		cancel(nil)
		close(call.ended)
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.calls, call)
	}
}

// stop ends the calls of the alloc, and returns when they have ended, or ctx has.
func (p *prepareCalls) stop(ctx context.Context, id registry.AllocID) {
	var stopped []*prepareCall
	p.mu.Lock()
	for call := range p.calls {
		if call.alloc == id {
			call.cancel(registry.Errorf(registry.ErrConflict, "alloc %s is being released", id))
			stopped = append(stopped, call)
		}
	}
	p.mu.Unlock()
	for _, call := range stopped {
		select {
		case <-call.ended:
		case <-ctx.Done():
		}
	}
}
