package task

import (
	"context"
	"fmt"
	"sync"
	"time"

	"holdfast/registry"
)

// beat proves over and over that a registered plugin lives, until ctx ends. The first heartbeat comes after first.
func (w *watch) beat(ctx context.Context, first time.Duration) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lost := make(chan error)
	wg.Go(func() { w.listen(ctx, lost) })
	h := heart{watch: w, fresh: w.clock.Boot().At}
	timer := time.NewTimer(first)
	defer timer.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case why := <-lost:
			if h.away {
				continue // it is being looked for
			}
			err = h.gone(ctx, why)
		case <-timer.C:
			err = h.once(ctx)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return fmt.Errorf("record the health of %s: %w", w.task.TaskKey, err)
		}
		timer.Reset(h.next())
	}
}

// listen tells of each loss of the connection, at most once a second: a plugin that comes and goes faster causes no storm of events.
func (w *watch) listen(ctx context.Context, lost chan<- error) {
	for {
		why := w.plugin.Lost(ctx)
		if ctx.Err() != nil {
			return
		}
		select {
		case lost <- why:
		case <-ctx.Done():
			return
		}
		sleep(ctx, dialMost)
	}
}

// heart is the state of the heartbeat.
type heart struct {
	*watch
	misses int           // in a row
	away   bool          // the plugin is gone: it is looked for with a back-off
	wait   time.Duration // of that back-off
	fresh  time.Duration // since boot: when what the plugin says of itself was last asked, or is first to be asked
	failed bool          // that was asked for in vain

	missing time.Duration // since boot: when the socket's file was first found missing; 0: it exists
	asked   bool          // a restart was asked for because it is missing
}

// next is the time to the next heartbeat.
func (h *heart) next() time.Duration {
	if h.missing > 0 && !h.asked {
		return dialMost
	}
	if h.away {
		h.wait = min(max(2*h.wait, dialFirst), dialMost)
		return h.wait
	}
	return h.interval()
}

// gone: the connection is lost and nobody answers anew.
func (h *heart) gone(ctx context.Context, why error) error {
	h.away, h.wait = true, 0
	p := problem{cause: registry.CauseGone}
	if why != nil {
		p.text = why.Error()
	}
	return h.sick(ctx, p)
}

// once is one heartbeat.
func (h *heart) once(ctx context.Context) error {
	if missing, err := h.socketMissing(ctx); missing || err != nil {
		return err
	}
	p, ok := h.probe(ctx)
	var found fingerprints
	if ok {
		found, p, ok = h.refresh(ctx)
	}
	switch {
	case ctx.Err() != nil:
		return nil
	case ok:
		h.misses, h.away = 0, false
		return h.well(ctx, found)
	case h.away:
		return nil
	}
	if h.misses++; h.misses < h.spec.Heartbeat.Failures {
		return nil
	}
	return h.sick(ctx, p)
}

// socketMissing reports whether the socket's file is missing. The plugin may still answer on the open connection, but is
// lost with it. Once the file has been missing for socketGrace, the plugin is recorded as unhealthy. Then a restart of its
// task is asked for, which makes the directory and the socket anew: at once if the directory is missing too, because the
// plugin cannot make a socket there, else after the health timeout.
func (h *heart) socketMissing(ctx context.Context) (missing bool, err error) {
	file, dir := h.sockets.Missing(h.at.Endpoint.Host)
	now := h.clock.Boot().At
	if !file {
		h.missing, h.asked = 0, false
		return false, nil
	}
	if h.missing == 0 {
		h.missing = now
	}
	since := now - h.missing
	if since < socketGrace {
		return true, nil
	}
	why := problem{registry.CauseSocketGone, fmt.Sprintf("its socket %s was removed, so nobody can connect to it any more", h.at.Endpoint.Host)}
	if err := h.sick(ctx, why); err != nil || h.asked || !dir && since < h.spec.HealthTimeout {
		return true, err
	}
	h.asked = true
	return true, h.askRestart(ctx, why, registry.EventRestartAsked)
}

// refresh asks the plugin again what it is, if it is time to; else it finds nothing, and all is well. What cannot be had now is asked for at
// the next heartbeat: only one that was gone has to tell what it is before it is believed.
func (h *heart) refresh(ctx context.Context) (fingerprints, problem, bool) {
	now := h.clock.Boot().At
	if !h.away && !h.failed && !h.plugin.Outdated() && now-h.fresh < refreshEvery {
		return nil, problem{}, true
	}
	found, p, ok := h.describe(ctx)
	if ok {
		h.fresh, h.failed = now, false
		return found, problem{}, true
	}
	if !h.failed && ctx.Err() == nil {
		h.logger.Warn("a plugin does not tell what it is", "task", h.task.TaskKey, "error", p.text)
	}
	h.failed = true
	return nil, p, !h.away
}

// well records that the plugin is healthy, and what it told of itself if it did.
func (h *heart) well(ctx context.Context, found fingerprints) error {
	healthy := registry.Health{State: registry.Healthy, Cause: registry.CauseProbed}
	return h.judge(ctx, healthy, found, registry.EventTaskHealthy)
}

func (h *heart) sick(ctx context.Context, p problem) error {
	return h.judge(ctx, registry.Health{State: registry.Unhealthy, Cause: p.cause, Detail: p.text}, nil, registry.EventTaskUnhealthy)
}

// judge records the health of all roles, and their fingerprints if any were found, where they are others than before.
func (h *heart) judge(ctx context.Context, health registry.Health, found fingerprints, kind registry.EventKind) error {
	if same, err := h.already(ctx, health.State); err != nil || same && found == nil {
		return err
	}
	health.Since = h.clock.Now()
	return h.commit(ctx, func(v registry.View) (registry.Change, error) {
		var instances []registry.Instance
		turned := false
		for _, role := range h.roles {
			in, ok := v.Instance(h.key(role))
			if !ok {
				continue
			}
			if in.Health.State != health.State {
				in.Health, turned = health, true
			}
			if found != nil {
				in.Fingerprint = found[role]
			}
			instances = append(instances, in)
		}
		change := registry.PutChange(v, health.Since, instances...)
		if turned {
			change.Events = append(change.Events, h.event(kind, health.Cause, health.Detail))
		}
		return change, nil
	})
}

// already says whether all roles have that health: then there is nothing to commit, and most heartbeats cost no transaction.
func (h *heart) already(ctx context.Context, state registry.HealthState) (same bool, err error) {
	err = h.state.View(ctx, func(v registry.View) error {
		same = true
		for _, role := range h.roles {
			in, ok := v.Instance(h.key(role))
			same = same && ok && in.Health.State == state
		}
		return nil
	})
	return same, err
}
