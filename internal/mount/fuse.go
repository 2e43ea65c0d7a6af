package mount

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/proc"
)

func (m Mount) isFUSE() bool {
	return m.FSType == "fuse" || m.FSType == "fuseblk" || strings.HasPrefix(m.FSType, "fuse.")
}

// Serves reports whether a process of the task that listens at a unix socket serves mounts: it has /dev/fuse, an nbd or
// a ublk device open, or has connected an nbd device. If that cannot be found out, Serves reports true. A process
// belongs to the task if it is in the mount namespace of the listener, in its cgroup or below, or descends from it. If
// a task shares namespace and cgroup with the host, any process of the host counts.
func Serves(socket string) bool {
	listener, err := listenerOf(socket)
	if err != nil {
		return true
	}
	pids, err := proc.PIDs()
	if err != nil {
		return true
	}
	task := newProcessTask(listener)
	return slices.ContainsFunc(nbdServers(sysfs), task.hasProcess) ||
		slices.ContainsFunc(pids, func(pid int) bool { return task.hasProcess(pid) && opensServed(pid) })
}

// listenerTimeout bounds the wait for a listener whose queue of connections is full.
const listenerTimeout = time.Second

// listenerOf returns the process that called listen on a socket (SO_PEERCRED).
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
		err = unix.ESRCH // the process is in another pid namespace
	}
	if err != nil {
		return 0, err
	}
	return int(peer.Pid), nil
}

// processTask identifies the task of a host to which a process belongs, by mount namespace, cgroup and ancestry.
type processTask struct {
	pid           int
	space, cgroup string
}

func newProcessTask(pid int) processTask { return processTask{pid, spaceOf(pid), cgroupOf(pid)} }

// hasProcess reports whether a process belongs to the task. If that cannot be found out, it reports true.
func (t processTask) hasProcess(pid int) bool {
	space, cgroup := spaceOf(pid), cgroupOf(pid)
	if space == "" || t.space == "" || space == t.space || t.hasCgroup(cgroup) {
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

// hasCgroup reports whether the text of a /proc/PID/cgroup names the task's cgroup or one below it (cgroup v2). For a
// task in the root cgroup, only the root itself counts.
func (t processTask) hasCgroup(cgroup string) bool {
	own := strings.TrimSpace(t.cgroup)
	return cgroup == t.cgroup || own != "0::/" && strings.HasPrefix(cgroup, own+"/")
}

// maxAncestors bounds the search for an ancestor, because the process table may change meanwhile.
const maxAncestors = 1000

func spaceOf(pid int) string {
	to, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	return to
}

func cgroupOf(pid int) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return string(text)
}

// opensServed reports whether a process has /dev/fuse (character device 10:229) or a device of nbd or ublk open. If
// this process may not list the files of a living process, it reports true.
func opensServed(pid int) bool {
	if _, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid)); os.IsPermission(err) {
		return true
	}
	for _, fd := range proc.FDs(pid) {
		switch name := filepath.Base(strings.TrimSuffix(fd.Path, " (deleted)")); {
		case servedName.MatchString(name):
			return true
		case name != "fuse": // do not examine other files: that may hang
			continue
		}
		var st unix.Stat_t
		if unix.Stat(fd.Entry, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == unix.Mkdev(10, 229) {
			return true
		}
	}
	return false
}
