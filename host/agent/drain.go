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

// followDrain stops all allocs while the node is drained, and runs the jobs again afterwards. It calls asked each time
// when it has asked the shim whether the node is drained, also if the shim could not answer.
func (a *Agent) followDrain(ctx context.Context, s Volumes, asked func()) {
	q := host.NodeQuery{Node: host.NodeName(a.node.Name)}
	d := drain{Agent: a, cancel: func() {}}
	defer d.running.Wait()
	defer func() { d.cancel() }()
	for ctx.Err() == nil {
		list, at, err := s.Nodes(ctx, q)
		switch {
		case err == nil:
			q.MinIndex = at
			d.follow(ctx, list)
		case ctx.Err() == nil:
			a.log.Warn("cannot ask whether this node is drained", "error", err)
		}
		asked()
		if at == 0 { // after an error, and if the shim has written nothing yet: Nodes would return at once
			sleep(ctx, maxPause, nil)
		}
	}
}

// drain is the present drain of the node.
type drain struct {
	*Agent
	deadline time.Time
	cancel   func()         // ends its goroutines
	running  sync.WaitGroup // these goroutines
}

// follow begins, changes or ends the drain, as the shim describes the node.
func (d *drain) follow(ctx context.Context, list []host.NodeStatus) {
	var now registry.Drain
	drained, before := false, d.drained.Load()
	if len(list) == 1 {
		now, drained = list[0].Drains()
	}
	if drained == before && now.Deadline.Equal(d.deadline) {
		return
	}
	d.cancel()
	d.running.Wait()
	d.deadline = now.Deadline
	if !drained {
		d.log.Info("the drain of this node has ended")
		d.endDrain()
		return
	}
	if !before {
		d.log.Info("this node is drained", "by", now.By, "reason", now.Reason)
	}
	d.drained.Store(true)
	draining, end := context.WithCancel(ctx)
	d.cancel = end
	d.running.Go(func() { d.endGraceAt(draining, now.Deadline) })
	d.running.Go(func() {
		if err := d.stopForDrain(draining); err == nil {
			d.log.Info("the node is drained: all allocs have ended")
		}
	})
}

// stopForDrain stops users of volumes first, and plugins once the volumes are released, also those of containers. It
// cannot stop the containers.
func (a *Agent) stopForDrain(ctx context.Context) error {
	if err := a.stopRanks(ctx, 0); err != nil {
		return err
	}
	for _, m := range a.EngineMounts() {
		a.log.Warn("the drain of this node waits for containers: stop them", "volume", m.Volume,
			"held_by", m.Describe())
	}
	for len(a.EngineMounts()) > 0 && !isClosed(a.graceEnded()) {
		if sleep(ctx, time.Second, a.graceEnded()); ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return a.stopRanks(ctx, lastRank)
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
