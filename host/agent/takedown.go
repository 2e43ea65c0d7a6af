package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"holdfast/registry"
)

// TakeDown ends everything that runs: users of volumes first, and when they have given them back, plugins. Jobs are kept; the next agent
// runs them again. Run has to be under way. When ctx ends first, the error says what is left.
func (a *Agent) TakeDown(ctx context.Context) error { return a.takeDown(ctx, lastRank) }

// TakeDownUsers ends what runs no plugin, and leaves the plugins running.
func (a *Agent) TakeDownUsers(ctx context.Context) error { return a.takeDown(ctx, 0) }

func (a *Agent) takeDown(ctx context.Context, last int) error {
	a.draining.Store(true)
	for rank := range last + 1 {
		if err := a.stopRank(ctx, rank); err != nil {
			return a.leftOver(err)
		}
		err := a.Await(ctx, func(all []*AllocRecord) bool { return len(left(all, rank)) == 0 })
		if err != nil {
			return a.leftOver(err)
		}
	}
	return nil
}

// TakeDownByForce ends everything at once: no task is given time to end by itself, and no volume is waited for. The error
// says which allocs still hold theirs.
func (a *Agent) TakeDownByForce(ctx context.Context) error {
	a.draining.Store(true)
	a.mu.Lock()
	if !a.isForced() {
		close(a.forced)
	}
	a.mu.Unlock()
	for rank := range lastRank + 1 {
		if err := a.stopRank(ctx, rank); err != nil {
			return a.leftOver(err)
		}
	}
	over := func(all []*AllocRecord) bool {
		return !slices.ContainsFunc(all, func(r *AllocRecord) bool { return !r.State.Ended() && r.State != AllocReleasing })
	}
	if err := a.Await(ctx, over); err != nil {
		return a.leftOver(err)
	}
	return a.leftOver(nil)
}

func (a *Agent) isForced() bool {
	select {
	case <-a.forced:
		return true
	default:
		return false
	}
}

func (a *Agent) stopRank(ctx context.Context, rank int) error {
	return a.untilWritten(ctx, func() error {
		a.writing.Lock()
		defer a.writing.Unlock()
		for _, r := range a.Allocs() {
			if r.rank() == rank {
				if err := a.stopLocked(r.ID); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// left lists what of the ranks up to this one has not ended.
func left(all []*AllocRecord, rank int) (out []*AllocRecord) {
	for _, r := range all {
		if !r.State.Ended() && r.rank() <= rank {
			out = append(out, r)
		}
	}
	return out
}

func (a *Agent) leftOver(err error) error {
	var names []string
	for _, r := range left(a.Allocs(), lastRank) {
		text := fmt.Sprintf("alloc %s of job %q is %s", short(r.ID), r.Job, r.State)
		if r.Reason != "" {
			text += ": " + r.Reason
		}
		names = append(names, text)
	}
	switch {
	case len(names) == 0:
		return err
	case err == nil:
		return registry.Errorf(registry.ErrUncertain, "not everything was taken down: %s", strings.Join(names, "; "))
	}
	return fmt.Errorf("not everything was taken down: %s: %w", strings.Join(names, "; "), err)
}
