package launch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	hclog "github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"holdfast/registry"
)

const (
	// orphanGrace is for a shim that is well to notice that its host is dead, to write its last commit and to end: it does within a second.
	orphanGrace = 2 * time.Second
	orphanPoll  = 5 * time.Millisecond
)

// orphan is a shim that a dead host has left.
type orphan struct {
	pid, fd int // fd is its pidfd
	killed  bool
}

// EndOrphans returns when no shim lives any more that was executed from this store: those of an earlier host, which is dead, as its successor
// calls this, before it starts one itself. A shim ends with its host; one that is stopped cannot, and is killed at once; one that does not is
// killed after a grace. One that does not die of that, within 10 s, is logged, and kept out of the state by the lock on database, which is the
// file that an active shim has locked. One that has it locked is an error: ErrUnavailable if it does not die, ErrDenied if it may not be killed.
func (s *Store) EndOrphans(ctx context.Context, database string, log hclog.Logger) error {
	found, err := s.orphans(database)
	defer func() {
		for _, o := range found {
			_ = unix.Close(o.fd)
		}
	}()
	if err != nil {
		return fmt.Errorf("look for shims of an earlier host: %w", err)
	}
	grace := time.Now().Add(orphanGrace)
	for {
		denied := unreadable(holders(database))
		lives := slices.ContainsFunc(found, orphan.lives)
		switch over := time.Now().After(grace); {
		case !lives && len(denied) == 0:
			return nil
		case over && len(denied) > 0:
			return mayNotEnd(denied[0], unix.EACCES)
		case time.Now().After(grace.Add(killTime)):
			return tellUndying(found, holders(database), log)
		default:
			if err := killOrphans(found, over, log); err != nil {
				return err
			}
		}
		select {
		case <-time.After(orphanPoll):
		case <-ctx.Done():
			return fmt.Errorf("wait for shims of an earlier host to end: %w", context.Cause(ctx))
		}
	}
}

// tellUndying logs those that live. It is an error if one of them has the state.
func tellUndying(found []orphan, holders []int, log hclog.Logger) error {
	for _, o := range found {
		switch {
		case !o.lives():
		case slices.Contains(holders, o.pid):
			return registry.Errorf(registry.ErrUnavailable, "shim %d of an earlier host has the state, and has not died of SIGKILL (%s): it hangs in the "+
				"kernel; bring back the disk or the server that it waits for, or restart the machine, and start the host again", o.pid, procState(o.pid))
		default:
			log.Error("a shim of an earlier host does not die", "pid", o.pid, "is", procState(o.pid))
		}
	}
	return nil
}

// killOrphans kills those that are stopped, or all if their grace is over.
func killOrphans(found []orphan, over bool, log hclog.Logger) error {
	for i := range found {
		o := &found[i]
		stopped := processOf(o.pid).state == "T"
		if o.killed || !o.lives() || !stopped && !over {
			continue
		}
		err := unix.PidfdSendSignal(o.fd, unix.SIGKILL, nil, 0)
		if errors.Is(err, unix.EPERM) {
			return mayNotEnd(o.pid, err)
		}
		if o.killed = true; err == nil {
			log.Warn("a shim of an earlier host had not ended with it, and is killed", "pid", o.pid, "stopped", stopped)
		}
	}
	return nil
}

