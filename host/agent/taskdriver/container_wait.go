//go:build !taskparent

package taskdriver

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"

	"holdfast/internal/proc"
)

// Wait waits for the container to exit, across restarts of the engine. It then moves the output to the task's log files
// and removes the container.
func (d Container) Wait(ctx context.Context, h Handle) (Exit, error) {
	b := backoff.NewExponentialBackOff()
	b.InitialInterval, b.MaxInterval = 100*time.Millisecond, 10*time.Second
	for {
		exit, err := d.wait(ctx, h)
		if err == nil {
			return exit, nil
		}
		select {
		case <-ctx.Done():
			return Exit{}, fmt.Errorf("wait for task %s: %w", h.ID, context.Cause(ctx))
		case <-time.After(b.NextBackOff()):
		}
	}
}

// wait is one try of Wait. After an error, Wait tries again.
func (d Container) wait(ctx context.Context, h Handle) (Exit, error) {
	exit, found, err := readExit(h)
	if err != nil {
		return Exit{}, err
	}
	if found {
		return exit, d.removeEnded(ctx, h)
	}
	s, found, err := d.state(ctx, h)
	if d.name == "podman" && h.stillRuns(s) {
		if err = d.awaitProcess(ctx, h, s.Pid); err == nil {
			s, found, err = d.state(ctx, h)
		}
	}
	if restarted := found && containerRuns(s) && !h.stillRuns(s); err == nil && !restarted {
		// Wait even if the container has ended, because Podman may not know the exit code before.
		if err = d.awaitExit(ctx, h); err == nil {
			s, found, err = d.state(ctx, h)
		}
	}
	switch {
	case err != nil:
		return Exit{}, err
	case !found:
		exit = Exit{Code: -1, At: time.Now().UTC(), Err: "exit status unknown: the container was removed"}
	case h.stillRuns(s):
		// Podman ends a wait early after an error of its own.
		return Exit{}, fmt.Errorf("the engine did not wait for the end of container %s", h.Container)
	case containerRuns(s) || h.Created != "" && s.StartedAt != h.Created:
		// Another program has restarted the container. It may be the same task, but the agent must know of each start.
		if err := d.remove(ctx, h); err != nil {
			return Exit{}, err
		}
		exit = Exit{Code: -1, At: time.Now().UTC(), Err: "exit status unknown: another program restarted the container"}
	default:
		if err := d.keepLogs(ctx, h); err != nil {
			return Exit{}, err
		}
		exit = exitOf(s)
	}
	if err := recordLostExit(h, exit); err != nil {
		return Exit{}, err
	}
	return exit, d.removeEnded(ctx, h)
}

// recheckPause is how long awaitProcess waits for a process before it asks the engine again.
var recheckPause = time.Minute

// awaitProcess waits until the first process of the container has exited. Podman's wait alone would keep a processor
// busy for as long as the container runs: behind Docker's API, Podman polls the state without a pause. If the engine
// has another pid namespace, pid is another process here, or none. So awaitProcess also asks the engine now and then.
func (d Container) awaitProcess(ctx context.Context, h Handle, pid int) error {
	stat, err := proc.ReadStat(pid)
	if err != nil {
		return nil // it has exited
	}
	for {
		s, _, err := d.state(ctx, h)
		if err != nil || s.Pid != pid || !h.stillRuns(s) {
			return err // the container has ended, or stat is of a later process with this pid
		}
		waiting, cancel := context.WithTimeout(ctx, recheckPause)
		err = processOf(stat).wait(waiting)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			return err
		}
	}
}

// awaitExit waits until the container does not run. It also returns if the container is gone.
func (d Container) awaitExit(ctx context.Context, h Handle) error {
	exited := d.engine.ContainerWait(ctx, h.Container, client.ContainerWaitOptions{
		Condition: container.WaitConditionNotRunning,
	})
	select {
	case <-exited.Result:
	case err := <-exited.Error:
		if !errdefs.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// removeEnded removes a container that has ended. It returns an error if the engine does not answer. If the engine
// refuses the removal, removeEnded writes the reason to the task's output and returns nil, and the next attempt removes
// the container. That does no harm, because the ended task uses nothing any more.
func (d Container) removeEnded(ctx context.Context, h Handle) error {
	removing, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	_, err := backoff.Retry(removing, func() (struct{}, error) { return struct{}{}, d.remove(removing, h) },
		backoff.WithMaxTries(removeTries))
	if err == nil {
		return nil
	}
	if err := d.ping(ctx); err != nil {
		return err
	}
	log := h.openLogs(Stderr)
	defer log.close()
	fmt.Fprintf(log, "holdfast: the engine does not remove the container of this task, which has ended: %v\n", err)
	return nil
}

// removeTries is how often removeEnded tries to remove a container, within a few seconds.
const removeTries = 4

// exitOf converts the state of an ended container.
func exitOf(s container.State) Exit {
	e := Exit{Code: s.ExitCode, At: time.Now().UTC()}
	if at, err := time.Parse(time.RFC3339Nano, s.FinishedAt); err == nil && at.Year() > 1 {
		e.At = at.UTC()
	}
	if s.ExitCode > 128 && s.ExitCode < 128+65 {
		e.Signal = s.ExitCode - 128
	}
	switch {
	case s.Status == container.StateCreated:
		e.Code, e.Err = -1, "the agent was killed before it started the container"
	case s.OOMKilled:
		e.Err = memoryExit
	case s.Error != "":
		e.Err = s.Error
	}
	return e
}
