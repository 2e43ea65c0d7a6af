//go:build !taskparent

package taskdriver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/moby/moby/api/pkg/stdcopy"
	"github.com/moby/moby/client"
	"golang.org/x/sys/unix"

	"holdfast/internal/proc"
)

// Exec makes the engine run the program in the container. The engine does not end the program when this process ends.
func (d Container) Exec(ctx context.Context, h Handle, o ExecOptions) (code int, err error) {
	defer o.Stdin.Close()
	if err := o.validate(); err != nil {
		return 0, err
	}
	create := client.ExecCreateOptions{Cmd: o.Command, TTY: o.Term != "", AttachStdin: true, AttachStdout: true,
		AttachStderr: true}
	if create.TTY {
		create.Env = []string{"TERM=" + o.Term}
	}
	made, err := d.engine.ExecCreate(ctx, h.Container, create)
	if err != nil {
		return 0, d.explain(h.ID, err)
	}
	// If the client hangs up during the start, Podman starts the program all the same, but no longer knows it. So ctx
	// must not cancel the start.
	attaching, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	limit := time.AfterFunc(queryTimeout, end)
	conn, err := d.engine.ExecAttach(attaching, made.ID, client.ExecAttachOptions{TTY: create.TTY})
	limit.Stop()
	if err != nil {
		return 0, d.explain(h.ID, err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() {
		d.killExec(context.WithoutCancel(ctx), made.ID)
		conn.Close()
	})
	var wg sync.WaitGroup
	done := make(chan struct{})
	wg.Go(func() {
		_, _ = io.Copy(conn.Conn, o.Stdin)
		if create.TTY {
			_, _ = conn.Conn.Write([]byte{endOfInput}) // dockerd hangs up on CloseWrite
		} else {
			_ = conn.CloseWrite()
		}
	})
	wg.Go(func() { d.forwardExec(ctx, made.ID, o.Events, done) })
	if create.TTY {
		_, err = io.Copy(o.Stdout, conn.Reader)
	} else {
		_, err = stdcopy.StdCopy(o.Stdout, o.Stderr, conn.Reader)
	}
	close(done)
	o.Stdin.Close()
	conn.Close()
	wg.Wait()
	if !stop() {
		return 0, context.Cause(ctx)
	}
	if err != nil {
		return 0, fmt.Errorf("output of the command in container %s: %w", h.Container, err)
	}
	return d.execExit(ctx, made.ID)
}

// execExit returns the exit code of a program after the end of its output.
func (d Container) execExit(ctx context.Context, id string) (code int, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, queryTimeout, errors.New("its output has ended, but it still runs"))
	defer cancel()
	err = poll(ctx, pollInterval, func() (ended bool, err error) {
		s, err := d.engine.ExecInspect(ctx, id, client.ExecInspectOptions{})
		code = s.ExitCode
		return !s.Running, err
	})
	return code, err
}

// forwardExec passes events to the program until done is closed.
func (d Container) forwardExec(ctx context.Context, id string, events <-chan ExecEvent, done <-chan struct{}) {
	for {
		select {
		case e := <-events:
			if e.Rows == 0 {
				d.signalExec(ctx, id, e.Signal)
			} else {
				_, _ = d.engine.ExecResize(ctx, id, client.ExecResizeOptions{Height: uint(e.Rows), Width: uint(e.Cols)})
			}
		case <-done:
			return
		}
	}
}

// startLimit bounds the start of a program by the engine after the engine has accepted it.
const startLimit = 5 * time.Second

// killExec kills a program. The engine may not have started it yet.
func (d Container) killExec(ctx context.Context, id string) {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	_ = poll(ctx, pollInterval, func() (bool, error) { return d.signalExec(ctx, id, unix.SIGKILL), nil })
}

// signalExec sends a signal to a program by its pid, because engines cannot do that. SIGKILL also goes to the processes
// below the program. runs is false if the program does not run, or the engine does not answer.
func (d Container) signalExec(ctx context.Context, id string, sig unix.Signal) (runs bool) {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	s, err := d.engine.ExecInspect(ctx, id, client.ExecInspectOptions{})
	if err != nil || !s.Running || s.PID <= 1 {
		return false
	}
	list := []proc.Stat{}
	if program, err := proc.ReadStat(s.PID); err == nil {
		list = append(list, program)
	}
	if below, err := descendants(s.PID); err == nil && sig == unix.SIGKILL {
		list = append(list, below...)
	}
	for _, p := range list {
		_ = processOf(p).signal(sig)
	}
	return true
}

var _ Executor = Container{}
