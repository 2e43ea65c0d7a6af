package mount

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// process is what /proc tells of a process without asking a file system: the links below /proc are texts that the kernel keeps. Whatever
// goes while it is read is simply not there.
type process struct {
	pid   int
	tasks []task // its threads that live; they may differ in namespace, root and working directory
}

// task is one thread.
type task struct {
	pid  int    // of its process
	dir  string // in /proc
	ns   string // its mount namespace: "mnt:[4026531841]"
	root string // as seen from the root of its namespace
}

// processes lists all of them but those, by their ids.
func processes(without []int) ([]process, error) {
	names, err := namesIn("/proc")
	if err != nil {
		return nil, fmt.Errorf("list the processes: %w", err)
	}
	var all []process
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil || slices.Contains(without, pid) {
			continue
		}
		if p := (process{pid, tasksOf(pid)}); len(p.tasks) > 0 {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b process) int { return cmp.Compare(a.pid, b.pid) })
	return all, nil
}

func tasksOf(pid int) (tasks []task) {
	dir := fmt.Sprintf("/proc/%d/task", pid)
	tids, _ := namesIn(dir)
	for _, tid := range tids {
		t := task{pid: pid, dir: dir + "/" + tid}
		t.ns, t.root = t.link("ns/mnt"), t.link("root")
		if t.ns != "" && t.root != "" { // a dead one has neither
			tasks = append(tasks, t)
		}
	}
	return tasks
}

// namesIn reads names only: it asks nothing about the entries.
func namesIn(dir string) ([]string, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return f.Readdirnames(-1)
}

// link is the text of a link of the thread, empty if there is none. A file that was removed is named as it was.
func (t task) link(name string) string {
	text, err := os.Readlink(t.dir + "/" + name)
	if err != nil {
		return ""
	}
	return strings.TrimSuffix(text, " (deleted)")
}

// table is the mount table of the thread's namespace, its paths as from the root of that. The kernel shows a thread what is below its own
// root, so for one whose root is elsewhere the namespace is entered, and what is seen from there is the whole.
func (t task) table() (ms Mounts, err error) {
	if t.root == "/" {
		return tableFrom(t.dir + "/mountinfo")
	}
	ns, err := os.Open(t.dir + "/ns/mnt")
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	proc, err := os.Open("/proc") // ours: there may be none inside
	if err != nil {
		return nil, err
	}
	defer proc.Close()
	err = OnThread(func() error {
		if err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Setns(int(ns.Fd()), unix.CLONE_NEWNS)); err != nil {
			return fmt.Errorf("enter the namespace of process %d: %w", t.pid, err)
		}
		fd, err := unix.Openat(int(proc.Fd()), "thread-self/mountinfo", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		ms, err = tableIn(os.NewFile(uintptr(fd), "mountinfo"))
		return err
	})
	return ms, err
}

// files calls with each open file that has a path, and the mount that it is open on.
func (t task) files(each func(mount int, path string)) {
	fds, _ := namesIn(t.dir + "/fd")
	for _, fd := range fds {
		path := t.link("fd/" + fd)
		if !strings.HasPrefix(path, "/") { // a socket, a pipe
			continue
		}
		info, err := os.ReadFile(t.dir + "/fdinfo/" + fd)
		if err != nil {
			continue
		}
		if _, rest, found := bytes.Cut(info, []byte("mnt_id:")); found {
			line, _, _ := bytes.Cut(rest, []byte("\n"))
			mount, _ := strconv.Atoi(string(bytes.TrimSpace(line)))
			each(mount, path)
		}
	}
}

// maps calls with each mapped file: its device as in "08:01", and its path. It waits for the process's memory to be free, which it may
// never be.
func (t task) maps(each func(device, path string)) {
	f, err := os.Open(t.dir + "/maps")
	if err != nil {
		return
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := bytes.SplitN(lines.Bytes(), []byte(" "), 6) // address, rights, offset, device, inode, path
		if len(fields) < 6 {
			continue
		}
		if path := bytes.TrimLeft(fields[5], " "); bytes.HasPrefix(path, []byte("/")) {
			each(string(fields[3]), strings.TrimSuffix(string(path), " (deleted)"))
		}
	}
}

// commOf is a process's name: any bytes that it likes.
func commOf(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSuffix(string(b), "\n")
}
