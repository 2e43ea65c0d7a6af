package launch

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/proc"
	"holdfast/proto/bootstrap"
	"holdfast/registry"
)

const (
	// lifeFD is the descriptor of the life pipe in the shim.
	lifeFD = 3
	// drainTime is how long output is still read after a death while another process holds the pipes.
	drainTime = 100 * time.Millisecond
	// busyTime is how long execution is retried while a child of another thread still has the binary open for writing.
	busyTime = 500 * time.Millisecond
	// killTime bounds the wait for a death by SIGKILL where the caller's context does not.
	killTime = 10 * time.Second
)

// child is one shim process as the kernel knows it.
type child struct {
	cmd   *exec.Cmd
	pid   int
	life  *os.File      // a pipe; its closing tells the shim that the host is gone
	asked atomic.Bool   // this host has asked it to end, or killed it
	done  chan struct{} // closed once it is dead and its output is read, unless the logger blocks
	exit  *Exit         // readable after done
}

// startChild executes the open binary itself, by the path of this process's descriptor: the binary's own path may name
// another file by now.
func startChild(binary *os.File, argv, env []string, stdout io.Writer, stderr *logWriter) (*child, error) {
	if err := checkWhole(binary); err != nil {
		return nil, err
	}
	shimEnd, life, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start the shim: %w", err)
	}
	defer shimEnd.Close()
	for deadline := time.Now().Add(busyTime); ; time.Sleep(time.Millisecond) {
		cmd := &exec.Cmd{
			Path: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), binary.Fd()), Args: argv, Dir: "/",
			Env:    append(env, fmt.Sprintf("%s=%d", bootstrap.LifeFD, lifeFD)),
			Stdout: stdout, Stderr: stderr, ExtraFiles: []*os.File{shimEnd}, // shimEnd is descriptor lifeFD
			SysProcAttr: &syscall.SysProcAttr{Setsid: true}, WaitDelay: drainTime,
		}
		err := cmd.Start()
		if err == nil {
			c := &child{cmd: cmd, pid: cmd.Process.Pid, life: life, done: make(chan struct{})}
			go c.reap(stderr)
			return c, nil
		}
		if !errors.Is(err, unix.ETXTBSY) || time.Now().After(deadline) {
			return nil, errors.Join(explainExec(binary, err), life.Close())
		}
	}
}

// checkWhole refuses an ELF executable that was cut off: the kernel's error would not say so.
func checkWhole(binary *os.File) error {
	var magic [len(elf.ELFMAG)]byte
	if n, _ := binary.ReadAt(magic[:], 0); string(magic[:n]) != elf.ELFMAG {
		return nil // execution fails with a clear error
	}
	info, err := binary.Stat()
	if err != nil {
		return err
	}
	f, err := elf.NewFile(binary)
	cut := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
	if err == nil {
		cut = slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Off+p.Filesz > uint64(info.Size()) })
	}
	if cut {
		return registry.Errorf(registry.ErrUnsupported,
			"the shim is cut off after %d bytes; install the whole binary, "+
				"and give that", info.Size())
	}
	return nil
}

// explainExec adds to the kernel's error what to do.
func explainExec(binary *os.File, err error) error {
	switch {
	case errors.Is(err, unix.ENOEXEC):
		return registry.Errorf(registry.ErrUnsupported, "the shim cannot run here: it is %s, this machine runs %s/%s; "+
			"use the binary for this machine", fileKind(binary), runtime.GOOS, runtime.GOARCH)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return registry.Errorf(registry.ErrDenied, "the shim must not be executed (%w): is its store on a file system "+
			"mounted noexec?", err)
	case errors.Is(err, unix.ENOENT):
		return registry.Errorf(registry.ErrUnsupported,
			"the shim's interpreter or dynamic loader is missing (%w): build it with "+
				"CGO_ENABLED=0", err)
	}
	return fmt.Errorf("execute the shim: %w", err)
}

func fileKind(binary *os.File) string {
	f, err := elf.NewFile(binary)
	if err != nil {
		return "no ELF executable"
	}
	return "an ELF executable for " + strings.TrimPrefix(f.Machine.String(), "EM_")
}

// reap waits for the death of the shim, even if another process holds its pipes, and kills the rest of its process
// group. It reaps the pid only afterwards, so the pid cannot belong to another group.
func (c *child) reap(stderr *logWriter) {
	for errors.Is(unix.Waitid(unix.P_PID, c.pid, nil, unix.WEXITED|unix.WNOWAIT, nil), unix.EINTR) {
	}
	asked := c.asked.Load() // a request during drainTime has not ended it
	_ = unix.Kill(-c.pid, unix.SIGKILL)
	state, err := c.cmd.Process.Wait()
	_ = c.life.Close()
	c.exit = newExit(c.pid, state, err)
	c.exit.Asked = asked
	report := sync.OnceFunc(func() { close(c.done) })
	defer report()
	defer time.AfterFunc(2*drainTime, report).Stop() // a logger that blocks must not hide the death
	_ = c.cmd.Wait()                                 // ends the output; the process is reaped already
	stderr.end()
}

// kill sends SIGKILL, which also ends a stopped process. It is no error if the process is dead.
func (c *child) kill() error {
	c.asked.Store(true)
	if err := c.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill shim %d: %w", c.pid, err)
	}
	return nil
}

// closeLife closes the life pipe: a shim that works ends by itself.
func (c *child) closeLife() {
	c.asked.Store(true)
	_ = c.life.Close()
}

// killAndWait sends SIGKILL and returns after the death. After killTime, or when ctx ends, it returns an error with the
// kernel's state of the process.
func (c *child) killAndWait(ctx context.Context) error {
	if err := c.kill(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, killTime)
	defer cancel()
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-c.done: // at the same time as ctx
		return nil
	default:
		return registry.Errorf(registry.ErrUnavailable, "shim %d has not died of SIGKILL yet (%s): %w",
			c.pid, proc.Sleeping(c.pid), context.Cause(ctx))
	}
}
