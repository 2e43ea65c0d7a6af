package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/fault"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// poll is the time between two looks for a file.
const poll = time.Millisecond

// do executes one fault. The error is the answer to the call.
func (p *program) do(f fault.Fault, req any) error {
	switch f.Do {
	case "hang":
		for { // with select {}, Go would report a deadlock if no other goroutine runs yet
			time.Sleep(time.Hour)
		}
	case "exit":
		os.Exit(3)
	case "panic":
		panic("a fault: panic")
	case "kill-self":
		killSelf()
	case "freeze":
		freeze()
	case "error":
		return answer(f.With)
	case "kill-host":
		p.killHost()
	case "kill-other":
		p.killOther()
	case "kill-at":
		killAt(f, req.(registry.Change))
	case "touch":
		must(os.WriteFile(f.With, nil, 0o600))
	case "wait-for":
		for !exists(f.With) {
			time.Sleep(poll)
		}
	case "schema":
		number, _ := strconv.Atoi(f.With)
		must(setSchema(req.(*pb.RehearseRequest).GetCopy(), number))
	}
	return nil
}

// must ends the process if a fault cannot be executed. Otherwise a test would run with a good shim.
func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "faulty: the fault has failed:", err)
		os.Exit(4)
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// freeze stops the process. It sends the signal to this thread, which therefore executes no further instruction. If it
// were sent to the process, any thread could take it, at any time.
func freeze() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	must(unix.Tgkill(os.Getpid(), unix.Gettid(), unix.SIGSTOP))
}

// killSelf kills this process, and does not return.
func killSelf() {
	must(unix.Kill(os.Getpid(), unix.SIGKILL))
	time.Sleep(time.Hour)
}

var kinds = map[string]error{
	"invalid": registry.ErrInvalid, "conflict": registry.ErrConflict, "unavailable": registry.ErrUnavailable,
	"fenced": registry.ErrFenced, "exhausted": registry.ErrExhausted, "damaged": registry.ErrDamaged,
	"internal": registry.ErrInternal,
}

// answer returns the error with which a call is answered. kind is a key of kinds, or empty.
func answer(kind string) error {
	if kind == "" {
		return status.Error(codes.Internal, "a fault: error")
	}
	return wire.Status(registry.Errorf(kinds[kind], "a fault: error %s", kind))
}

// killHost kills the host, unless it has exited.
func (p *program) killHost() {
	if p.host > 1 && os.Getppid() == p.host {
		must(unix.Kill(p.host, unix.SIGKILL))
	}
}

// killOther kills the host's other shims: children whose executables are in the directory of this one.
func (p *program) killOther() {
	own, err := os.Readlink("/proc/self/exe")
	must(err)
	children, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", p.host))
	must(err)
	for _, file := range children {
		text, _ := os.ReadFile(file)
		for field := range strings.FieldsSeq(string(text)) {
			pid, _ := strconv.Atoi(field)
			program, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
			if pid != os.Getpid() && filepath.Dir(program) == filepath.Dir(own) {
				kill(pid)
			}
		}
	}
}

// kill kills a process, and waits for its death for at most 10 seconds.
func kill(pid int) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // it is gone
	}
	defer unix.Close(fd)
	_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10_000)
}
