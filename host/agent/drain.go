package agent

import (
	"context"
	"fmt"
	"sync"
	"time"

	"holdfast/host"
	"holdfast/internal/display"
	"holdfast/registry"
)

// followDrain stops all allocs while the node is drained, and runs the jobs again afterwards.
func (a *Agent) followDrain(ctx context.Context, s Volumes) {
	q := host.NodeQuery{Node: host.NodeName(a.node.Name)}
	var deadline time.Time     // of the present drain
	cancel := func() {}        // ends the goroutines of the present drain
	var running sync.WaitGroup // these goroutines
	defer running.Wait()
	defer func() { cancel() }()
	for ctx.Err() == nil {
		list, at, err := s.Nodes(ctx, q)
		if err != nil && ctx.Err() == nil {
			a.log.Warn("cannot ask whether this node is drained", "error", err)
			sleep(ctx, maxPause, nil)
		}
		if err != nil {
			continue
		}
		if q.MinIndex = at; at == 0 { // the shim has written nothing yet: Nodes would return at once
			sleep(ctx, maxPause, nil)
		}
		var drain registry.Drain
		drained := false
		before := a.drained.Load()
		if len(list) == 1 {
			drain, drained = list[0].Drains()
		}
		if drained == before && drain.Deadline.Equal(deadline) {
			continue
		}
		cancel()
		running.Wait()
		deadline = drain.Deadline
		if !drained {
			a.log.Info("the drain of this node has ended")
			a.endDrain()
			continue
		}
		if !before {
			a.log.Info("this node is drained", "by", drain.By, "reason", drain.Reason)
		}
		a.drained.Store(true)
		draining, end := context.WithCancel(ctx)
		cancel = end
		running.Go(func() { a.endGraceAt(draining, drain.Deadline) })
		running.Go(func() {
			if err := a.stopRanks(draining, lastRank); err == nil {
				a.log.Info("the node is drained: all allocs have ended")
			}
		})
	}
}

// endGraceAt ends the grace of all tasks at a deadline; zero: never.
func (a *Agent) endGraceAt(ctx context.Context, deadline time.Time) {
	if deadline.IsZero() {
		return
	}
	select {
	case <-time.After(time.Until(deadline)):
		a.endGrace()
	case <-ctx.Done():
	}
}

// endDrain runs the jobs again after a drain.
func (a *Agent) endDrain() {
	a.mu.Lock()
	if !a.shuttingDown.Load() && isClosed(a.graceOver) {
		a.graceOver = make(chan struct{})
	}
	a.mu.Unlock()
	a.drained.Store(false)
	a.wakeRun()
}

// endGrace ends the grace of all tasks that are being stopped, or are stopped later, so that they are killed at once.
func (a *Agent) endGrace() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !isClosed(a.graceOver) {
		close(a.graceOver)
	}
}

func (a *Agent) graceEnded() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.graceOver
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// DescribeDrain returns that the node is drained, and the command that ends the drain. It is empty without a drain.
func (a *Agent) DescribeDrain() string {
	if !a.drained.Load() {
		return ""
	}
	return fmt.Sprintf("node %s is drained; to end that: %s", a.node.Name,
		display.Command("holdfast node drain --off", a.node.Name))
}

// stopsAll reports whether all allocs are being stopped, rank by rank. Until that is over, no alloc may be placed.
func (a *Agent) stopsAll() bool { return a.shuttingDown.Load() || a.drained.Load() }
