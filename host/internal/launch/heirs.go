package launch

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// pipeEnd is an end of a pipe as /proc shows it: of both ends the name is the same, the mode is not.
type pipeEnd struct {
	name string
	mode fs.FileMode
}

func endsOf(files ...*os.File) (ends []pipeEnd) {
	for _, f := range files {
		ends = append(ends, endAt(fmt.Sprintf("/proc/self/fd/%d", f.Fd())))
	}
	return ends
}

// endAt is what a descriptor leads to. Nothing but the link is looked at: others' files may lie on a file system that hangs.
func endAt(fd string) (end pipeEnd) {
	end.name, _ = os.Readlink(fd)
	if info, err := os.Lstat(fd); err == nil {
		end.mode = info.Mode().Perm()
	}
	return end
}

// leave closes a pipe of the child that is read to its end, or for long enough: then the child is dead, and somebody else has it.
func (c *child) leave(pipe *os.File) {
	if held(pipe) {
		c.kept.Store(true)
	}
	_ = pipe.Close()
}

// held says whether anybody has the other end of our pipe. Of one that is closed already nobody knows.
func held(pipe *os.File) (is bool) {
	raw, err := pipe.SyscallConn()
	if err != nil {
		return false
	}
	_ = raw.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd)}}
		_, err := unix.Poll(poll, 0)
		is = err == nil && poll[0].Revents&(unix.POLLHUP|unix.POLLERR) == 0
	})
	return is
}

// endHeirs deals with what a dead shim has started and what did not end with it, as it has left its process group. Who has a pipe that only the
// shim was given is one of those. If it executes a stored binary, or has the state open, it is the shim's, or in the way of the next one, and is
// killed; of any other nobody knows whose it is by now, and it is told. Nobody waits for either.
func (p *Process) endHeirs() {
	c := p.runner.child
	if c == nil {
		return
	}
	if c.leave(c.life); !c.kept.Load() {
		return
	}
	for _, h := range c.heirs() {
		log := p.log.With("pid", h.pid, "is", h.name(), "of_shim", c.pid)
		if !p.store.executed(h.pid, p.database) && !hasOpen(h.pid, p.database) {
			log.Warn("a process that a shim has started, it seems, has outlived it: end it if nobody needs it")
		} else if err := unix.PidfdSendSignal(h.fd, unix.SIGKILL, nil, 0); err != nil {
			log.Error("a process that a shim has started has outlived it and cannot be killed: end it", "error", err)
		} else {
			log.Warn("a process that a shim has started has outlived it, and is killed")
		}
		_ = unix.Close(h.fd)
	}
}

// heir is a process that has a pipe of a dead shim.
type heir struct{ pid, fd int } // fd is its pidfd

func (h heir) name() string {
	name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", h.pid))
	return strings.TrimSpace(string(name))
}

// heirs are as many of them as this user may know of. The caller closes their descriptors.
func (c *child) heirs() (found []heir) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || !c.hasHeir(pid) {
			continue
		}
		if fd, is := pin(pid, func() bool { return c.hasHeir(pid) }); is {
			found = append(found, heir{pid, fd})
		}
	}
	return found
}

func (c *child) hasHeir(pid int) bool {
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	return slices.ContainsFunc(fds, func(fd string) bool { return slices.Contains(c.ends, endAt(fd)) })
}