// lives is false from the real end on. A number that is another's by now is not asked about.
func (o orphan) lives() bool {
	poll := []unix.PollFd{{Fd: int32(o.fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(poll, 0)
		if !errors.Is(err, unix.EINTR) {
			return n == 0
		}
	}
}

func mayNotEnd(pid int, why error) error {
	return registry.Errorf(registry.ErrDenied, "process %d, a shim of an earlier host it seems, has the state, and this user may not end it (%w): "+
		"end it as root (kill -9 %d), and start the host again", pid, why, pid)
}

// orphans are the shims that are executed from the store, and what such a shim has left to run on by itself. The caller closes their descriptors.
func (s *Store) orphans(database string) (found []orphan, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || programOf(pid) == "" && !processOf(pid).dying(pid, database) {
			continue
		}
		fd, is := pin(pid, func() bool {
			p := processOf(pid)
			return p.terminal == 0 && (p.session == pid || !exists(p.session)) && (s.executed(pid, database) || p.dying(pid, database))
		})
		if is {
			found = append(found, orphan{pid: pid, fd: fd})
		}
	}
	return found, nil
}

// pin opens the pidfd of a process of which is then holds: what is found out of the number once it is open is of this process, or it is dead.
func pin(pid int, is func() bool) (fd int, ok bool) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return -1, false
	}
	if !is() {
		_ = unix.Close(fd)
		return -1, false
	}
	return fd, true
}

// executed says whether the process is executed from a file of this store, by the file itself: the path may be one of another mount namespace, and
// another store's. The file may be gone, though; a process that has our database open as well is ours, too.
func (s *Store) executed(pid int, database string) bool {
	sum := programOf(pid)
	runs, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	if sum == "" || err != nil {
		return false
	}
	if stored, err := os.Stat(s.path(sum)); err == nil && os.SameFile(runs, stored) {
		return true
	}
	return hasOpen(pid, database)
}

// programOf is the digest by which a process's program is stored; empty: it is named otherwise. Of others nothing is looked at: they may lie on
// a file system that hangs.
func programOf(pid int) string {
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return ""
	}
	name := filepath.Base(strings.TrimSuffix(path, " (deleted)"))
	if sum, err := parseSum(name); err != nil || sum != name {
		return ""
	}
	return name
}

func hasOpen(pid int, file string) bool {
	want, err := os.Stat(file)
	if err != nil {
		return false
	}
	fds, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	return slices.ContainsFunc(fds, func(fd string) bool {
		to, err := os.Readlink(fd)
		if err != nil || filepath.Base(to) != filepath.Base(file) {
			return false
		}
		open, err := os.Stat(fd)
		return err == nil && os.SameFile(want, open)
	})
}

// holders are the processes that have the file locked, as far as the kernel tells.
func holders(file string) (pids []int) {
	var st unix.Stat_t
	if unix.Stat(file, &st) != nil {
		return nil
	}
	id := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	table, _ := os.ReadFile("/proc/locks")
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line) // 1: FLOCK ADVISORY WRITE 4711 fe:00:12345 0 EOF
		if len(f) < 6 || f[1] != "FLOCK" || f[5] != id {
			continue
		}
		if pid, err := strconv.Atoi(f[4]); err == nil && pid > 0 {
			pids = append(pids, pid)
		}
	}
	return pids
}

// dying says whether the process has our database locked although its first thread has ended: another one hangs in the kernel. Of which program it
// was is not to be seen any more.
func (p process) dying(pid int, database string) bool {
	return p.state == "Z" && slices.Contains(holders(database), pid)
}

// unreadable are those of which this user may not know what they are.
func unreadable(pids []int) []int {
	return slices.DeleteFunc(pids, func(pid int) bool {
		_, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		return !errors.Is(err, fs.ErrPermission)
	})
}

func exists(pid int) bool { return !errors.Is(unix.Kill(pid, 0), unix.ESRCH) }

// process is what /proc/<pid>/stat says. A shim leads a session without a terminal; neither its helpers do, nor a person who executes a stored
// binary by hand. What a shim has left behind has outlived whoever led its session.
type process struct {
	state             string // one letter
	session, terminal int
}

func processOf(pid int) process {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return process{}
	}
	f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:])) // state, parent, group, session, terminal
	if len(f) < 5 {
		return process{}
	}
	p := process{state: f[0]}
	p.session, _ = strconv.Atoi(f[3])
	p.terminal, _ = strconv.Atoi(f[4])
	return p
}
