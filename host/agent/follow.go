package agent

import (
	"context"

	"holdfast/host"
)

// followRestarts hands each restart that the shim asks for to the task that it is for.
func (a *Agent) followRestarts(ctx context.Context, s Tasks) {
	err := s.Restarts(ctx, func(list []host.PendingRestart) error {
		for _, p := range list {
			a.askRestart(p)
		}
		return nil
	})
	if ctx.Err() == nil {
		a.log.Error("restarts that the shim asks for are not heard any more", "error", err)
	}
}

// askRestart puts the request where the task's runner sees it. One that stands already is for the same or an older attempt: the runner
// compares.
func (a *Agent) askRestart(p host.PendingRestart) {
	a.mu.Lock()
	defer a.mu.Unlock()
	al, known := a.allocs[p.Alloc]
	if !known || al.restarts[p.Task] == nil {
		return
	}
	asked := al.restarts[p.Task]
	select {
	case <-asked:
	default:
	}
	asked <- p
}

// followPlugins tries again what waits, whenever a plugin has changed.
func (a *Agent) followPlugins(ctx context.Context, s Volumes) {
	err := s.Fingerprints(ctx, host.PluginQuery{}, func([]host.PluginFingerprint, bool) error {
		a.Retry()
		return nil
	})
	if ctx.Err() == nil {
		a.log.Error("changes of plugins are not heard any more", "error", err)
	}
}
