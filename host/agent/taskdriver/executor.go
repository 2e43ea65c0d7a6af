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
	// Exec runs a program in the file system, the cgroup and the environment of a task, as its user. It returns the
	// exit code as a shell reports it. All that the program has started is killed when the program, the task or ctx
	// ends. A Wait for the task returns after that.
	Exec(ctx context.Context, h Handle, o ExecOptions) (code int, err error)
}

// ExecOptions say what Exec runs, and where its input comes from.
type ExecOptions struct {
	Command []string
	Term    string           // type of the terminal that the program gets; empty: it gets none
	Stdin   io.ReadCloser    // Exec closes it
	Stdout  io.Writer        // also the output of the terminal
	Stderr  io.Writer        // may be called at the same time as Stdout
	Events  <-chan ExecEvent // nil: none
}

// ExecEvent is a new size of the terminal or, without rows, a signal for the program.
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

// execRequest tells the helper process of a program what to run. Signals for the program follow it.
type execRequest struct {
	Handle  Handle   `json:"handle"`
	Command []string `json:"command"`
	Term    string   `json:"term,omitempty"`
}

// execReply is the end of the program, or the reason why it did not run.
type execReply struct {
	reply
	Code int `json:"code"`
}

// Exec has a helper process run the program, which kills all that is left of it when this process ends.
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
	var a execReply
	if err = messages.Encode(execRequest{h, o.Command, o.Term}); err == nil {
		wg.Go(func() { _, _ = io.Copy(stdin, o.Stdin); stdin.Close() })
		wg.Go(func() { o.forward(done, messages, terminal) })
		err = json.NewDecoder(replies).Decode(&a)
	}
	close(done)
	o.Stdin.Close()
	control.Close()
	rest := func() { wait(); wg.Wait() }
	if errors.Is(err, os.ErrDeadlineExceeded) {
		go rest() // as long as the kernel does not end the command
	} else {
		rest()
	}
	switch {
	case ctx.Err() != nil:
		return 0, context.Cause(ctx)
	case err != nil:
		return 0, fmt.Errorf("the helper process of the command was killed: %w", err)
	case a.Err != "":
		return 0, a.err()
	}
	return a.Code, nil
}

// killLimit is how long Exec waits for the end of a command once ctx has ended. A process that waits for a file system
// may not end when it is killed.
const killLimit = 2 * time.Second

// start starts the helper process, connected to a terminal or to pipes. wait waits for it and for the rest of its
// output.
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
	output.Go(func() { _, _ = io.Copy(o.Stdout, terminal) }) // EIO: no program has it open any more
	return terminalInput{terminal}, terminal, func() {
		_ = helper.Wait()
		output.Wait()
		terminal.Close()
	}, nil
}

// forward passes events on until done.
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

// openTerminal opens a pseudo terminal: the side of its user, and that of programs.
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
