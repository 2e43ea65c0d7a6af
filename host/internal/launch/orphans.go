package launch

import (
	"context"
	"errors"
	"fmt"
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

// EndOrphans returns once no shim of an earlier host has the state. It finds such a shim by the shim's lock on the
// database. A new host calls EndOrphans before it starts a shim. Shims normally end with their host. EndOrphans kills a
// stopped shim at once, and any other after a grace period.
//
// ErrUnavailable: a shim still has the state 12 s after the call. ErrDenied: this user may not kill it.
func EndOrphans(ctx context.Context, database string, log hclog.Logger) error {
	graceOver, giveUp := time.Now().Add(orphanGrace), time.Now().Add(orphanGrace+killTime)
	killed := map[int]bool{}
	for {
		pid, found := findOrphan(database)
		if !found {
			return nil
		}
		st, _ := proc.ReadStat(pid)
		switch {
		case time.Now().After(giveUp):
			return registry.Errorf(registry.ErrUnavailable,
				"shim %d of an earlier host has the state, and has not died of SIGKILL (%s): "+
					"it hangs in the kernel; bring back the disk or the server that it waits for, or reboot the node, "+
					"and start the host again", pid, proc.Sleeping(pid))
		case !killed[pid] && (st.State == 'T' || time.Now().After(graceOver)):
			if err := killOrphan(pid, database); err != nil {
				return err
			}
			killed[pid] = true
			log.Warn("a shim of an earlier host had not ended with it, and is killed", "pid", pid, "state",
				string(st.State))
		}
		select {
		case <-time.After(orphanPoll):
		case <-ctx.Done():
			return fmt.Errorf("wait for shims of an earlier host to end: %w", context.Cause(ctx))
		}
	}
}

// findOrphan returns a shim that has the database locked. It leaves out processes that have inherited the lock from a
// dead shim: the next shim reports them.
func findOrphan(database string) (pid int, found bool) {
	for _, pid := range proc.FlockHolders(database) {
		if st, err := proc.ReadStat(pid); err == nil && st.Comm == argv0 && !exited(pid) {
			return pid, true
		}
	}
	return 0, false
}

// exited reports whether all threads of a process have ended. A process whose main thread has ended is a zombie in its
// stat, although another thread may hang in the kernel.
func exited(pid int) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(fd)
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, _ := unix.Poll(poll, 0)
	return n > 0
}

// killOrphan sends SIGKILL to a shim that has the database locked. It checks the lock again once it has a descriptor of
// the process, so that the signal cannot reach another process with the same pid. It reports only ErrDenied: after any
// other failure EndOrphans still finds the shim, and gives up in the end.
func killOrphan(pid int, database string) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil // it is dead
	}
	defer unix.Close(fd)
	if now, found := findOrphan(database); !found || now != pid {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); errors.Is(err, unix.EPERM) {
		return registry.Errorf(registry.ErrDenied,
			"shim %d of an earlier host has the state, and this user may not end it (%w): "+
				"end it as root (kill -9 %d), and start the host again", pid, err, pid)
	}
	return nil
}
