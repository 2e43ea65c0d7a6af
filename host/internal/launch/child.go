package launch

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/proc"
	"holdfast/proto/bootstrap"
	"holdfast/registry"
)

const (
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
	pid    int
	os     *os.Process
	life   *os.File // a pipe; its closing tells the shim that the host is gone
	stdout *os.File
	stderr *os.File
	asked  atomic.Bool   // this host has ended it
	done   chan struct{} // closed at death
	exit   *Exit         // readable after done
}

// startChild executes the open binary itself, as its path may name another file by now.
func startChild(binary *os.File, argv, env []string) (*child, error) {
	if err := checkWhole(binary); err != nil {
		return nil, err
	}
	p, err := newPipes()
	if err != nil {
		return nil, fmt.Errorf("start the shim: %w", err)
	}
	defer p.closeShims()
	c := &child{life: p.lifeW, stdout: p.stdoutR, stderr: p.stderrR, done: make(chan struct{})}
	attr := &os.ProcAttr{
		Dir: "/", Env: append(env, fmt.Sprintf("%s=%d", bootstrap.LifeFD, lifeFD)),
		Files: []*os.File{p.stdin, p.stdoutW, p.stderrW, p.lifeR}, // lifeR is descriptor lifeFD
		Sys:   &syscall.SysProcAttr{Setsid: true},
	}
	if c.os, err = execute(binary, argv, attr); err != nil {
		p.closeHosts()
		return nil, explainExec(binary, err)
	}
	c.pid = c.os.Pid
	go c.reap()
	return c, nil
}

// execute starts the binary by the path of this process's descriptor: in the child, the same number may be another
// file.
func execute(binary *os.File, argv []string, attr *os.ProcAttr) (*os.Process, error) {
	path := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), binary.Fd())
	for deadline := time.Now().Add(busyTime); ; {
		proc, err := os.StartProcess(path, argv, attr)
		if !errors.Is(err, unix.ETXTBSY) || time.Now().After(deadline) {
			runtime.KeepAlive(binary)
			return proc, err
		}
		time.Sleep(time.Millisecond)
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

// pipes are both ends of a shim's stdio and of its life pipe.
type pipes struct {
	stdin, stdoutW, stderrW, lifeR *os.File // the shim's
	stdoutR, stderrR, lifeW        *os.File // the host's
}

func newPipes() (*pipes, error) {
	var p pipes
	var errs [4]error
	p.stdin, errs[0] = os.Open(os.DevNull)
	p.stdoutR, p.stdoutW, errs[1] = os.Pipe()
	p.stderrR, p.stderrW, errs[2] = os.Pipe()
	p.lifeR, p.lifeW, errs[3] = os.Pipe()
	if err := errors.Join(errs[:]...); err != nil {
		p.closeShims()
		p.closeHosts()
		return nil, err
	}
	return &p, nil
}

func (p *pipes) closeShims() { closeAll(p.stdin, p.stdoutW, p.stderrW, p.lifeR) }
func (p *pipes) closeHosts() { closeAll(p.stdoutR, p.stderrR, p.lifeW) }

func closeAll(files ...*os.File) {
	for _, f := range files {
		_ = f.Close() // nil is closed already
	}
}

// reap waits for the death of the shim, even if another process holds its pipes, and kills the rest of its process
// group. It reaps the pid only afterwards, so the pid cannot belong to another group.
func (c *child) reap() {
	for {
		err := unix.Waitid(unix.P_PID, c.pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	_ = unix.Kill(-c.pid, unix.SIGKILL)
	state, err := c.os.Wait()
	c.exit = newExit(c.pid, state, err)
	c.exit.Asked = c.asked.Load()
	close(c.done)
	c.endOutput()
}

// endOutput gives the readers drainTime to read the rest of the output, as another process may keep the pipes open.
func (c *child) endOutput() {
	end := time.Now().Add(drainTime)
	_ = c.stdout.SetReadDeadline(end)
	_ = c.stderr.SetReadDeadline(end)
}

// kill sends SIGKILL, which also ends a stopped process. It is no error if the process is dead.
func (c *child) kill() error {
	c.asked.Store(true)
	if err := c.os.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("kill shim %d: %w", c.pid, err)
	}
	return nil
}

// closeLife closes the life pipe: a shim that works ends by itself.
func (c *child) closeLife() {
	c.asked.Store(true)
	_ = c.life.Close()
}

// killAndWait returns after the death, or with the kernel's state of a process that does not die.
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
	case <-c.done: // both at once
		return nil
	default:
		return registry.Errorf(registry.ErrUnavailable, "shim %d has not died of SIGKILL yet (%s): %w",
			c.pid, proc.Sleeping(c.pid), context.Cause(ctx))
	}
}
