package task

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/hooks"
	"holdfast/registry"
)

// start waits for the first good probe, and registers the plugin. If the health timeout comes first, it asks for a restart and waits for
// ctx's end.
func (w *watch) start(ctx context.Context) error {
	asked, err := w.asked(ctx)
	if err != nil {
		return err
	}
	if !asked {
		found, last, err := w.await(ctx)
		switch {
		case err == nil:
			return w.register(ctx, found)
		case ctx.Err() != nil:
			return context.Cause(ctx)
		}
		if err := w.failedStart(ctx, last); err != nil {
			return err
		}
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

var errStartTimeout = errors.New("the health timeout has expired")

// asked says whether a restart of this attempt was asked for already, by an earlier shim.
func (w *watch) asked(ctx context.Context) (asked bool, err error) {
	err = w.state.View(ctx, func(v registry.View) error {
		task, ok := v.Task(w.task.TaskKey)
		asked = ok && restartAsked(task, w.task.Attempt)
		return nil
	})
	return asked, err
}

func restartAsked(t registry.Task, attempt uint64) bool {
	return t.Restart != nil && t.Restart.Attempt == attempt
}

// timeLeft is how much of the health timeout is left. A start of another boot has none of it behind it. A shim that comes after its end
// gives the plugin the time of one probe: nobody was there to see it healthy.
func (w *watch) timeLeft() time.Duration {
	now := w.clock.Boot()
	if now.Boot != w.task.Started.Boot {
		return w.spec.HealthTimeout
	}
	if left := w.spec.HealthTimeout - (now.At - w.task.Started.At); left > 0 {
		return min(left, w.spec.HealthTimeout)
	}
	return w.spec.Heartbeat.Timeout
}

type fingerprints map[registry.Role]registry.Fingerprint

// problem is why the plugin is not good yet.
type problem struct {
	cause registry.Cause
	text  string
}

// await tries until the plugin has answered a probe with ready and told what it is, or until the health timeout. It tries when the socket's
// directory changes, and else with a back-off. The last problem says what was missing.
func (w *watch) await(ctx context.Context) (fingerprints, problem, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, w.timeLeft(), errStartTimeout)
	defer cancel()
	var last problem
	wait := dialFirst
	for {
		found, p, ok := w.meet(ctx)
		if ok {
			return found, problem{}, nil
		}
		if ctx.Err() == nil || last.text == "" { // a try that the timeout cut off says less than the one before it
			last = p
		}
		changed := w.pause(ctx, wait)
		if ctx.Err() != nil {
			return nil, last, context.Cause(ctx)
		}
		if wait = min(2*wait, dialMost); changed { // the file of a socket appears before anybody listens at it
			wait = dialFirst
			sleep(ctx, dialGap)
		}
	}
}

// pause waits for a change in the socket's directory, at most for limit, and says whether there was one.
func (w *watch) pause(ctx context.Context, limit time.Duration) (changed bool) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	w.sockets.Changed(ctx, w.at.Endpoint.Host)
	return ctx.Err() == nil
}

// meet is one try.
func (w *watch) meet(ctx context.Context) (fingerprints, problem, bool) {
	if p, ok := w.probe(ctx); !ok {
		return nil, p, false
	}
	return w.describe(ctx)
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

// describe asks the plugin what it is, in all its roles, with a deadline.
func (w *watch) describe(ctx context.Context) (fingerprints, problem, bool) {
	ctx, cancel := context.WithTimeout(ctx, describeLimit)
	defer cancel()
	found, err := w.plugin.Describe(ctx, w.roles)
	if err != nil {
		return nil, problem{registry.CauseIdentity, err.Error()}, false
	}
	return found, problem{}, true
}

// register puts all instances of the task into the table, in one commit with what the task's events tell.
func (w *watch) register(ctx context.Context, found fingerprints) error {
	now := w.clock.Now()
	healthy := registry.Health{State: registry.Healthy, Cause: registry.CauseProbed, Since: now}
	var instances []registry.Instance
	for _, role := range w.roles {
		instances = append(instances, registry.Instance{
			InstanceKey: w.key(role), Attempt: w.task.Attempt, Endpoint: w.at.Endpoint, Volumes: w.at.Volumes, Fingerprint: found[role],
			Health: healthy, Options: optionsOf(w.spec), Since: now,
		})
	}
	err := w.commit(ctx, func(v registry.View) (registry.Change, error) {
		if task, ok := v.Task(w.task.TaskKey); !ok || task.Attempt != w.task.Attempt || task.Phase == registry.TaskExited {
			return registry.Change{}, registry.Errorf(registry.ErrConflict, "attempt %d has ended", w.task.Attempt)
		}
		change := registry.PutChange(v, now, instances...)
		change.Events = append(change.Events, w.event(registry.EventTaskHealthy, registry.CauseProbed, ""), w.event(registry.EventTaskRegistered, "", ""))
		return change, nil
	})
	if err != nil {
		return fmt.Errorf("register %s: %w", w.task.TaskKey, err)
	}
	return nil
}

// optionsOf returns the options of the stanza that concern callers of the plugin.
func optionsOf(p hooks.PluginSpec) map[string]string {
	if p.NoListVolumes {
		return map[string]string{registry.OptionListVolumes: registry.OptionOff}
	}
	return nil
}

// failedStart asks for a restart because no probe succeeded in time.
func (w *watch) failedStart(ctx context.Context, why problem) error {
	cause := registry.CauseStartTimeout
	if why.cause == registry.CauseIdentity {
		cause = why.cause
	}
	detail := fmt.Sprintf("no good probe within %v of the task's start; the last try: %s", w.spec.HealthTimeout, why.text)
	return w.askRestart(ctx, problem{cause, detail}, registry.EventTaskUnhealthy, registry.EventRestartAsked)
}

// askRestart makes a restart request part of the task's record, with events of those kinds. It stands until a newer attempt is reported.
func (w *watch) askRestart(ctx context.Context, why problem, kinds ...registry.EventKind) error {
	err := w.commit(ctx, func(v registry.View) (registry.Change, error) {
		task, ok := v.Task(w.task.TaskKey)
		if !ok || task.Attempt != w.task.Attempt || restartAsked(task, task.Attempt) {
			return registry.Change{}, nil
		}
		task.Restart = &registry.RestartRequest{Attempt: task.Attempt, Cause: why.cause, Detail: why.text, Since: w.clock.Now()}
		change := registry.Change{Put: []registry.Record{task}}
		for _, kind := range kinds {
			change.Events = append(change.Events, w.event(kind, why.cause, why.text))
		}
		return change, nil
	})
	if err != nil {
		return fmt.Errorf("ask for a restart of %s: %w", w.task.TaskKey, err)
	}
	return nil
}
