package task

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/registry"
)

// Fleet connects to plugins. One connection serves all roles of a task, and whoever else calls it.
type Fleet interface {
	// Connect gives the task's connection; nothing is sent yet.
	Connect(registry.PluginID, registry.TaskKey, registry.Endpoint) (Plugin, error)
	// Close ends the task's connection.
	Close(registry.TaskKey)
}

// Plugin is a connection to a plugin. Its methods may be called at the same time. All but Lost fail at once where nobody listens.
type Plugin interface {
	Probe(context.Context) (ready bool, err error)
	Describe(context.Context, []registry.Role) (map[registry.Role]registry.Fingerprint, error)
	// Outdated says whether what the last good Describe told may not hold any more. If there was none it is outdated.
	Outdated() bool
	// Lost returns once the connection is lost and nobody answers anew, with the reason, or nil when its context ends.
	Lost(context.Context) error
}

// Sockets waits for sockets to appear.
type Sockets interface {
	// Changed returns when something changes in the socket's directory, or when ctx ends.
	Changed(ctx context.Context, socket string)
	// Missing says whether the socket's file is not there, and whether its directory is not there either.
	Missing(socket string) (file, dir bool)
}

// Clock is the time. In tests it is a bubble's.
type Clock struct {
	Now  func() time.Time         // wall time, for people
	Boot func() registry.BootTime // for deadlines
}

// Waits of this package that no stanza sets.
const (
	dialFirst     = 10 * time.Millisecond
	dialMost      = time.Second
	socketGrace   = 2 * time.Second      // for a plugin that makes its socket anew
	dialGap       = 2 * time.Millisecond // between two tries, however often the socket's directory changes
	describeLimit = 10 * time.Second
	refreshEvery  = 10 * time.Minute
	jitter        = 0.1         // of the heartbeat's interval, either way
	spread        = time.Second // in which a new shim probes what an earlier one has registered
)

// Supervisor watches plugin tasks.
type Supervisor struct {
	state   registry.State
	fleet   Fleet
	sockets Sockets
	clock   Clock
	random  func() float64 // in [0,1)
	logger  hclog.Logger
}

// New starts nothing; Run does.
func New(state registry.State, f Fleet, s Sockets, c Clock, random func() float64, logger hclog.Logger) *Supervisor {
	return &Supervisor{state: state, fleet: f, sockets: s, clock: c, random: random, logger: logger}
}

// watch is one start of a task being watched.
type watch struct {
	*Supervisor
	task   registry.Task
	spec   hooks.PluginSpec
	at     hooks.Preparation
	plugin Plugin
	roles  []registry.Role
}

// Run watches one start of a task until ctx ends. When it returns, everything that it started has returned. The task's instances stay as
// they are, and its connection stays open for calls until Exited.
func (s *Supervisor) Run(ctx context.Context, t registry.Task, spec hooks.PluginSpec, at hooks.Preparation) error {
	plugin, err := s.fleet.Connect(spec.ID, t.TaskKey, at.Endpoint)
	if err != nil {
		return fmt.Errorf("connect to %s: %w", t.TaskKey, err)
	}
	w := &watch{Supervisor: s, task: t, spec: spec, at: at, plugin: plugin, roles: spec.Type.Roles()}
	w.spec.HealthTimeout = cmp.Or(spec.HealthTimeout, hooks.DefaultHealthTimeout)
	w.spec.Heartbeat = whole(spec.Heartbeat)
	registered, healthy, err := w.registered(ctx)
	if err != nil {
		return err
	}
	switch {
	case registered && healthy: // for an earlier shim. Not all plugins are probed at once; one that is gone is noticed at once
		within := min(spread, w.spec.Heartbeat.Interval)
		if !w.plugin.Outdated() { // this shim has asked it already, while the earlier one served
			within = w.spec.Heartbeat.Interval
		}
		return w.beat(ctx, time.Duration(w.random()*float64(within)))
	case registered:
		return w.beat(ctx, 0)
	}
	if err := w.start(ctx); err != nil {
		return err
	}
	return w.beat(ctx, w.interval())
}

// Exited closes the task's connection. Run has returned, and the task's instances have left the table.
func (s *Supervisor) Exited(t registry.TaskKey) { s.fleet.Close(t) }

// whole is h with its defaults, for a spec that was stored without.
func whole(h hooks.Heartbeat) hooks.Heartbeat {
	return hooks.Heartbeat{
		Interval: cmp.Or(h.Interval, hooks.DefaultHeartbeatInterval), Timeout: cmp.Or(h.Timeout, hooks.DefaultHeartbeatTimeout),
		Failures: cmp.Or(h.Failures, hooks.DefaultHeartbeatFailures),
	}
}

// registered says whether this attempt of the task has all its instances in the table, and whether they are healthy there.
func (w *watch) registered(ctx context.Context) (all, healthy bool, err error) {
	err = w.state.View(ctx, func(v registry.View) error {
		all, healthy = true, true
		for _, role := range w.roles {
			in, ok := v.Instance(w.key(role))
			all = all && ok && in.Attempt == w.task.Attempt
			healthy = healthy && in.Health.State == registry.Healthy
		}
		return nil
	})
	return all, healthy, err
}

// commit tries again while the disk is full, until ctx ends.
func (w *watch) commit(ctx context.Context, decide func(registry.View) (registry.Change, error)) error {
	for told := false; ; told = true {
		_, err := w.state.Commit(ctx, decide)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if !errors.Is(err, registry.ErrExhausted) {
			return err
		}
		if !told {
			w.logger.Warn("the health of a plugin task cannot be recorded yet", "task", w.task.TaskKey, "error", err)
		}
		sleep(ctx, dialMost)
	}
}

// interval is the time to the next heartbeat.
func (w *watch) interval() time.Duration {
	every := w.spec.Heartbeat.Interval
	return every + time.Duration(float64(every)*jitter*(2*w.random()-1))
}

func (w *watch) key(role registry.Role) registry.InstanceKey {
	return registry.InstanceKey{Role: role, Plugin: w.spec.ID, Alloc: w.task.Alloc, Task: w.task.Task}
}

// event is one of the task's.
func (w *watch) event(kind registry.EventKind, cause registry.Cause, detail string) registry.Event {
	return registry.Event{
		Kind: kind, Plugin: w.spec.ID, Alloc: w.task.Alloc, Task: w.task.Task, Cause: cause, Detail: detail, At: w.clock.Now(),
	}
}

// sleep waits, at most until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
