//go:build !taskparent

package taskdriver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/pkg/stdcopy"
	"github.com/moby/moby/client"
)

// keepLogs appends the output of a container to the task's log files. If the agent is killed meanwhile, the files get
// the output twice. If the engine cannot read the output, as after a power cut, keepLogs says so in the stderr log and
// returns nil, because the task has ended.
func (d Container) keepLogs(ctx context.Context, h Handle) error {
	stdout, stderr := h.openLogs(Stdout), h.openLogs(Stderr)
	defer stdout.close()
	defer stderr.close()
	_, err := d.copyOutput(ctx, h, client.ContainerLogsOptions{ShowStdout: true, ShowStderr: true}, stdout, stderr)
	var network net.Error
	if err == nil || ctx.Err() != nil || client.IsErrConnectionFailed(err) || errors.As(err, &network) {
		return err
	}
	fmt.Fprintf(stderr, "holdfast: the engine cannot read the rest of this output: %v\n", err)
	return nil
}

func (h Handle) openLogs(s Stream) *logWriter { return openLogs(h.Dir, s, h.LogSize, h.LogFiles) }

// Logs copies the output of earlier attempts from the task's log files, and then the output of the container. If the
// container has ended meanwhile, its output is in the log files, too.
func (d Container) Logs(ctx context.Context, h Handle, s Stream, follow bool, to io.Writer) error {
	at := &logPosition{number: -1}
	if err := at.copy(h, s, to); err != nil || h.Container == "" {
		return err
	}
	ended, err := h.hasEnded()
	if err == nil && !ended {
		var found bool
		options := client.ContainerLogsOptions{ShowStdout: s == Stdout, ShowStderr: s == Stderr, Follow: follow}
		if found, err = d.copyOutput(ctx, h, options, to, to); found {
			return err
		}
	}
	if err != nil {
		return err
	}
	return at.copy(h, s, to)
}

// copyOutput copies the container's output from the engine. If the container is gone, found is false.
func (d Container) copyOutput(ctx context.Context, h Handle, o client.ContainerLogsOptions, stdout, stderr io.Writer,
) (found bool, err error) {
	c, found, err := d.inspect(ctx, h)
	if !found {
		return false, err
	}
	logs, err := d.engine.ContainerLogs(ctx, h.Container, o)
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return true, fmt.Errorf("read the output of container %s: %w", h.Container, err)
	}
	defer logs.Close()
	if c.Config != nil && c.Config.Tty {
		_, err = io.Copy(stdout, logs)
	} else {
		_, err = stdcopy.StdCopy(stdout, stderr, logs)
	}
	if errors.Is(err, io.ErrUnexpectedEOF) && ctx.Err() == nil {
		return true, nil // the container was removed
	}
	return true, err
}
