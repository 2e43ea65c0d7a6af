package task

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Fleet connects to plugins. One connection serves all roles of a task, and all its callers.
type Fleet interface {
	// Connect returns the task's connection; nothing is sent yet.
	Connect(registry.PluginID, registry.TaskKey, registry.Endpoint) (Plugin, error)
	// Close ends the task's connection.
	Close(registry.TaskKey)
}

// Plugin is a connection to a plugin. Its methods may be called at the same time. All but Lost fail at once if no
// process listens.
type Plugin interface {
	Probe(context.Context) (ready bool, err error)
	Describe(context.Context, []registry.Role) (map[registry.Role]registry.Fingerprint, error)
	// Outdated reports whether the answer of the last good Describe may be stale. Before the first one it reports true.
	Outdated() bool
	// Lost waits until the connection is lost and no process accepts a new one, and returns why; nil when ctx ends.
	Lost(context.Context) error
}

// Clock returns the time. Tests use the clock of a synctest bubble.
type Clock struct {
	Now  func() time.Time         // wall time, for people
	Boot func() registry.BootTime // for deadlines
}

// Waits of this package that no stanza sets.
const (
	retryFirst    = 10 * time.Millisecond  // between two tries to reach a plugin
	startRetry    = 200 * time.Millisecond // longest wait between two tries while the plugin starts
	problemEvery  = time.Second            // between two reports of why the plugin does not start
	retryMost     = time.Second            // longest wait between two tries after the registration, or on a full disk
	socketGrace   = 2 * time.Second        // for a plugin that makes its socket anew
	describeLimit = 10 * time.Second
	refreshEvery  = 10 * time.Minute
	jitter        = 0.1         // of the heartbeat's interval, either way
	spread        = time.Second // a new shim spreads the first probes of registered plugins over this time
)

// Supervisor watches over plugin tasks.
type Supervisor struct {
	state  registry.State
	fleet  Fleet
	clock  Clock
	random func() float64 // in [0,1)
	logger hclog.Logger

	// Served returns tasks with the volumes whose mounts they serve (Uses.Of). It may be nil until Run.
	Served func(context.Context, []registry.PluginTask) ([]registry.PluginTask, error)

	// missing reports whether a socket's file does not exist, and whether its directory does not.
	missing func(socket string) (file, dir bool)
}

// New returns a Supervisor. It starts nothing; Run does.
func New(state registry.State, f Fleet, c Clock, random func() float64, logger hclog.Logger) *Supervisor {
	return &Supervisor{state: state, fleet: f, clock: c, random: random, logger: logger, missing: socketMissing}
}

// socketMissing reports a file as missing only if the lookup says that it does not exist. Other errors do not count.
func socketMissing(socket string) (file, dir bool) {
	if _, err := os.Lstat(socket); !errors.Is(err, fs.ErrNotExist) {
		return false, false
	}
	_, err := os.Lstat(filepath.Dir(socket))
	return true, errors.Is(err, fs.ErrNotExist)
}

// supervision supervises one attempt of a task.
type supervision struct {
	*Supervisor
	task   registry.Task
	spec   hooks.PluginSpec
	plugin Plugin
	roles  []registry.Role
}

// Run supervises one attempt of a task until ctx ends or a record cannot be stored. When Run returns, all its
// goroutines have ended. The task's instances stay as they are, and its connection stays open for calls until
// Tasks.Exited, or until a newer attempt starts.
func (s *Supervisor) Run(ctx context.Context, t registry.Task, spec hooks.PluginSpec) error {
	plugin, err := s.fleet.Connect(spec.ID, t.TaskKey, t.Endpoint)
	if err != nil {
		return fmt.Errorf("connect to %s: %w", t.TaskKey, err)
	}
	u := &supervision{Supervisor: s, task: t, spec: withDefaults(spec), plugin: plugin,
		roles: spec.Type.Roles()}
	registered, healthy, err := u.registered(ctx)
	if err != nil {
		return err
	}
	if !registered {
		if err := u.registerWhenReady(ctx); err != nil {
			return err
		}
		return u.runHeartbeats(ctx, u.interval())
	}
	// An earlier shim has registered the plugin. First probes are spread over time; Lost notices a dead plugin at once.
	within := min(spread, u.spec.Heartbeat.Interval)
	switch {
	case !healthy:
		within = 0
	case !plugin.Outdated(): // this process has probed the plugin in its rehearsal
		within = u.spec.Heartbeat.Interval
	}
	return u.runHeartbeats(ctx, time.Duration(u.random()*float64(within)))
}

// withDefaults fills in the times of a spec that was stored without them.
func withDefaults(s hooks.PluginSpec) hooks.PluginSpec {
	s.HealthTimeout = cmp.Or(s.HealthTimeout, hooks.DefaultHealthTimeout)
	s.Heartbeat = hooks.Heartbeat{
		Interval: cmp.Or(s.Heartbeat.Interval, hooks.DefaultHeartbeatInterval),
		Timeout:  cmp.Or(s.Heartbeat.Timeout, hooks.DefaultHeartbeatTimeout),
		Failures: cmp.Or(s.Heartbeat.Failures, hooks.DefaultHeartbeatFailures),

		RestartAfter: s.Heartbeat.RestartAfter,
	}
	return s
}

// registered reports whether this attempt has all its instances in the table, and whether all of them are healthy.
func (u *supervision) registered(ctx context.Context) (all, healthy bool, err error) {
	err = u.state.View(ctx, func(v registry.View) error {
		all, healthy = true, true
		for _, role := range u.roles {
			in, ok := v.Instance(u.key(role))
			all = all && ok && in.Attempt == u.task.Attempt
			healthy = healthy && in.Health.State == registry.Healthy
		}
		return nil
	})
	return all, healthy, err
}

// ensure commits the change, unless it is empty. While the disk is full, it tries again. Once ctx has ended, it returns
// the cause.
func (u *supervision) ensure(ctx context.Context, decide registry.Decision) error {
	for logged := false; ; logged = true {
		_, err := registry.Ensure(ctx, u.state, decide)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if !errors.Is(err, registry.ErrExhausted) {
			return err
		}
		if !logged {
			u.logger.Warn("cannot record the health of a plugin task yet; retrying", "task", u.task.TaskKey, "error",
				err)
		}
		intent.Sleep(ctx, retryMost)
	}
}

// interval returns the time until the next heartbeat.
func (u *supervision) interval() time.Duration {
	every := u.spec.Heartbeat.Interval
	return every + time.Duration(float64(every)*jitter*(2*u.random()-1))
}

func (u *supervision) key(role registry.Role) registry.InstanceKey {
	return registry.InstanceKey{Role: role, Plugin: u.spec.ID, Alloc: u.task.Alloc, Task: u.task.Task}
}

// event returns an event of the task.
func (u *supervision) event(kind registry.EventKind, cause registry.Cause, detail string) registry.Event {
	return registry.Event{
		Kind: kind, Plugin: u.spec.ID, Alloc: u.task.Alloc, Task: u.task.Task, Cause: cause, Detail: detail,
		At: u.clock.Now(),
	}
}

// retries returns the waits between tries to reach a plugin.
func retries(most time.Duration) *backoff.ExponentialBackOff {
	return &backoff.ExponentialBackOff{InitialInterval: retryFirst, Multiplier: 2, MaxInterval: most}
}
