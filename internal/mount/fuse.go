package mount

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/proc"
)

// IsFUSE reports whether a process serves the file system, so that it is dead once that process ends.
func (m Mount) IsFUSE() bool {
	return m.FSType == "fuse" || m.FSType == "fuseblk" || strings.HasPrefix(m.FSType, "fuse.")
}

// FUSE reports whether a FUSE file system is mounted at path.
func FUSE(path string) bool {
	m, found, err := At(path)
	return err == nil && found && m.IsFUSE()
}

// ServesFUSE reports whether a process of the task that listens at a unix socket has /dev/fuse open. It reports true if
// that cannot be known. A process belongs to the task if it is in the mount namespace of the listener, in its cgroup or
// one below, or descends from it. So where tasks share both with their host, any process with /dev/fuse counts.
func ServesFUSE(socket string) bool {
	listener, err := listenerOf(socket)
	if err != nil {
		return true
	}
	pids, err := proc.PIDs()
	if err != nil {
		return true
	}
	task := newTaskOf(listener)
	for _, pid := range pids {
		if task.has(pid) && opensFUSE(pid) {
			return true
		}
	}
	return false
}

// listenerTimeout bounds the wait for a listener whose queue of connections is full.
const listenerTimeout = time.Second

// listenerOf returns the process that listens at a socket (SO_PEERCRED: the one that called listen).
func listenerOf(socket string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	limit := unix.NsecToTimeval(listenerTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &limit); err != nil {
		return 0, err
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
		return 0, err
	}
	peer, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err == nil && peer.Pid <= 0 {
		err = unix.ESRCH // in another pid namespace
	}
	if err != nil {
		return 0, err
	}
	return int(peer.Pid), nil
}

// taskOf describes the task of one process.
type taskOf struct {
	pid           int
	space, cgroup string
}

func newTaskOf(pid int) taskOf { return taskOf{pid, spaceOf(pid), cgroupOf(pid)} }

// has reports whether a process belongs to the task. It reports true if that cannot be known.
func (t taskOf) has(pid int) bool {
	space, cgroup := spaceOf(pid), cgroupOf(pid)
	if space == "" || t.space == "" || space == t.space || t.holds(cgroup) {
		return true
	}
	for range maxAncestors {
		if pid == t.pid {
			return true
		}
		s, err := proc.ReadStat(pid)
		if err != nil || s.Parent <= 1 {
			return false
		}
		pid = s.Parent
	}
	return true
}

// holds reports whether a /proc/PID/cgroup names the task's cgroup, or one below it (cgroup v2). What is below the root
// does not count.
func (t taskOf) holds(cgroup string) bool {
	own := strings.TrimSpace(t.cgroup)
	return cgroup == t.cgroup || own != "0::/" && strings.HasPrefix(cgroup, own+"/")
}

// maxAncestors bounds the search for an ancestor, because processes come and go meanwhile.
const maxAncestors = 1000

func spaceOf(pid int) string {
	to, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	return to
}

func cgroupOf(pid int) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return string(text)
}

// opensFUSE reports whether a process has /dev/fuse open (character device 10:229). It reports true for a living
// process whose files this one may not list.
func opensFUSE(pid int) bool {
	if _, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid)); os.IsPermission(err) {
		return true
	}
	for _, fd := range proc.FDs(pid) {
		if filepath.Base(strings.TrimSuffix(fd.Path, " (deleted)")) != "fuse" { // else it may hang to examine it
			continue
		}
		var st unix.Stat_t
		if unix.Stat(fd.Entry, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == unix.Mkdev(10, 229) {
			return true
		}
	}
	return false
}
