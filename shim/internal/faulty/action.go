package main

import (
	"fmt"
	"os"
	"os/exec"
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

// poll is how often what happens outside is looked at.
const poll = time.Millisecond

// do does one fault. The error is an answer, not a failure.
func (p *program) do(f fault.Fault, req any) error {
	switch f.Do {
	case "hang":
		for { // select {} would be found to be a deadlock where nothing else runs yet
			time.Sleep(time.Hour)
		}
	case "slow":
		time.Sleep(f.During)
	case "exit":
		os.Exit(3)
	case "panic":
		panic("a fault: panic")
	case "kill-self":
		signal(os.Getpid(), unix.SIGKILL)
		time.Sleep(time.Hour)
	case "freeze":
		freeze()
	case "error":
		return answer(f.With)
	case "kill-host":
		p.killHost()
	case "kill-other":
		p.killOther()
	case "touch":
		must(os.WriteFile(f.With, nil, 0o600))
	case "wait-for":
		for !exists(f.With) {
			time.Sleep(poll)
		}
	default:
		p.disturb(f, req)
	}
	return nil
}

// disturb does what concerns the start and the rehearsal.
func (p *program) disturb(f fault.Fault, req any) {
	number, _ := strconv.Atoi(f.With)
	switch f.Do {
	case "rubbish":
		_, err := handshake().WriteString("hello, world\n1|1|tcp|rubbish\n")
		must(err)
	case "noise":
		noise()
	case "fork":
		fork()
	case "arrivals":
		p.arrivals = f.With
	case "protocol":
		p.versions = []int{number}
	case "schema":
		must(setSchema(req.(*pb.RehearseRequest).GetCopy(), number))
	}
}

// must ends the process where the fault itself fails: a test would see a good shim.
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

// freeze stops the process. The signal is this thread's own, so that no further instruction of it is carried out; one
// to the process would be taken by any thread, some time.
func freeze() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	must(unix.Tgkill(os.Getpid(), unix.Gettid(), unix.SIGSTOP))
}

func signal(pid int, s unix.Signal) { must(unix.Kill(pid, s)) }

var kinds = map[string]error{
	"invalid": registry.ErrInvalid, "conflict": registry.ErrConflict, "unavailable": registry.ErrUnavailable,
	"fenced":    registry.ErrFenced,
	"exhausted": registry.ErrExhausted, "damaged": registry.ErrDamaged, "internal": registry.ErrInternal,
}

func answer(kind string) error {
	if kind == "" {
		return status.Error(codes.Internal, "a fault: error")
	}
	return wire.Status(registry.Errorf(kinds[kind], "a fault: error %s", kind))
}

// killHost kills the host, unless another process has its place by now.
func (p *program) killHost() {
	if p.host > 1 && os.Getppid() == p.host {
		signal(p.host, unix.SIGKILL)
	}
}

// killOther kills the host's other children that are executed from where this one is: the store of shims.
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
				killed(pid)
			}
		}
	}
}

// killed kills a process and returns when it is dead.
func killed(pid int) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // it is gone
	}
	defer unix.Close(fd)
	_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 10_000)
}

// handshake is what was standard output when this process began: package bootstrap has put it away. It is the only pipe
// of this process alone that can be written to.
func handshake() *os.File {
	fds, err := os.ReadDir("/proc/self/fd")
	must(err)
	for _, e := range fds {
		fd, _ := strconv.Atoi(e.Name())
		to, _ := os.Readlink("/proc/self/fd/" + e.Name())
		mode, _ := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		own, _ := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
		if strings.HasPrefix(to, "pipe:") && mode&unix.O_ACCMODE == unix.O_WRONLY && own&unix.FD_CLOEXEC != 0 {
			copied, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
			must(err)
			return os.NewFile(uintptr(copied), "handshake")
		}
	}
	must(fmt.Errorf("there is no pipe for the handshake"))
	return nil
}

func noise() {
	for _, line := range []string{`{"@message":5}`, `{"@level":7,"@message":"m"}`, "not \xff UTF-8 \x1b[31mred",
		strings.Repeat("x", 1<<20)} {
		_, err := fmt.Fprintln(os.Stderr, line)
		must(err)
	}
}

// fork leaves a child that has the handshake's pipe as its output. It ends with the process group.
func fork() {
	child := exec.Command("sleep", "3600")
	child.Stdout, child.Stderr = handshake(), os.Stderr
	must(child.Start())
}
