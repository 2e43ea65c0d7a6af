package agent

import (
	"context"
	"errors"
	"sync"
	"time"

	"holdfast/host/agent/taskdriver"
)

const noteStopping = "stopping"

// stopAttempt stops an attempt. It returns nil when no process of the attempt is left, or an error when ctx ends.
func (t *taskRunner) stopAttempt(ctx context.Context, h taskdriver.Handle, why string) error {
	note := noteStopping
	if why != "" {
		note += ": " + why
	}
	if !t.record().Stop || t.state().Reason != why { // else stopAllLocked has added the note
		if err := t.set(note, func(r *TaskRecord) { r.Reason = why }); err != nil {
			return err
		}
	}
	t.reportStop(ctx)
	for b := newBackoff(); ; {
		err := t.stopGracefully(ctx, h)
		if errors.Is(err, errForced) {
			err = t.driver.Stop(ctx, h, 0)
		}
		if err == nil || ctx.Err() != nil {
			return context.Cause(ctx)
		}
		t.a.log.Error("could not stop the task; retrying", "alloc", t.id, "task", t.spec.Name, "error", err)
		sleep(ctx, b.NextBackOff(), nil)
	}
}

// stopReportTimeout bounds the report of a stop. Without the report the plugin counts as unhealthy for a moment.
const stopReportTimeout = 2 * time.Second

// reportStop tells the shim that a plugin is about to stop on purpose.
func (t *taskRunner) reportStop(ctx context.Context) {
	if !t.isPlugin() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, stopReportTimeout)
	defer cancel()
	if err := t.s.TaskStopping(ctx, t.key(), t.state().Attempt); err != nil {
		t.a.log.Debug("could not report a stop to the shim", "alloc", t.id, "task", t.spec.Name, "error", err)
	}
}

// errForced ends the grace of a task early.
var errForced = errors.New("everything is stopped by force")

// stopGracefully stops the task and lets it use its grace. The grace ends early if everything is stopped by force.
func (t *taskRunner) stopGracefully(ctx context.Context, h taskdriver.Handle) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	wg.Go(func() {
		select {
		case <-t.a.graceEnded():
			cancel(errForced)
		case <-ctx.Done():
		}
	})
	return t.driver.Stop(ctx, h, t.spec.grace)
}
