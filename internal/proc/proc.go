// Package proc reads /proc: processes, their open files and locks, and the identity of the current boot.
//
// It never follows a link that a process holds open: the file may lie on a file system that hangs. A caller that calls
// os.Stat on FD.Entry first compares the base name of FD.Path (see Opens).
package proc

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// BootID returns the ID of the current boot. It changes with each reboot.
func BootID() (string, error) { return bootID() }

var bootID = sync.OnceValues(func() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot ID: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
})

// BootTime returns the time since boot, including suspend (CLOCK_BOOTTIME). It is the same in all processes.
func BootTime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic(fmt.Sprintf("CLOCK_BOOTTIME: %v", err)) // Linux has had this clock since 2.6.39
	}
	return time.Duration(t.Nano())
}

// Stat holds the fields of /proc/PID/stat that Holdfast uses (proc_pid_stat(5)).
type Stat struct {
	PID     int
	Comm    string // at most 15 bytes, any bytes
	State   byte   // 'R', 'S', 'D', 'Z', ...
	Parent  int
	Session int
	TTY     int
	Start   uint64 // start time in clock ticks since boot; together with PID it identifies a process within one boot
	// NoEnviron reports that the process has no memory, like a kernel thread, or that its environment has 0 bytes.
	// During execve, when /proc/PID/environ reads as empty, NoEnviron is false.
	NoEnviron bool
}

// Exited reports whether the process has exited and only its entry is left.
func (s Stat) Exited() bool { return s.State == 'Z' || s.State == 'X' }

// ReadStat reads /proc/pid/stat. The error wraps os.ErrNotExist or unix.ESRCH if there is no such process.
func ReadStat(pid int) (Stat, error) {
	b, err := readOnce(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Stat{}, err
	}
	return parseStat(pid, b)
}

func parseStat(pid int, b []byte) (Stat, error) {
	open, end := bytes.IndexByte(b, '('), bytes.LastIndexByte(b, ')') // comm may have parentheses too
	if open < 0 || end < open {
		return Stat{}, fmt.Errorf("/proc/%d/stat has no name", pid)
	}
	f := strings.Fields(string(b[end+1:]))
	if len(f) < 49 {
		return Stat{}, fmt.Errorf("/proc/%d/stat has %d fields after the name", pid, len(f))
	}
	s := Stat{PID: pid, Comm: string(b[open+1 : end]), State: f[0][0]}
	var err error
	for i, to := range map[int]*int{1: &s.Parent, 3: &s.Session, 4: &s.TTY} {
		if *to, err = strconv.Atoi(f[i]); err != nil {
			return Stat{}, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
	}
	if s.Start, err = strconv.ParseUint(f[19], 10, 64); err != nil {
		return Stat{}, fmt.Errorf("/proc/%d/stat: %w", pid, err)
	}
	const size, code, envStart, envEnd = 20, 23, 47, 48
	// execve sets the address of the code last. Before that, the environment may seem to have 0 bytes.
	s.NoEnviron = f[size] == "0" || f[code] != "0" && f[envEnd] != "0" && f[envStart] == f[envEnd]
	return s, nil
}

// readOnce reads a short file with a single read(2), so that its content is consistent.
func readOnce(path string) ([]byte, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	b := make([]byte, 4096)
	n, err := unix.Read(fd, b)
	if err != nil {
		return nil, &os.PathError{Op: "read", Path: path, Err: err}
	}
	return b[:n], nil
}

// PIDs lists the processes that are visible in /proc, in no order.
func PIDs() ([]int, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	var pids []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, err
}

// Comm returns the name of a process, or "" if it cannot be read.
func Comm(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSuffix(string(b), "\n")
}

// Name returns "process PID (comm)" for messages.
func Name(pid int) string {
	if pid == os.Getpid() {
		return fmt.Sprintf("this process (pid %d)", pid)
	}
	if comm := Comm(pid); comm != "" {
		return fmt.Sprintf("process %d (%q)", pid, comm)
	}
	return fmt.Sprintf("process %d", pid)
}

// FD is an open file of a process.
type FD struct {
	Entry string // path of the link, such as /proc/12/fd/3
	Path  string // its target as the kernel names it: a path, or for example pipe:[123]
}

// FDs lists the open files of a process. It is empty if the process is gone or may not be examined by this user.
func FDs(pid int) []FD {
	entries, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	var fds []FD
	for _, e := range entries {
		if to, err := os.Readlink(e); err == nil {
			fds = append(fds, FD{Entry: e, Path: to})
		}
	}
	return fds
}

// Opens reports whether a process has file open. It compares device and inode, but only of files with the same base
// name.
func Opens(pid int, file string) bool {
	want, err := os.Stat(file)
	if err != nil {
		return false
	}
	for _, fd := range FDs(pid) {
		if filepath.Base(fd.Path) != filepath.Base(file) {
			continue
		}
		if open, err := os.Stat(fd.Entry); err == nil && os.SameFile(want, open) {
			return true
		}
	}
	return false
}

// FlockHolders lists the processes that took a flock(2) on file, according to /proc/locks. A process that has exited is
// listed as long as a child of it has the locked file open.
//
// Btrfs has one device in /proc/locks and another in stat(2). If only the inode number is equal, a process is listed if
// it has the file open.
func FlockHolders(file string) []int {
	var st unix.Stat_t
	if unix.Stat(file, &st) != nil {
		return nil
	}
	table, _ := os.ReadFile("/proc/locks")
	device := fmt.Sprintf("%02x:%02x", unix.Major(st.Dev), unix.Minor(st.Dev))
	return flockHolders(string(table), device, st.Ino, func(pid int) bool { return Opens(pid, file) })
}

func flockHolders(table, device string, inode uint64, opens func(pid int) bool) (pids []int) {
	for line := range strings.Lines(table) {
		f := strings.Fields(line) // 1: FLOCK ADVISORY WRITE 4711 fe:00:12345 0 EOF
		if len(f) < 6 || f[1] != "FLOCK" {
			continue
		}
		at, same := strings.CutSuffix(f[5], fmt.Sprintf(":%d", inode))
		pid, err := strconv.Atoi(f[4])
		if same && err == nil && pid > 0 && (at == device || opens(pid)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Sleeping says why a process does not exit, for messages. If a thread sleeps uninterruptibly, it returns the thread's
// state and the kernel function in which it waits, else the state of the process.
func Sleeping(pid int) string {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	for _, dir := range threads {
		if state := status(dir, "State"); strings.HasPrefix(state, "D") {
			wchan, _ := os.ReadFile(filepath.Join(dir, "wchan"))
			return fmt.Sprintf("state %s in %s", state, wchan)
		}
	}
	if state := status(fmt.Sprintf("/proc/%d", pid), "State"); state != "" {
		return "state " + state
	}
	return "state unknown"
}

// status returns a field of the file status in a directory of /proc, or "".
func status(dir, field string) string {
	text, _ := os.ReadFile(filepath.Join(dir, "status"))
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}
