package taskdriver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/proc"
)

// process identifies a process of the current boot. The start time distinguishes it from a later process with the same
// pid.
type process struct {
	pid   int
	start uint64 // proc.Stat.Start
}

func processOf(s proc.Stat) process { return process{s.PID, s.Start} }

// processes lists all visible processes.
func processes() ([]proc.Stat, error) {
	pids, err := proc.PIDs()
	if err != nil {
		return nil, err
	}
	var all []proc.Stat
	for _, pid := range pids {
		if s, err := proc.ReadStat(pid); err == nil {
			all = append(all, s)
		}
	}
	return all, nil
}

// descendants lists the processes below pid, zombies included.
func descendants(pid int) ([]proc.Stat, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	children := map[int][]proc.Stat{}
	for _, s := range all {
		children[s.Parent] = append(children[s.Parent], s)
	}
	var out []proc.Stat
	for queue := []int{pid}; len(queue) > 0; queue = queue[1:] {
		for _, s := range children[queue[0]] {
			queue = append(queue, s.PID)
			out = append(out, s)
		}
	}
	return out, nil
}

func (p process) alive() bool {
	s, err := proc.ReadStat(p.pid)
	return err == nil && s.Start == p.start && !s.Exited()
}

// open returns a pidfd of p. found is false if p is gone.
func (p process) open() (pidfd *os.File, found bool, err error) {
	fd, err := unix.PidfdOpen(p.pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) || p.pid <= 0 {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("open process %d: %w", p.pid, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	if s, err := proc.ReadStat(p.pid); err != nil || s.Start != p.start {
		f.Close()
		return nil, false, nil
	}
	return f, true, nil
}

// signal sends sig to p. It returns nil if p is gone.
func (p process) signal(sig unix.Signal) error {
	f, found, err := p.open()
	if err != nil || !found {
		return err
	}
	defer f.Close()
	if err := unix.PidfdSendSignal(int(f.Fd()), sig, nil, 0); !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

// wait returns when p has exited, and reaps it if it is a child of this process.
func (p process) wait(ctx context.Context) error {
	f, found, err := p.open()
	if err != nil || !found {
		return err
	}
	defer f.Close()
	stop := context.AfterFunc(ctx, func() { _ = f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	err = conn.Read(func(fd uintptr) (exited bool) {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
	switch {
	case ctx.Err() != nil && p.alive():
		return context.Cause(ctx)
	case err != nil && ctx.Err() == nil:
		return fmt.Errorf("wait for process %d: %w", p.pid, err)
	}
	_, _ = unix.Wait4(p.pid, nil, unix.WNOHANG, nil) // ECHILD: p is not a child of this process
	return nil
}

// remaining lists the living processes of a task, except for its parent. These are the members of its cgroups and of
// its session, and processes outside of both that have the task's ID in their environment.
func (h Handle) remaining() ([]process, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	inCgroup := map[int]bool{}
	for _, dir := range h.Cgroups {
		for _, pid := range cgroupMembers(dir) {
			inCgroup[pid] = true
		}
	}
	ownsSession := h.ownsSession(all)
	var out []process
	for _, s := range all {
		if s.Exited() || s.PID == os.Getpid() || processOf(s) == h.parent() {
			continue
		}
		if inCgroup[s.PID] || ownsSession && s.Session == h.TaskPID || hasTaskID(s.PID, h.ID) {
			out = append(out, processOf(s))
		}
	}
	return out, nil
}

// ownsSession reports whether session TaskPID belongs to the task. The kernel does not reuse the number while the
// session has members. So the session is the task's, unless another process now leads it.
func (h Handle) ownsSession(all []proc.Stat) bool {
	for _, s := range all {
		if s.PID == h.TaskPID {
			return s.Start == h.TaskStart
		}
	}
	return h.TaskPID > 0
}

// execTimeout bounds the wait for a process in execve, which blocks while the disk of its program hangs.
const execTimeout = 10 * time.Second

// hasTaskID reports whether the process was started with the task's ID in its environment. The environment of a
// process in execve reads as empty, so it is read again until execve has set it.
func hasTaskID(pid int, id string) bool {
	variable := []byte("\x00" + taskEnv + "=" + id + "\x00")
	for limit := time.Now().Add(execTimeout); time.Now().Before(limit); time.Sleep(time.Millisecond) {
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil {
			return false
		}
		if len(env) > 0 {
			return bytes.Contains(append([]byte{0}, env...), variable)
		}
		if s, err := proc.ReadStat(pid); err != nil || s.NoEnviron {
			return false
		}
	}
	return false
}

// Parent is the parent process of a running task, as the process table shows it.
type Parent struct {
	PID int
	ID  string // of the task
	Dir string // of the task; may have been removed
}

// Parents lists the parent processes of tasks whose directories are or were below dir. It ignores a process in a mount
// namespace that has another directory at the path dir.
func Parents(dir string) ([]Parent, error) {
	own, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	all, err := processes()
	if err != nil {
		return nil, err
	}
	var out []Parent
	for _, s := range all {
		if s.Exited() {
			continue
		}
		entry := filepath.Join("/proc", strconv.Itoa(s.PID))
		b, err := os.ReadFile(filepath.Join(entry, "cmdline"))
		args := strings.Split(string(b), "\x00") // each argument ends with NUL
		if err != nil || len(args) != 4 || args[0] != parentName || !strings.HasPrefix(args[2], dir+"/") {
			continue
		}
		if seen, err := os.Stat(filepath.Join(entry, "root", dir)); err == nil && !os.SameFile(own, seen) {
			continue
		}
		out = append(out, Parent{s.PID, args[1], args[2]})
	}
	return out, nil
}
