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
)

// process is one process of this boot: a pid alone may have been recycled.
type process struct {
	pid   int
	start uint64 // field 22 of /proc/pid/stat: clock ticks since boot
}

// stat is what /proc/pid/stat says that matters here.
type stat struct {
	process
	state   byte
	parent  int
	session int
}

// dead says whether only the entry of the process is left.
func (s stat) dead() bool { return s.state == 'Z' || s.state == 'X' }

func readStat(pid int) (stat, error) {
	b, err := readProc("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return stat{}, err
	}
	// The name, in parentheses, may hold anything.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 20 {
		return stat{}, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	s := stat{process: process{pid: pid}, state: fields[0][0]}
	s.parent, _ = strconv.Atoi(fields[1])
	s.session, _ = strconv.Atoi(fields[3])
	s.start, err = strconv.ParseUint(fields[19], 10, 64)
	return s, err
}

// readProc reads a short file of /proc in one go. A search reads one per process: os.ReadFile needs four times the calls.
func readProc(path string) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	b := make([]byte, 4096)
	n, err := unix.Read(fd, b)
	if err != nil {
		return nil, &os.PathError{Op: "read", Path: path, Err: err} // ESRCH: it ended in between
	}
	return b[:n], nil
}

// processes lists all of the machine that can be seen.
func processes() ([]stat, error) {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer proc.Close()
	names, err := proc.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	var all []stat
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if s, err := readStat(pid); err == nil {
			all = append(all, s)
		}
	}
	return all, nil
}

// descendants are the processes below a process, the dead ones too.
func descendants(of int) ([]stat, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	children := map[int][]stat{}
	for _, s := range all {
		children[s.parent] = append(children[s.parent], s)
	}
	var out []stat
	for queue := []int{of}; len(queue) > 0; queue = queue[1:] {
		for _, s := range children[queue[0]] {
			queue = append(queue, s.pid)
			out = append(out, s)
		}
	}
	return out, nil
}

// alive says whether p is there and not dead.
func (p process) alive() bool {
	s, err := readStat(p.pid)
	return err == nil && s.start == p.start && !s.dead()
}

// open gives a descriptor of the very process; none: it is gone.
func (p process) open() (*os.File, bool, error) {
	fd, err := unix.PidfdOpen(p.pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) || p.pid <= 0 {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("open process %d: %w", p.pid, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	if s, err := readStat(p.pid); err != nil || s.start != p.start {
		f.Close()
		return nil, false, nil
	}
	return f, true, nil
}

// signal sends to the very process; that it is gone is no error.
func (p process) signal(sig unix.Signal) error {
	f, found, err := p.open()
	if err != nil || !found {
		return err
	}
	defer f.Close()
	return sendTo(f, sig)
}

func sendTo(pidfd *os.File, sig unix.Signal) error {
	err := unix.PidfdSendSignal(int(pidfd.Fd()), sig, nil, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

// wait returns when p has ended, and reaps it if it is a child of ours.
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
	err = conn.Read(func(fd uintptr) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
	})
	if ctx.Err() != nil && p.alive() {
		return context.Cause(ctx)
	}
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("wait for process %d: %w", p.pid, err)
	}
	_, _ = unix.Wait4(p.pid, nil, unix.WNOHANG, nil) // ECHILD: it is somebody else's
	return nil
}

// left lists the living processes of a task, wherever they have gone: into its cgroups, its session, or away from both with the
// mark in their environment.
func (h Handle) left() ([]process, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	grouped := map[int]bool{}
	for _, dir := range h.Cgroups {
		for _, pid := range members(dir) {
			grouped[pid] = true
		}
	}
	session := h.sessionStands(all)
	var out []process
	for _, s := range all {
		if s.dead() || s.pid == os.Getpid() || s.pid == h.PID && s.start == h.StartTime {
			continue
		}
		if grouped[s.pid] || session && s.session == h.TaskPID || marked(s.pid, h.ID) {
			out = append(out, s.process)
		}
	}
	return out, nil
}

// sessionStands says whether the session of number TaskPID can only be the task's: the kernel does not recycle the number while
// the session has members, so that is so unless the leader is somebody else.
func (h Handle) sessionStands(all []stat) bool {
	for _, s := range all {
		if s.pid == h.TaskPID {
			return s.start == h.TaskStart
		}
	}
	return h.TaskPID > 0
}

// Parent is a process that runs a task, as the process table shows it.
type Parent struct {
	PID int
	ID  string // of the task
	Dir string // of the task; it may have been removed
}

// Parents lists the parents of tasks whose directories are, or were, below dir. A process that sees another directory at that path, in a
// mount namespace of its own, is none of them.
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
		if s.dead() {
			continue
		}
		b, err := os.ReadFile("/proc/" + strconv.Itoa(s.pid) + "/cmdline")
		args := strings.Split(string(b), "\x00") // a NUL ends each
		if err != nil || len(args) != 4 || args[0] != parentName || !strings.HasPrefix(args[2], dir+"/") {
			continue
		}
		if seen, err := os.Stat(filepath.Join("/proc", strconv.Itoa(s.pid), "root", dir)); err == nil && !os.SameFile(own, seen) {
			continue
		}
		out = append(out, Parent{s.pid, args[1], args[2]})
	}
	return out, nil
}

// marked says whether the process was started with the task's mark.
func marked(pid int, id string) bool {
	env, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/environ")
	return err == nil && bytes.Contains(append([]byte{0}, env...), []byte("\x00"+taskEnv+"="+id+"\x00"))
}
