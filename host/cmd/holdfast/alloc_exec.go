package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"holdfast/host/agent/control"
	"holdfast/host/agent/taskdriver"
	"holdfast/internal/display"
)

// commandExit is the exit code of a command in a task. The command itself has printed what was wrong.
type commandExit int

func (e commandExit) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

func newAllocExec(p *program) *cobra.Command {
	stdin, terminal := true, isTerminal(os.Stdin) && isTerminal(os.Stdout)
	c := &cobra.Command{
		Use: "exec ID [TASK] -- COMMAND...", Short: "Run a command in a running task",
		Long: `Run a command in the file system and the environment of a running task, as its
user. TASK may be omitted if the alloc has one task. The exit code is that of
the command, or 128 plus the number of the signal that ended it.

SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1 and SIGUSR2 are passed on. The
command, and all that it has started, is killed when this program or the task
ends. In a container, the command continues if the agent is killed.`,
		Args: func(c *cobra.Command, args []string) error {
			if n := c.ArgsLenAtDash(); n < 1 || n > 2 || n == len(args) {
				return usageError{fmt.Errorf("name an alloc, and a command after --; usage: %s", c.UseLine())}
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			client, n := p.client(), c.ArgsLenAtDash()
			id, task := args[0], strings.Join(args[1:n], "")
			if n == 1 {
				var err error
				if id, task, err = onlyTask(c, client, id); err != nil {
					return err
				}
			}
			return p.runInTask(c, client, id, task, args[n:], stdin, terminal)
		},
	}
	c.Flags().BoolVarP(&stdin, "stdin", "i", true, "pass standard input on")
	c.Flags().BoolVarP(&terminal, "tty", "t", terminal, "give the command a terminal (default if this program has one)")
	c.Flags().Lookup("tty").DefValue = "false" // the man page must be the same wherever it is made
	return c
}

// signalLimit is how long a signal may wait until the agent accepts it. After that, the signal ends this program.
const signalLimit = 5 * time.Second

// runInTask runs a command in a task, with the streams, the signals and the terminal of this program.
func (p *program) runInTask(c *cobra.Command, client *control.Client, id, task string, command []string,
	stdin, terminal bool) error {
	received := make(chan os.Signal, 8)
	signal.Notify(received, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2,
		unix.SIGWINCH)
	defer signal.Stop(received)
	events, done := make(chan taskdriver.ExecEvent), make(chan struct{})
	defer close(done)
	o := taskdriver.ExecOptions{Command: command, Stdin: os.Stdin, Events: events,
		Stdout: display.Exact(p.out), Stderr: display.Exact(p.errs)}
	if !stdin {
		empty, err := os.Open(os.DevNull)
		if err != nil {
			return err
		}
		defer empty.Close()
		o.Stdin = empty
	}
	if terminal {
		o.Term, o.Stdout = cmp.Or(os.Getenv("TERM"), "xterm"), os.Stdout // the terminal gets the output unescaped
		restore, err := rawTerminal(os.Stdin)
		if err != nil {
			return err
		}
		defer restore()
		received <- unix.SIGWINCH // send the initial size
	}
	ctx, cancel := context.WithCancelCause(c.Context())
	defer cancel(nil)
	go func() {
		for {
			select {
			case s := <-received:
				if e, wanted := execEvent(s.(syscall.Signal), terminal); wanted {
					select {
					case events <- e:
					case <-time.After(signalLimit):
						if s != unix.SIGWINCH {
							cancel(interrupted{by: s})
						}
					case <-done:
					}
				}
			case <-done:
				return
			}
		}
	}()
	code, err := client.Exec(ctx, id, task, o)
	if err == nil && code != 0 {
		err = commandExit(code)
	}
	return err
}

// execEvent converts a signal of this program to an event for the command. wanted reports whether there is one.
func execEvent(s syscall.Signal, terminal bool) (e taskdriver.ExecEvent, wanted bool) {
	if s != unix.SIGWINCH {
		return taskdriver.ExecEvent{Signal: s}, true
	}
	size, err := unix.IoctlGetWinsize(int(os.Stdin.Fd()), unix.TIOCGWINSZ)
	if !terminal || err != nil || size.Row == 0 {
		return e, false
	}
	return taskdriver.ExecEvent{Rows: size.Row, Cols: size.Col}, true
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// rawTerminal makes a terminal pass on each key as it is typed (cfmakeraw in termios(3)), until restore is called. If f
// is not a terminal, it changes nothing.
func rawTerminal(f *os.File) (restore func(), err error) {
	fd := int(f.Fd())
	before, err := unix.IoctlGetTermios(fd, unix.TCGETS)
	if err != nil {
		return func() {}, nil
	}
	raw := *before
	raw.Iflag &^= unix.IGNBRK | unix.BRKINT | unix.PARMRK | unix.ISTRIP
	raw.Iflag &^= unix.INLCR | unix.IGNCR | unix.ICRNL | unix.IXON
	raw.Oflag &^= unix.OPOST
	raw.Lflag &^= unix.ECHO | unix.ECHONL | unix.ICANON | unix.ISIG | unix.IEXTEN
	raw.Cflag = raw.Cflag&^(unix.CSIZE|unix.PARENB) | unix.CS8
	raw.Cc[unix.VMIN], raw.Cc[unix.VTIME] = 1, 0
	if err := unix.IoctlSetTermios(fd, unix.TCSETS, &raw); err != nil {
		return nil, fmt.Errorf("set the terminal: %w", err)
	}
	return func() { _ = unix.IoctlSetTermios(fd, unix.TCSETS, before) }, nil
}
