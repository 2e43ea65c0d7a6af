package supervise

import (
	"context"
	"sync"
	"time"

	"holdfast/registry"
)

// beat proves over and over that a registered plugin lives, until ctx ends.
func (w *watch) beat(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lost := make(chan error)
	wg.Go(func() { w.listen(ctx, lost) })
	pulse := heart{watch: w, fresh: w.clock.Now()}
	next := time.Duration(0) // a plugin that was registered by an earlier shim is probed at once
	for {
		timer := time.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case why := <-lost:
			timer.Stop()
			if err := pulse.gone(ctx, why); err != nil {
				return err
			}
		case <-timer.C:
			if err := pulse.once(ctx); err != nil {
				return err
			}
		}
		next = pulse.interval()
	}
}

// listen tells of each loss of the connection, once.
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
		w.pause(ctx, dialMost)
	}
}

// heart is the state of the heartbeat.
type heart struct {
	*watch
	misses int
	away   bool          // the plugin is gone: it is looked for with a back-off
	wait   time.Duration // of that back-off
	fresh  time.Time     // when what the plugin says of itself was last asked
}

// interval is the time to the next beat.
func (h *heart) interval() time.Duration {
	if h.away {
		h.wait = min(max(2*h.wait, dialFirst), dialMost)
		return h.wait
	}
	every := h.spec.Heartbeat.Interval
	return every + time.Duration(float64(every)*jitter*(2*h.random()-1))
}

// gone: the connection is lost and nobody answers anew.
func (h *heart) gone(ctx context.Context, why error) error {
	detail := ""
	if why != nil {
		detail = why.Error()
	}
	h.away, h.wait = true, 0
	return h.sick(ctx, problem{registry.CauseGone, detail})
}

// once is one beat.
func (h *heart) once(ctx context.Context) error {
	p, ok := h.probe(ctx)
	if ctx.Err() != nil {
		return nil
	}
	if !ok {
		if h.misses++; h.misses < h.spec.Heartbeat.Failures || h.away {
			return nil
		}
		return h.sick(ctx, p)
	}
	h.misses = 0
	back := h.away
	h.away = false
	if back || h.clock.Now().Sub(h.fresh) >= refreshEvery {
		h.refresh(ctx)
	}
	return h.well(ctx)
}

// refresh asks the plugin again what it is. What cannot be had now is asked for at the next beat.
func (h *heart) refresh(ctx context.Context) {
	limited, cancel := context.WithTimeout(ctx, describeLimit)
	defer cancel()
	found, err := h.plugin.Describe(limited, h.roles)
	if err != nil {
		h.logger.Warn("a plugin does not tell what it is", "task", h.task.TaskKey, "error", err)
		h.fresh = time.Time{}
		return
	}
	_, err = h.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		var instances []registry.Instance
		for _, role := range h.roles {
			if in, ok := v.Instance(h.key(role)); ok {
				in.Fingerprint = found[role]
				instances = append(instances, in)
			}
		}
		return registry.PutChange(v, h.clock.Now(), instances...), nil
	})
	if err == nil {
		h.fresh = h.clock.Now()
	}
}

func (h *heart) well(ctx context.Context) error {
	return h.judge(ctx, registry.Health{State: registry.Healthy, Cause: registry.CauseProbed}, registry.EventTaskHealthy)
}

func (h *heart) sick(ctx context.Context, p problem) error {
	return h.judge(ctx, registry.Health{State: registry.Unhealthy, Cause: p.cause, Detail: p.text}, registry.EventTaskUnhealthy)
}

// judge records the health of all roles, if it is another one than before.
func (h *heart) judge(ctx context.Context, health registry.Health, kind registry.EventKind) error {
	if same, err := h.already(ctx, health.State); err != nil || same {
		return err
	}
	now := h.clock.Now()
	health.Since = now
	_, err := h.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		var keys []registry.InstanceKey
		for _, role := range h.roles {
			keys = append(keys, h.key(role))
		}
		change := registry.HealthChange(v, now, health, keys...)
		if change.Empty() {
			return change, nil
		}
		change.Events = append(change.Events, h.event(kind, health.Cause, health.Detail))
		return change, nil
	})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// already says whether all roles have that health: then there is nothing to commit, and most beats cost no transaction.
func (h *heart) already(ctx context.Context, state registry.HealthState) (same bool, err error) {
	err = h.log.View(ctx, func(v registry.View) error {
		same = true
		for _, role := range h.roles {
			in, ok := v.Instance(h.key(role))
			same = same && ok && in.Health.State == state
		}
		return nil
	})
	if ctx.Err() != nil {
		return true, nil
	}
	return same, err
}
