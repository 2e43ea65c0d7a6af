package mount

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// aide is a helper process with its standard input and output. Whoever started it ends it.
type aide struct {
	pid   int
	pidfd int
	in    *os.File
	out   *os.File
	at    map[int]string // what each of its threads is at
}

// grace is how long the end of a killed process is waited for.
const grace = 100 * time.Millisecond

// start runs the command without our environment, which may hold secrets, and without any file of ours.
func start(command []string, until time.Time) (*aide, error) {
	if len(command) == 0 {
		return nil, errors.New("there is no command for it")
	}
	stdin, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer stdin.Close()
	out, stdout, err := os.Pipe()
	if err != nil {
		in.Close()
		return nil, err
	}
	defer stdout.Close()
	a := &aide{in: in, out: out, at: map[int]string{}}
	a.pid, _, err = syscall.StartProcess(command[0], command, &syscall.ProcAttr{
		Dir: "/", Files: []uintptr{stdin.Fd(), stdout.Fd(), stdout.Fd()}, Sys: &syscall.SysProcAttr{PidFD: &a.pidfd},
	})
	if err != nil {
		a.close()
		return nil, fmt.Errorf("start the helper %q: %w", command, err)
	}
	return a, errors.Join(in.SetDeadline(until), out.SetDeadline(until))
}

// interrupt ends what waits for the helper.
func (a *aide) interrupt() {
	past := time.Unix(0, 1)
	_ = a.in.SetDeadline(past)
	_ = a.out.SetDeadline(past)
}

func (a *aide) close() {
	a.in.Close()
	a.out.Close()
}

// ask gives take each line of the answer, and returns the last.
func (a *aide) ask(q question, take func(answer)) (last answer, err error) {
	if err := json.NewEncoder(a.in).Encode(q); err != nil {
		said, _ := io.ReadAll(io.LimitReader(a.out, 1000))
		return last, failed(err, string(said))
	}
	for lines := bufio.NewReader(a.out); ; {
		text, err := lines.ReadString('\n')
		if err != nil {
			return last, failed(err, text)
		}
		var line answer
		if err := json.Unmarshal([]byte(text), &line); err != nil {
			rest, _ := io.ReadAll(io.LimitReader(lines, 1000))
			return last, failed(io.ErrUnexpectedEOF, text+string(rest))
		}
		if line.Done {
			return line, line.err()
		}
		take(line)
	}
}

// failed explains that there is no answer.
func failed(err error, said string) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return ErrHung
	}
	return fmt.Errorf("the helper ended without an answer (%w); it said: %s", err, printable(strings.TrimSpace(said)))
}

// dies kills the helper and says whether it has ended. It is not waited for longer than that: it may hang in the kernel.
func (a *aide) dies() bool {
	_ = unix.Kill(a.pid, unix.SIGKILL) // it is ours until it is reaped
	for end := time.Now().Add(grace); time.Now().Before(end); {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(a.pidfd), Events: unix.POLLIN}}, int(time.Until(end).Milliseconds())+1)
		if n == 1 || err != nil && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	return a.reaped()
}

// reaped says whether it has ended, and then lets it go.
func (a *aide) reaped() bool {
	pid, err := unix.Wait4(a.pid, nil, unix.WNOHANG, nil)
	if pid == 0 || errors.Is(err, unix.EINTR) {
		return false
	}
	unix.Close(a.pidfd)
	return true
}

// hangs says whether a thread of it is still at what was asked.
func (a *aide) hangs(what string) bool {
	for tid, at := range a.at {
		if at != what {
			continue
		}
		if _, err := os.Lstat("/proc/" + strconv.Itoa(a.pid) + "/task/" + strconv.Itoa(tid)); err == nil {
			return true
		}
	}
	return false
}
