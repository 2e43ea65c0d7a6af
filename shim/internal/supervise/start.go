package supervise

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/registry"
)

// start waits for the first good probe, and registers the plugin. If the health timeout comes first, it asks for a restart and waits for
// ctx's end.
func (w *watch) start(ctx context.Context) error {
	limited, cancel := context.WithTimeoutCause(ctx, w.timeLeft(), errStartTimeout)
	found, last, err := w.await(limited)
	cancel()
	if err == nil {
		return w.register(ctx, found)
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err := w.askRestart(ctx, last); err != nil {
		return err
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

var errStartTimeout = errors.New("the health timeout has expired")

// timeLeft is how much of the health timeout is left. A start of another boot has none of it behind it.
func (w *watch) timeLeft() time.Duration {
	now := w.clock.Boot()
	if now.Boot != w.task.Started.Boot {
		return w.spec.HealthTimeout
	}
	return w.spec.HealthTimeout - (now.At - w.task.Started.At)
}

type fingerprints map[registry.Role]registry.Fingerprint

// problem is why the plugin is not good yet.
type problem struct {
	cause registry.Cause
	text  string
}

// await tries until the plugin has answered a probe with ready and told what it is. It tries when the socket's directory changes, and else
// with a back-off. When ctx ends, the last problem says what was missing.
func (w *watch) await(ctx context.Context) (fingerprints, problem, error) {
	wait := dialFirst
	last := problem{registry.CauseStartTimeout, fmt.Sprintf("nothing has listened at %s", w.at.Endpoint.Host)}
	for {
		found, p, ok := w.meet(ctx)
		if ok {
			return found, problem{}, nil
		}
		if ctx.Err() != nil {
			return nil, last, context.Cause(ctx)
		}
		last = p
		w.pause(ctx, wait)
		wait = min(2*wait, dialMost)
	}
}

// pause waits for a change in the socket's directory, at most for limit.
func (w *watch) pause(ctx context.Context, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	w.sockets.Changed(ctx, w.at.Endpoint.Host)
}

// meet is one try.
func (w *watch) meet(ctx context.Context) (fingerprints, problem, bool) {
	if p, ok := w.probe(ctx); !ok {
		return nil, p, false
	}
	ctx, cancel := context.WithTimeout(ctx, describeLimit)
	defer cancel()
	found, err := w.plugin.Describe(ctx, w.roles)
	if err != nil {
		return nil, problem{registry.CauseIdentity, err.Error()}, false
	}
	return found, problem{}, true
}

// probe is one heartbeat, with its deadline.
func (w *watch) probe(ctx context.Context) (problem, bool) {
	ctx, cancel := context.WithTimeout(ctx, w.spec.Heartbeat.Timeout)
	defer cancel()
	ready, err := w.plugin.Probe(ctx)
	switch {
	case err != nil:
		return problem{registry.CauseMissed, err.Error()}, false
	case !ready:
		return problem{registry.CauseNotReady, "the plugin answers that it is not ready"}, false
	}
	return problem{}, true
}

// register puts all instances of the task into the table, in one commit with what the task's events tell.
func (w *watch) register(ctx context.Context, found fingerprints) error {
	now := w.clock.Now()
	healthy := registry.Health{State: registry.Healthy, Cause: registry.CauseProbed, Since: now}
	var instances []registry.Instance
	for _, role := range w.roles {
		instances = append(instances, registry.Instance{
			InstanceKey: w.key(role), Attempt: w.task.Attempt, Endpoint: w.at.Endpoint, Volumes: w.at.Volumes, Fingerprint: found[role],
			Health: healthy, Since: now,
		})
	}
	_, err := w.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		change := registry.PutChange(v, now, instances...)
		change.Events = append(change.Events, w.event(registry.EventTaskHealthy, registry.CauseProbed, ""), w.event(registry.EventTaskRegistered, "", ""))
		return change, nil
	})
	if err != nil {
		return fmt.Errorf("register %s: %w", w.task.TaskKey, err)
	}
	return nil
}

// askRestart makes a restart request part of the task's record. It stands until a newer attempt is reported.
func (w *watch) askRestart(ctx context.Context, why problem) error {
	detail := fmt.Sprintf("no good probe within %v of the task's start; the last try: %s", w.spec.HealthTimeout, why.text)
	cause := registry.CauseStartTimeout
	if why.cause == registry.CauseIdentity {
		cause = why.cause
	}
	_, err := w.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		task, ok := v.Task(w.task.TaskKey)
		if !ok || task.Attempt != w.task.Attempt || task.Restart != nil && task.Restart.Attempt == task.Attempt {
			return registry.Change{}, nil
		}
		task.Restart = &registry.RestartRequest{Attempt: task.Attempt, Cause: cause, Detail: detail, Since: w.clock.Now()}
		return registry.Change{
			Put: []registry.Record{task},
			Events: []registry.Event{
				w.event(registry.EventTaskUnhealthy, cause, detail), w.event(registry.EventRestartAsked, cause, detail),
			},
		}, nil
	})
	if err != nil {
		return fmt.Errorf("ask for a restart of %s: %w", w.task.TaskKey, err)
	}
	return nil
}
