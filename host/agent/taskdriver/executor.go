package taskdriver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// Executor is a Driver that runs further programs in a running task.
type Executor interface {
	// Exec runs a program in the file system, the cgroup and the environment of a task, as the task's user. It returns
	// the exit code as a shell reports it. When the program, the task or ctx ends, the program and all its descendants
	// are killed. A Wait for the task returns only after that.
	Exec(ctx context.Context, h Handle, o ExecOptions) (code int, err error)
}

// ExecOptions say which program Exec runs, and with which input and outputs.
type ExecOptions struct {
	Command []string
	Term    string           // type of the program's terminal; empty: it has none
	Stdin   io.ReadCloser    // Exec closes it
	Stdout  io.Writer        // also the output of the terminal
	Stderr  io.Writer        // may be used at the same time as Stdout
	Events  <-chan ExecEvent // nil: none
}

// ExecEvent is a new size of the terminal. Without rows it is a signal for the program.
type ExecEvent struct {
	Rows, Cols uint16
	Signal     syscall.Signal
}

func (o ExecOptions) validate() error {
	if len(o.Command) == 0 || o.Command[0] == "" {
		return registry.Invalid("no command")
	}
	return nil
}

// execRequest tells the helper process which program to run. Signals for the program follow it.
type execRequest struct {
	Handle  Handle   `json:"handle"`
	Command []string `json:"command"`
	Term    string   `json:"term,omitempty"`
}

// execReply reports the end of the program, or the reason why it did not run.
type execReply struct {
	reply
	Code int `json:"code"`
}

// Exec runs the program through a helper process. When this process ends, the helper process kills all that is left of
// the program.
func (r runner) Exec(ctx context.Context, h Handle, o ExecOptions) (code int, err error) {
	defer o.Stdin.Close()
	if err := o.validate(); err != nil {
		return 0, err
	}
	held, err := lockExec(h.Dir)
	if err != nil {
		return 0, err
	}
	defer held.Close()
	controlOut, control, err := os.Pipe()
	if err != nil {
		return 0, err
	}
	defer control.Close()
	replies, replyIn, err := os.Pipe()
	if err != nil {
		controlOut.Close()
		return 0, err
	}
	defer replies.Close()
	helper := helperCommand(parentBinary(), execName)
	helper.ExtraFiles = []*os.File{controlOut, replyIn, held}
	stdin, terminal, wait, err := o.start(helper)
	controlOut.Close()
	replyIn.Close()
	held.Close()
	if err != nil {
		return 0, fmt.Errorf("start the helper process of the command: %w", err)
	}
	stop := context.AfterFunc(ctx, func() {
		_ = control.Close()
		_ = replies.SetReadDeadline(time.Now().Add(killLimit))
	})
	defer stop()
	messages, done := json.NewEncoder(control), make(chan struct{})
	var wg sync.WaitGroup
	var answer execReply
	if err = messages.Encode(execRequest{h, o.Command, o.Term}); err == nil {
		wg.Go(func() { _, _ = io.Copy(stdin, o.Stdin); stdin.Close() })
		wg.Go(func() { o.forward(done, messages, terminal) })
		err = json.NewDecoder(replies).Decode(&answer)
	}
	close(done)
	o.Stdin.Close()
	control.Close()
	waitForEnd := func() { wait(); wg.Wait() }
	if errors.Is(err, os.ErrDeadlineExceeded) {
		go waitForEnd() // returns when the kernel has ended the command
	} else {
		waitForEnd()
	}
	switch {
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case err != nil:
		return 0, fmt.Errorf("the helper process of the command was killed: %w", err)
	case answer.Err != "":
		return 0, answer.err()
	}
	return answer.Code, nil
}

// killLimit is how long Exec waits for the end of a command after ctx has ended. A killed process that waits for a file
// system may not end.
const killLimit = 2 * time.Second

// start starts the helper process, connected to a terminal or to pipes. wait waits for the helper process and for the
// rest of its output.
func (o ExecOptions) start(helper *exec.Cmd) (stdin io.WriteCloser, terminal *os.File, wait func(), err error) {
	if o.Term == "" {
		helper.Stdout, helper.Stderr = o.Stdout, o.Stderr
		if stdin, err = helper.StdinPipe(); err == nil {
			err = helper.Start()
		}
		return stdin, nil, func() { _ = helper.Wait() }, err
	}
	terminal, programs, err := openTerminal()
	if err != nil {
		return nil, nil, nil, err
	}
	helper.Stdin, helper.Stdout, helper.Stderr = programs, programs, programs
	err = helper.Start()
	programs.Close()
	if err != nil {
		terminal.Close()
		return nil, nil, nil, err
	}
	var output sync.WaitGroup
	output.Go(func() { _, _ = io.Copy(o.Stdout, terminal) }) // EIO: no program has the terminal open any more
	return terminalInput{terminal}, terminal, func() {
		_ = helper.Wait()
		output.Wait()
		terminal.Close()
	}, nil
}

// forward passes events to the program until done is closed.
func (o ExecOptions) forward(done <-chan struct{}, signals *json.Encoder, terminal *os.File) {
	for {
		select {
		case e := <-o.Events:
			if e.Rows == 0 {
				_ = signals.Encode(e.Signal)
			} else if terminal != nil {
				_ = unix.IoctlSetWinsize(int(terminal.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: e.Rows, Col: e.Cols})
			}
		case <-done:
			return
		}
	}
}

const endOfInput = 4 // Ctrl-D, typed on a terminal

// terminalInput writes to a terminal. Its Close types endOfInput.
type terminalInput struct{ *os.File }

func (t terminalInput) Close() error {
	_, err := t.Write([]byte{endOfInput})
	return err
}

// openTerminal opens a pseudo terminal: the end for its user, and the end for programs.
func openTerminal() (user, programs *os.File, err error) {
	user, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	raw, err := user.SyscallConn()
	var n int
	if err == nil {
		var failed error
		err = raw.Control(func(fd uintptr) {
			failed = unix.IoctlSetPointerInt(int(fd), unix.TIOCSPTLCK, 0)
			if failed == nil {
				n, failed = unix.IoctlGetInt(int(fd), unix.TIOCGPTN)
			}
		})
		err = errors.Join(err, failed)
	}
	if err == nil {
		programs, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		user.Close()
		return nil, nil, fmt.Errorf("open a terminal: %w", err)
	}
	return user, programs, nil
}

var (
	_ Executor = Exec{}
	_ Executor = RawExec{}
)
