package task

import (
	"context"
	"fmt"
	"strings"
	"time"

	"holdfast/registry"
)

// restartSick asks for a restart of the task once the plugin has been unhealthy for restart_after. While a process of
// the task serves mounts of volumes (FUSE, nbd, ublk), or may do so, restartSick withholds the restart, because a
// restart would break these mounts. Without restart_after it does nothing.
func (h *heartbeat) restartSick(ctx context.Context) error {
	after := h.spec.Heartbeat.RestartAfter
	if after == 0 {
		return nil
	}
	task, health, err := h.taskAndHealth(ctx)
	if err != nil {
		return err
	}
	now := h.clock.Boot().At
	switch {
	case health.State != registry.Unhealthy:
		h.sickSince = 0
		if task.Withheld {
			return h.recordWithheld(ctx, false, problem{})
		}
		return nil
	case h.sickSince == 0:
		// An earlier shim may have recorded the plugin as unhealthy. The record has only wall time, so a change of the
		// clock may delay or hasten the restart. The time before the start of the task never counts.
		since := max(0, h.clock.Now().Sub(health.Since))
		h.sickSince = max(now-since, h.startedAt(), 1)
	}
	if now-h.sickSince < after || restartAsked(task) {
		return nil
	}
	why := problem{health.Cause, fmt.Sprintf("it has been unhealthy for %v: %s", after, health.Detail)}
	switch mounts, err := h.servedMounts(ctx); {
	case err != nil:
		why.text += fmt.Sprintf("; its task is not restarted, because its mounts cannot be listed: %v", err)
		return h.recordWithheld(ctx, true, why)
	case len(mounts) > 0:
		why.text += "; its task is not restarted while it serves the mounts of " + strings.Join(mounts, ", ") +
			"; stop these users"
		return h.recordWithheld(ctx, true, why)
	}
	return h.askRestart(ctx, why, registry.EventRestartAsked)
}

// taskAndHealth returns the task's record and the recorded health of its plugin, which is the same in all roles.
func (h *heartbeat) taskAndHealth(ctx context.Context) (task registry.Task, health registry.Health, err error) {
	err = h.state.View(ctx, func(v registry.View) error {
		task, _ = v.Task(h.task.TaskKey)
		in, _ := v.Instance(h.key(h.roles[0]))
		health = in.Health
		return nil
	})
	return task, health, err
}

// startedAt returns the time since boot at which the task was started, or 0 if that was before this boot.
func (h *heartbeat) startedAt() time.Duration {
	if h.task.Started.Boot != h.clock.Boot().Boot {
		return 0
	}
	return h.task.Started.At
}

// servedMounts describes the mounts for allocs and clients of CSI endpoints that the task serves, or may serve. It
// leaves out an alloc that is being released, because its release waits for the plugin.
func (h *heartbeat) servedMounts(ctx context.Context) (mounts []string, err error) {
	if h.Served == nil {
		return nil, nil
	}
	tasks, err := h.Served(ctx, []registry.PluginTask{{
		TaskKey: h.task.TaskKey, Plugin: h.spec.ID, Type: string(h.spec.Type), Phase: registry.TaskRunning,
	}})
	if err != nil {
		return nil, err
	}
	err = h.state.View(ctx, func(v registry.View) error {
		for _, t := range tasks {
			for _, served := range t.Volumes {
				mounts = append(mounts, usersOf(v, served)...)
			}
		}
		return nil
	})
	return mounts, err
}

// usersOf describes a volume with each of its users, except allocs that are being released.
func usersOf(v registry.View, served registry.ServedVolume) (users []string) {
	if served.Volume.ID == "" && len(served.Allocs) == 0 {
		return []string{fmt.Sprintf("volume %s", served)}
	}
	for _, id := range served.Allocs {
		if a, found := v.Alloc(id); found && a.State != registry.AllocReleasing {
			users = append(users, fmt.Sprintf("volume %s for alloc %s", served, id))
		}
	}
	return users
}

// recordWithheld records whether a restart is withheld. If the record changes and a restart is withheld now, the commit
// has an event with the reason.
func (h *heartbeat) recordWithheld(ctx context.Context, withheld bool, why problem) error {
	return h.ensure(ctx, func(v registry.View) (registry.Change, error) {
		task, ok := v.Task(h.task.TaskKey)
		if !ok || task.Attempt != h.task.Attempt || task.Withheld == withheld {
			return registry.Change{}, nil
		}
		task.Withheld = withheld
		change := registry.Change{Put: []registry.Record{task}}
		if withheld {
			change.Events = append(change.Events, h.event(registry.EventRestartWithheld, why.cause, why.text))
		}
		return change, nil
	})
}
