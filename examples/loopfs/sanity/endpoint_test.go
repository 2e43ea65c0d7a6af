package sanity

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// endpoint is holdfast with the driver as a plugin, whose CSI endpoint stands in for the driver.
type endpoint struct {
	task
	running []*exec.Cmd // in the order of their start

	stop     context.CancelFunc // of the swaps
	swapping sync.WaitGroup
	swaps    int
	failed   error // of a swap
}

// startEndpoint returns when the endpoint serves. Until end is called, the shim is swapped again and again.
func (j task) startEndpoint() (e *endpoint, err error) {
	e = &endpoint{task: j}
	command := j.command()
	var args []string
	for _, arg := range command[1:] {
		args = append(args, fmt.Sprintf("%q", arg))
	}
	job := filepath.Join(j.Dir, "driver.hcl")
	text := fmt.Sprintf(`job "driver" {
  type = "system"
  group "plugin" {
    task "driver" {
      driver = "raw_exec"
      config {
        command = %q
        args    = [%s]
      }
      csi_plugin {
        id   = "driver"
        type = "monolith"
      }
    }
  }
}`, command[0], strings.Join(args, ", "))
	if err := os.WriteFile(job, []byte(text), 0o600); err != nil {
		return nil, err
	}
	// Shims are compared by their digests, so that another one is needed to swap to.
	shims := []string{j.program("holdfast-shim"), filepath.Join(j.Dir, "other-shim")}
	if err := appendTo(shims[1], shims[0]); err != nil {
		return nil, err
	}
	if err := e.begin("run", "--state-dir", filepath.Join(j.Dir, "state"), "--run-dir", filepath.Join(j.Dir, "run"),
		"--shim", shims[0], job); err != nil {
		return nil, err
	}
	if err := within(time.Minute, func() error { return e.holdfast("plugin", "status", "driver") }); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, j.log())
	}
	if err := e.begin("--address", e.control(), "csi-endpoint", "driver", j.socket()); err != nil {
		return nil, err
	}
	err = within(time.Minute, func() error {
		conn, err := net.Dial("unix", j.socket())
		if err == nil {
			err = conn.Close()
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("the endpoint does not serve: %w\n%s", err, j.log())
	}
	var ctx context.Context
	ctx, e.stop = context.WithCancel(context.Background())
	e.swapping.Go(func() {
		for ctx.Err() == nil && e.failed == nil {
			e.swaps++
			e.failed = e.holdfast("shim", "swap", shims[e.swaps%2])
		}
	})
	return e, nil
}

// program returns the path of a program that build has made beside loopfs.
func (j task) program(name string) string { return filepath.Join(filepath.Dir(j.Binary), name) }

// appendTo makes a copy of the program with another digest: nothing reads what is behind its sections.
func appendTo(path, program string) error {
	text, err := os.ReadFile(program)
	if err == nil {
		err = os.WriteFile(path, append(text, '\n'), 0o700)
	}
	return err
}

func (e *endpoint) control() string { return filepath.Join(e.Dir, "run", "agent.sock") }

// begin starts a holdfast in the background.
func (e *endpoint) begin(args ...string) error {
	log, err := os.OpenFile(filepath.Join(e.Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(e.program("holdfast"), args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	e.running = append(e.running, cmd)
	return cmd.Start()
}

// holdfast runs a command of the agent.
func (e *endpoint) holdfast(args ...string) error {
	out, err := exec.Command(e.program("holdfast"),
		append([]string{"--address", e.control()}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("holdfast %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// end ends the swaps, the endpoint and holdfast, which takes down what it has started.
func (e *endpoint) end() error {
	e.stop()
	e.swapping.Wait()
	err := e.failed
	if e.swaps < 3 {
		err = errors.Join(err, fmt.Errorf("%d swaps during csi-sanity", e.swaps))
	}
	for i := len(e.running) - 1; i >= 0; i-- {
		err = errors.Join(err, e.running[i].Process.Signal(syscall.SIGTERM))
		ended := e.running[i].Wait()
		if code := e.running[i].ProcessState.ExitCode(); code != 0 && code != 128+int(syscall.SIGTERM) {
			err = errors.Join(err, ended)
		}
	}
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, e.log())
	}
	return err
}

// within tries for a while.
func within(limit time.Duration, try func() error) error {
	for end := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		err := try()
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}
