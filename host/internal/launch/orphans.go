package launch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	hclog "github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"holdfast/internal/proc"
	"holdfast/registry"
)

const (
	// orphanGrace is the time for a healthy shim to notice that its host is dead, to commit and to end. That takes less
	// than a second.
	orphanGrace = 2 * time.Second
	orphanPoll  = 5 * time.Millisecond
)

// orphan is a shim that a dead host has left.
type orphan struct {
	pid, fd int // fd is its pidfd
	killed  bool
}

// EndOrphans returns once all shims of an earlier host that were executed from this store are dead. A new host calls it
// before it starts a shim. It kills a stopped orphan at once, and any other after a grace period, as shims normally end
// with their host.
//
// database is the file that an active shim has locked. ErrUnavailable: an orphan that has it locked does not die of
// SIGKILL within 10 s. ErrDenied: this user may not kill an orphan. Other orphans that do not die are logged.
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
		denied := unreadable(proc.FlockHolders(database))
		alive := slices.ContainsFunc(found, orphan.alive)
		switch over := time.Now().After(grace); {
		case !alive && len(denied) == 0:
			return nil
		case over && len(denied) > 0:
			return cannotEnd(denied[0], unix.EACCES)
		case time.Now().After(grace.Add(killTime)):
			return reportUnkillable(found, proc.FlockHolders(database), log)
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

// reportUnkillable logs the orphans that live. It is an error if one of them has the state locked.
func reportUnkillable(found []orphan, holders []int, log hclog.Logger) error {
	for _, o := range found {
		switch {
		case !o.alive():
		case slices.Contains(holders, o.pid):
			return registry.Errorf(registry.ErrUnavailable,
				"shim %d of an earlier host has the state, and has not died of SIGKILL (%s): "+
					"it hangs in the kernel; bring back the disk or the server that it waits for, or reboot the node, "+
					"and start the host again", o.pid, proc.Sleeping(o.pid))
		default:
			log.Error("a shim of an earlier host does not die", "pid", o.pid, "is", proc.Sleeping(o.pid))
		}
	}
	return nil
}

// killOrphans kills the stopped orphans, or all orphans if their grace is over.
func killOrphans(found []orphan, over bool, log hclog.Logger) error {
	for i := range found {
		o := &found[i]
		st, _ := proc.ReadStat(o.pid)
		stopped := st.State == 'T'
		if o.killed || !o.alive() || !stopped && !over {
			continue
		}
		err := unix.PidfdSendSignal(o.fd, unix.SIGKILL, nil, 0)
		if errors.Is(err, unix.EPERM) {
			return cannotEnd(o.pid, err)
		}
		if o.killed = true; err == nil {
			log.Warn("a shim of an earlier host had not ended with it, and is killed", "pid", o.pid, "stopped", stopped)
		}
	}
	return nil
}

// alive asks the pidfd whether the process lives, because another process may have the pid by then.
func (o orphan) alive() bool {
	poll := []unix.PollFd{{Fd: int32(o.fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(poll, 0)
		if !errors.Is(err, unix.EINTR) {
			return n == 0
		}
	}
}

func cannotEnd(pid int, why error) error {
	return registry.Errorf(registry.ErrDenied,
		"process %d, a shim of an earlier host it seems, has the state, and this user may not "+
			"end it (%w): end it as root (kill -9 %d), and start the host again", pid, why, pid)
}

// orphans returns the shims that are executed from the store, and the processes that such shims have left. The caller
// closes their descriptors.
func (s *Store) orphans(database string) (found []orphan, err error) {
	pids, err := proc.PIDs()
	if err != nil {
		return nil, err
	}
	for _, pid := range pids {
		if programOf(pid) == "" && !exiting(pid, database) {
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // it is dead
		}
		// Anything that is read after the pidfd was opened is about this process, unless it is dead.
		if s.isOrphan(pid, database) {
			found = append(found, orphan{pid: pid, fd: fd})
		} else {
			_ = unix.Close(fd)
		}
	}
	return found, nil
}

// isOrphan reports whether a process is a shim of this store, or was left by one. A shim leads a session without a
// terminal. Its helpers and a stored binary that a person executes do not. A process that a shim has left has outlived
// its session leader.
func (s *Store) isOrphan(pid int, database string) bool {
	st, err := proc.ReadStat(pid)
	leads := err == nil && st.TTY == 0 && (st.Session == pid || errors.Is(unix.Kill(st.Session, 0), unix.ESRCH))
	return leads && (s.executes(pid, database) || exiting(pid, database))
}

// executes reports whether a process executes a file of this store. It compares the file itself: the path may be of
// another mount namespace, or another store. If the file is gone, it reports whether the process has the database open.
func (s *Store) executes(pid int, database string) bool {
	sum := programOf(pid)
	runs, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	if sum == "" || err != nil {
		return false
	}
	if stored, err := os.Stat(s.path(sum)); err == nil && os.SameFile(runs, stored) {
		return true
	}
	return proc.Opens(pid, database)
}

// programOf returns the digest after which a process's program is named, or "". It follows no link: the programs of
// other processes may lie on a file system that hangs.
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

// exiting reports whether a process has our database locked though its main thread has ended: another thread hangs in
// the kernel. Its program cannot be read any more.
func exiting(pid int, database string) bool {
	st, err := proc.ReadStat(pid)
	return err == nil && st.State == 'Z' && slices.Contains(proc.FlockHolders(database), pid)
}

// unreadable returns the processes whose program this user may not read.
func unreadable(pids []int) []int {
	return slices.DeleteFunc(pids, func(pid int) bool {
		_, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		return !errors.Is(err, fs.ErrPermission)
	})
}
