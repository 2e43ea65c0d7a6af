package task

import (
	"context"
	"fmt"
	"strings"
	"time"

	"holdfast/registry"
)

// restartSick asks for a restart of the task once the plugin has been unhealthy for restart_after. While a process of
// the task serves FUSE mounts of volumes, it withholds the restart, because that would break them.
func (h *heartbeat) restartSick(ctx context.Context) error {
	after := h.spec.Heartbeat.RestartAfter
	if after == 0 {
		return nil
	}
	task, health, err := h.recorded(ctx)
	if err != nil {
		return err
	}
	now := h.clock.Boot().At
	switch {
	case health.State != registry.Unhealthy:
		h.sick = 0
		if task.Withheld {
			return h.withhold(ctx, false, problem{})
		}
		return nil
	case h.sick == 0:
		// An earlier shim may have recorded it. Wall time is all that its record has, so a clock that was set may delay
		// or hasten the restart, within the life of the task.
		since := max(0, h.clock.Now().Sub(health.Since))
		h.sick = max(now-since, h.startedAt(), 1)
	}
	if now-h.sick < after || restartAsked(task, task.Attempt) {
		return nil
	}
	why := problem{health.Cause, fmt.Sprintf("it has been unhealthy for %v: %s", after, health.Detail)}
	if mounts := h.servedMounts(ctx); mounts != "" {
		why.text += "; its task is not restarted, because it serves mounts: " + mounts +
			"; stop these allocs"
		return h.withhold(ctx, true, why)
	}
	return h.askRestart(ctx, why, registry.EventRestartAsked)
}

// recorded returns the task's record, and the health of its plugin.
func (h *heartbeat) recorded(ctx context.Context) (task registry.Task, health registry.Health, err error) {
	err = h.state.View(ctx, func(v registry.View) error {
		task, _ = v.Task(h.task.TaskKey)
		in, _ := v.Instance(h.key(h.roles[0]))
		health = in.Health
		return nil
	})
	return task, health, err
}

// startedAt returns when the task was started, since boot, or 0 if that was before this boot.
func (h *heartbeat) startedAt() time.Duration {
	if h.task.Started.Boot != h.clock.Boot().Boot {
		return 0
	}
	return h.task.Started.At
}

// servedMounts describes the mounts that a process of the task serves, or may serve, for allocs in use. It is empty if
// there are none. The mounts of an alloc that is being released have no users: its release waits for the plugin.
func (h *heartbeat) servedMounts(ctx context.Context) string {
	if h.Served == nil {
		return ""
	}
	tasks, err := h.Served(ctx, []registry.PluginTask{{
		TaskKey: h.task.TaskKey, Plugin: h.spec.ID, Type: string(h.spec.Type), Phase: registry.TaskRunning,
	}})
	var mounts []string
	if err == nil {
		err = h.state.View(ctx, func(v registry.View) error {
			for _, t := range tasks {
				for _, served := range t.Volumes {
					for _, alloc := range served.Allocs {
						if a, found := v.Alloc(alloc); found && a.State != registry.AllocReleasing {
							mounts = append(mounts, fmt.Sprintf("of volume %s for alloc %s", served.Volume, alloc))
						}
					}
				}
			}
			return nil
		})
	}
	if err != nil {
		return fmt.Sprintf("they cannot be found: %v", err)
	}
	return strings.Join(mounts, ", ")
}

// withhold records whether a restart is withheld, with an event if it is.
func (h *heartbeat) withhold(ctx context.Context, held bool, why problem) error {
	return h.commit(ctx, func(v registry.View) (registry.Change, error) {
		task, ok := v.Task(h.task.TaskKey)
		if !ok || task.Attempt != h.task.Attempt || task.Withheld == held {
			return registry.Change{}, nil
		}
		task.Withheld = held
		change := registry.Change{Put: []registry.Record{task}}
		if held {
			change.Events = append(change.Events, h.event(registry.EventRestartWithheld, why.cause, why.text))
		}
		return change, nil
	})
}
