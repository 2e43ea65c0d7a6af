package task

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// registerWhenReady waits until the plugin is ready, and registers it. If the health timeout comes first, it asks for a
// restart and waits for the end of ctx. If an earlier shim has asked for one already, it only waits.
func (u *supervision) registerWhenReady(ctx context.Context) error {
	if !restartAsked(u.task) {
		found, last, err := u.awaitReady(ctx)
		switch {
		case err == nil:
			return u.register(ctx, found)
		case ctx.Err() != nil:
			return context.Cause(ctx)
		}
		if err := u.startFailed(ctx, last); err != nil {
			return err
		}
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

var errStartTimeout = errors.New("the health timeout has expired")

// restartAsked reports whether the record of a task has a restart request for its newest attempt.
func restartAsked(t registry.Task) bool { return t.Restart != nil && t.Restart.Attempt == t.Attempt }

// timeLeft returns the rest of the health timeout. An attempt of another boot still has the whole timeout. After the
// timeout, timeLeft returns the time for one probe, because the plugin may have become healthy while no shim ran.
func (u *supervision) timeLeft() time.Duration {
	now := u.clock.Boot()
	if now.Boot != u.task.Started.Boot {
		return u.spec.HealthTimeout
	}
	if left := u.spec.HealthTimeout - (now.At - u.task.Started.At); left > 0 {
		return min(left, u.spec.HealthTimeout)
	}
	return u.spec.Heartbeat.Timeout
}

type fingerprints map[registry.Role]registry.Fingerprint

// problem is the reason why the plugin is not healthy. A nil *problem means that the plugin is healthy.
type problem struct {
	cause registry.Cause
	text  string
}

// awaitReady repeats probe and description until both succeed, and reports a lasting problem (showProblem). If the
// health timeout or the end of ctx comes first, it returns the last problem and the cause.
func (u *supervision) awaitReady(ctx context.Context) (fingerprints, *problem, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, u.timeLeft(), errStartTimeout)
	defer cancel()
	var last *problem
	shown := "" // the text of the problem that was reported last
	nextReport := time.Now().Add(problemEvery)
	for waits := retries(startRetry); ; intent.Sleep(ctx, waits.NextBackOff()) {
		if last != nil && ctx.Err() != nil {
			return nil, last, context.Cause(ctx)
		}
		p := u.probe(ctx)
		if p == nil {
			var found fingerprints
			if found, p = u.describe(ctx); p == nil {
				return found, nil, nil
			}
		}
		if ctx.Err() == nil || last == nil { // a try that the timeout cut off has less to say than the one before
			last = p
		}
		if ctx.Err() == nil && p.text != shown && !time.Now().Before(nextReport) {
			if u.showProblem(ctx, p.text) {
				shown = p.text
			}
			nextReport = time.Now().Add(problemEvery)
		}
	}
}

// showProblem records and logs why the plugin is not registered yet. It reports whether it has recorded the reason.
func (u *supervision) showProblem(ctx context.Context, text string) bool {
	_, err := u.state.Commit(ctx, func(v registry.View) (registry.Change, error) {
		task, ok := v.Task(u.task.TaskKey)
		if !ok || task.Attempt != u.task.Attempt || task.Problem == text {
			return registry.Change{}, nil
		}
		task.Problem = text
		return registry.Change{Put: []registry.Record{task}}, nil
	})
	if err == nil {
		u.logger.Info("plugin task is not healthy yet", "task", u.task.TaskKey, "plugin", u.spec.ID, "problem", text)
	}
	return err == nil
}

// probe sends one Probe, with the heartbeat's deadline. It returns nil if the plugin is ready.
func (u *supervision) probe(ctx context.Context) *problem {
	ctx, cancel := context.WithTimeout(ctx, u.spec.Heartbeat.Timeout)
	defer cancel()
	ready, err := u.plugin.Probe(ctx)
	switch {
	case err != nil:
		return &problem{registry.CauseMissed, err.Error()}
	case !ready:
		return &problem{registry.CauseNotReady, "the plugin answers that it is not ready"}
	}
	return nil
}

// describe asks the plugin to describe itself in all its roles, with a deadline.
func (u *supervision) describe(ctx context.Context) (fingerprints, *problem) {
	ctx, cancel := context.WithTimeout(ctx, describeLimit)
	defer cancel()
	found, err := u.plugin.Describe(ctx, u.roles)
	if err != nil {
		return nil, &problem{registry.CauseIdentity, err.Error()}
	}
	return found, nil
}

// register puts all instances of the task into the table. The same commit has the task's events. It fails with
// ErrConflict if the attempt has ended meanwhile.
func (u *supervision) register(ctx context.Context, found fingerprints) error {
	now := u.clock.Now()
	healthy := registry.Health{State: registry.Healthy, Cause: registry.CauseProbed, Since: now}
	var instances []registry.Instance
	for _, role := range u.roles {
		instances = append(instances, registry.Instance{
			InstanceKey: u.key(role), Attempt: u.task.Attempt, Endpoint: u.task.Endpoint, Volumes: u.task.Volumes,
			Fingerprint: found[role], Health: healthy, Options: optionsOf(u.spec), Since: now,
		})
	}
	err := u.ensure(ctx, func(v registry.View) (registry.Change, error) {
		task, ok := v.Task(u.task.TaskKey)
		if !ok || task.Attempt != u.task.Attempt || task.Phase == registry.TaskExited {
			return registry.Change{}, registry.Errorf(registry.ErrConflict, "attempt %d has ended", u.task.Attempt)
		}
		change := registry.PutChange(v, now, instances...)
		if task.Problem != "" {
			task.Problem = ""
			change.Put = append(change.Put, task)
		}
		change.Events = append(change.Events, u.event(registry.EventTaskHealthy, registry.CauseProbed, ""),
			u.event(registry.EventTaskRegistered, "", ""))
		return change, nil
	})
	if err != nil {
		return fmt.Errorf("register %s: %w", u.task.TaskKey, err)
	}
	return nil
}

// optionsOf returns the options of the stanza that concern callers of the plugin.
func optionsOf(p hooks.PluginSpec) map[string]string {
	options := map[string]string{}
	if p.NoListVolumes {
		options[registry.OptionListVolumes] = registry.OptionOff
	}
	if p.LocalController {
		options[registry.OptionScope] = registry.ScopeNode
	}
	if len(options) == 0 {
		return nil
	}
	return options
}

// startFailed asks for a restart because no probe succeeded in time.
func (u *supervision) startFailed(ctx context.Context, last *problem) error {
	cause := registry.CauseStartTimeout
	if last.cause == registry.CauseIdentity {
		cause = last.cause
	}
	detail := fmt.Sprintf("no good probe within %v of the task's start; the last try: %s", u.spec.HealthTimeout,
		last.text)
	return u.askRestart(ctx, problem{cause, detail}, registry.EventTaskUnhealthy, registry.EventRestartAsked)
}

// askRestart adds a restart request to the task's record, and commits an event of each kind. The request stands until
// the host reports a newer attempt.
func (u *supervision) askRestart(ctx context.Context, why problem, kinds ...registry.EventKind) error {
	err := u.ensure(ctx, func(v registry.View) (registry.Change, error) {
		task, ok := v.Task(u.task.TaskKey)
		if !ok || task.Attempt != u.task.Attempt || restartAsked(task) {
			return registry.Change{}, nil
		}
		task.Problem = "" // the request now has the reason
		task.Restart = &registry.RestartRequest{
			Attempt: task.Attempt, Cause: why.cause, Detail: why.text, Since: u.clock.Now(),
		}
		change := registry.Change{Put: []registry.Record{task}}
		for _, kind := range kinds {
			change.Events = append(change.Events, u.event(kind, why.cause, why.text))
		}
		return change, nil
	})
	if err != nil {
		return fmt.Errorf("ask for a restart of %s: %w", u.task.TaskKey, err)
	}
	return nil
}
