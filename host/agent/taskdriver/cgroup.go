package taskdriver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
)

// group is a task's place in the cgroup hierarchies: below the orchestrator's own place, one directory each. Any of them may be
// missing, and notes says so: nothing depends on them but what the notes name.
type group struct {
	unified string // version 2, or the unified half of a hybrid: kills all at once
	devices string // version 1: device rules; without it they are the unified one's
	memory  string // version 1: tells of the kernel's out-of-memory kills
	notes   []string
}

// newGroup makes what can be made.
func newGroup(id string) *group {
	g := &group{}
	table, err := mount.Table(0)
	if err != nil {
		g.note("no cgroup: %v", err)
		return g
	}
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		g.note("no cgroup: %v", err)
		return g
	}
	for controller, dir := range map[string]*string{"": &g.unified, "devices": &g.devices, "memory": &g.memory} {
		parent, found := place(table, string(own), controller)
		if !found {
			continue
		}
		made := filepath.Join(parent, "holdfast-"+id)
		if err := os.Mkdir(made, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			g.note("no cgroup for the task: %v", err)
			continue
		}
		*dir = made
	}
	if g.unified == "" {
		g.note("the task's processes are found by descent, session and environment: there is no cgroup version 2 to end them by")
	}
	return g
}

func (g *group) note(format string, args ...any) {
	g.notes = append(g.notes, fmt.Sprintf(format, args...))
	slices.Sort(g.notes)
	g.notes = slices.Compact(g.notes)
}

// place is the directory of our own cgroup in the hierarchy of a controller; the empty one is version 2.
func place(table mount.Mounts, own, controller string) (string, bool) {
	path, found := "", false
	for line := range strings.Lines(own) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(part) == 3 && slices.Contains(strings.Split(part[1], ","), controller) {
			path, found = part[2], true
		}
	}
	if !found {
		return "", false
	}
	for _, m := range table {
		v2 := controller == "" && m.FSType == "cgroup2"
		v1 := controller != "" && m.FSType == "cgroup" && slices.Contains(strings.Split(m.Super, ","), controller)
		rel, err := filepath.Rel(m.Root, path)
		if (v1 || v2) && err == nil && filepath.IsLocal(rel) {
			return filepath.Join(m.Point, rel), true
		}
	}
	return "", false
}

// dirs lists what was made.
func (g *group) dirs() []string {
	return slices.DeleteFunc([]string{g.unified, g.devices, g.memory}, func(d string) bool { return d == "" })
}

// membership is what a thread needs to start a program inside the group. It is opened before the thread enters the task's file
// system, where the hierarchies may be read-only.
type membership struct {
	unified *os.File
	v1      []*os.File
}

func (g *group) open() (m membership, err error) {
	if g.unified != "" {
		if m.unified, err = os.Open(g.unified); err != nil {
			return m, err
		}
	}
	for _, dir := range []string{g.devices, g.memory} {
		if dir == "" {
			continue
		}
		f, err := os.OpenFile(filepath.Join(dir, "tasks"), os.O_WRONLY, 0)
		if err != nil {
			m.close()
			return m, err
		}
		m.v1 = append(m.v1, f)
	}
	return m, nil
}

// enter moves the calling thread into the version 1 groups: what it starts is born there. Version 2 moves whole processes only, so
// there the program is born in the group by clone3.
func (m membership) enter() error {
	for _, f := range m.v1 {
		if _, err := f.WriteString("0"); err != nil {
			return fmt.Errorf("enter %s: %w", f.Name(), err)
		}
	}
	return nil
}

func (m membership) close() {
	m.unified.Close() // of nil is an error that tells nothing
	for _, f := range m.v1 {
		f.Close()
	}
}

// oom says whether the kernel killed a process of the group for memory.
func (g *group) oom() bool {
	for _, file := range []string{filepath.Join(g.memory, "memory.oom_control"), filepath.Join(g.unified, "memory.events")} {
		if !filepath.IsAbs(file) {
			continue
		}
		b, _ := os.ReadFile(file)
		for line := range strings.Lines(string(b)) {
			if n, found := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); found && n != "0" {
				return true
			}
		}
	}
	return false
}

// killAll ends every process of a version 2 group at once; in others it does nothing.
func killAll(dirs []string) {
	for _, dir := range dirs {
		_ = writeExisting(filepath.Join(dir, "cgroup.kill"), "1")
	}
}

func writeExisting(file, text string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// members are the processes of a group.
func members(dir string) []int {
	b, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	var pids []int
	for line := range strings.FieldsSeq(string(b)) {
		if pid, err := strconv.Atoi(line); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// removeGroups removes the directories of a group without processes, with those that the task made below. A thread or process
// that has just ended may be a member for another moment.
func removeGroups(dirs []string) error {
	deadline := time.Now().Add(2 * time.Second)
	for {
		var errs []error
		for _, dir := range dirs {
			errs = append(errs, removeGroup(dir))
		}
		err := errors.Join(errs...)
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

func removeGroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.IsDir() {
			err = errors.Join(err, removeGroup(filepath.Join(dir, e.Name())))
		}
	}
	if err != nil {
		return err
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("remove cgroup %s: %w", dir, err)
	}
	return nil
}
