package launch

import (
	"fmt"
	"os"
	"syscall"
)

// Exit is how a shim process ended. As an error it is registry.ErrUnavailable only if Start returns it.
type Exit struct {
	PID    int
	Code   int            // the exit code, if Signal is 0
	Signal syscall.Signal // the signal that killed it
	Asked  bool           // this host asked it to end or killed it, by Stop or Kill
	Cause  error          // why Code and Signal are unknown; nil: they are known
}

// newExit describes how a process ended. state is nil if waiting for the process failed with err.
func newExit(pid int, state *os.ProcessState, err error) *Exit {
	if state == nil {
		return &Exit{PID: pid, Cause: err}
	}
	e := &Exit{PID: pid}
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		e.Signal = status.Signal()
	} else {
		e.Code = state.ExitCode()
	}
	return e
}

// Outside reports whether a person or the kernel ended the process: it died of a signal that is sent to end processes,
// and not by this host. Such a death says nothing about the binary.
func (e *Exit) Outside() bool {
	switch e.Signal {
	case syscall.SIGKILL, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT:
		return !e.Asked
	}
	return false
}

func (e *Exit) Error() string {
	how := fmt.Sprintf("exited with code %d", e.Code)
	switch {
	case e.Cause != nil:
		how = fmt.Sprintf("ended in an unknown way (%v)", e.Cause)
	case e.Signal != 0:
		how = fmt.Sprintf("was killed by signal %d (%v)", int(e.Signal), e.Signal)
	}
	if e.Asked {
		how += ", as this host had asked"
	}
	return fmt.Sprintf("shim %d %s", e.PID, how)
}

func (e *Exit) Unwrap() error { return e.Cause }
