package task

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// heartbeat probes a registered plugin repeatedly, and records changes of its health.
type heartbeat struct {
	*supervision
	misses       int                         // in a row
	disconnected bool                        // the connection is lost; probes follow with a back-off
	waits        *backoff.ExponentialBackOff // pauses of that back-off

	describedAt    time.Duration // since boot: the last good description, or the start
	describeFailed bool          // the last description failed

	missingSince time.Duration // since boot: when the socket's file was first found missing; 0: it exists
	askedRestart bool          // a restart was asked for, because the file is missing

	sickSince time.Duration // since boot: when the plugin became unhealthy; 0: it is healthy, or that is not known yet
}

// runHeartbeats probes the plugin and records its health until ctx ends or a record cannot be stored. The first
// heartbeat comes after first.
func (u *supervision) runHeartbeats(ctx context.Context, first time.Duration) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lost := make(chan error)
	wg.Go(func() { u.reportLosses(ctx, lost) })
	h := heartbeat{supervision: u, describedAt: u.clock.Boot().At, waits: retries(retryMost)}
	timer := time.NewTimer(first)
	defer timer.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case why := <-lost:
			if h.disconnected {
				continue
			}
			err = h.recordLoss(ctx, why)
		case <-timer.C:
			err = h.beat(ctx)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err == nil {
			err = h.restartSick(ctx)
		}
		if err != nil {
			return fmt.Errorf("record the health of %s: %w", u.task.TaskKey, err)
		}
		timer.Reset(h.next())
	}
}

// reportLosses sends each loss of the connection, but at most one a second. A plugin that connects and dies faster
// causes no more events.
func (u *supervision) reportLosses(ctx context.Context, lost chan<- error) {
	for {
		why := u.plugin.Lost(ctx)
		if ctx.Err() != nil {
			return
		}
		select {
		case lost <- why:
		case <-ctx.Done():
			return
		}
		intent.Sleep(ctx, retryMost)
	}
}

// next returns the time until the next heartbeat. It is short while the socket's file is missing or the connection is
// lost.
func (h *heartbeat) next() time.Duration {
	switch {
	case h.missingSince > 0 && !h.askedRestart:
		return retryMost
	case h.disconnected:
		return h.waits.NextBackOff()
	}
	return h.interval()
}

// recordLoss records that the connection is lost and that no process accepts a new one.
func (h *heartbeat) recordLoss(ctx context.Context, why error) error {
	h.disconnected = true
	h.waits.Reset()
	p := problem{cause: registry.CauseGone}
	if why != nil {
		p.text = why.Error()
	}
	return h.recordUnhealthy(ctx, p)
}

// beat does one heartbeat: it probes the plugin and records a change of its health. If the socket's file is missing, it
// does not probe: see checkSocket.
func (h *heartbeat) beat(ctx context.Context) error {
	if missing, err := h.checkSocket(ctx); missing || err != nil {
		return err
	}
	var found fingerprints
	p := h.probe(ctx)
	if p == nil {
		found, p = h.refresh(ctx)
	}
	switch {
	case ctx.Err() != nil:
		return nil
	case p == nil:
		h.misses, h.disconnected = 0, false
		healthy := registry.Health{State: registry.Healthy, Cause: registry.CauseProbed}
		return h.recordHealth(ctx, healthy, found, registry.EventTaskHealthy)
	case h.disconnected: // recordLoss has recorded the plugin as unhealthy
		return nil
	}
	if h.misses++; h.misses < h.spec.Heartbeat.Failures {
		return nil
	}
	return h.recordUnhealthy(ctx, *p)
}

// checkSocket reports whether the socket's file is missing. The plugin may still answer on the open connection, but
// nothing can connect again. Once the file has been missing for socketGrace, checkSocket records the plugin as
// unhealthy and asks for a restart, which makes directory and socket anew. If only the socket is missing, checkSocket
// asks for the restart after the health timeout, because the plugin may still make the socket anew.
func (h *heartbeat) checkSocket(ctx context.Context) (missing bool, err error) {
	file, dir := h.missing(h.task.Endpoint.Host)
	now := h.clock.Boot().At
	if !file {
		h.missingSince, h.askedRestart = 0, false
		return false, nil
	}
	if h.missingSince == 0 {
		h.missingSince = now
	}
	since := now - h.missingSince
	if since < socketGrace {
		return true, nil
	}
	why := problem{registry.CauseSocketGone,
		fmt.Sprintf("its socket %s was removed, so no new connection is possible", h.task.Endpoint.Host)}
	err = h.recordUnhealthy(ctx, why)
	if err != nil || h.askedRestart || !dir && since < h.spec.HealthTimeout {
		return true, err
	}
	h.askedRestart = true
	return true, h.askRestart(ctx, why, registry.EventRestartAsked)
}

// refresh asks the plugin to describe itself again if that is due. It returns nil without a new description. After a
// failure, the next heartbeat tries again. A failure is a problem only if the plugin was disconnected, because another
// process may answer now.
func (h *heartbeat) refresh(ctx context.Context) (fingerprints, *problem) {
	now := h.clock.Boot().At
	if !h.disconnected && !h.describeFailed && !h.plugin.Outdated() && now-h.describedAt < refreshEvery {
		return nil, nil
	}
	found, p := h.describe(ctx)
	if p == nil {
		h.describedAt, h.describeFailed = now, false
		return found, nil
	}
	if !h.describeFailed && ctx.Err() == nil {
		h.logger.Warn("a plugin does not describe itself", "task", h.task.TaskKey, "error", p.text)
	}
	h.describeFailed = true
	if h.disconnected {
		return nil, p
	}
	return nil, nil
}

func (h *heartbeat) recordUnhealthy(ctx context.Context, p problem) error {
	unhealthy := registry.Health{State: registry.Unhealthy, Cause: p.cause, Detail: p.text}
	return h.recordHealth(ctx, unhealthy, nil, registry.EventTaskUnhealthy)
}

// recordHealth records the health of all roles, and their fingerprints if found is not nil. A role that has the same
// health state already keeps its cause and time. If nothing has changed, recordHealth commits nothing, so most
// heartbeats cost no transaction.
func (h *heartbeat) recordHealth(
	ctx context.Context, health registry.Health, found fingerprints, kind registry.EventKind,
) error {
	health.Since = h.clock.Now()
	return h.ensure(ctx, func(v registry.View) (registry.Change, error) {
		var instances []registry.Instance
		stateChanged := false
		for _, role := range h.roles {
			in, ok := v.Instance(h.key(role))
			if !ok {
				continue
			}
			if in.Health.State != health.State {
				in.Health, stateChanged = health, true
			}
			if found != nil {
				in.Fingerprint = found[role]
			}
			instances = append(instances, in)
		}
		change := registry.PutChange(v, health.Since, instances...)
		if stateChanged {
			change.Events = append(change.Events, h.event(kind, health.Cause, health.Detail))
		}
		return change, nil
	})
}
