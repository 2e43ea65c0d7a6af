package taskdriver

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
	"holdfast/registry"
)

// cgroup is a task's cgroup: one directory in each hierarchy, below the orchestrator's own cgroup. Any of them may be
// missing. The warnings then say what does not work.
type cgroup struct {
	unified  string            // version 2, or the version 2 part of a hybrid setup: kills all processes at once
	devices  string            // version 1: device rules; if empty, the unified directory has them
	limited  map[string]string // version 1, by controller; if empty, the unified directory has the limits
	warnings []string
}

// newCgroup makes the cgroup directories that this machine allows: those to find and kill the processes, those for
// devices if the task is confined, and those for the limits of the resources.
func newCgroup(id string, r Resources, confined bool) *cgroup {
	g := &cgroup{limited: map[string]string{}}
	table, err := mount.Table(0)
	own, ownErr := os.ReadFile("/proc/self/cgroup")
	if err := errors.Join(err, ownErr); err != nil {
		g.warn("no cgroup: %v", err)
		return g
	}
	wanted := []string{""} // version 2
	if confined {
		wanted = append(wanted, "devices")
	}
	for _, c := range controllers {
		if v1, _ := c.settings(r); len(v1) > 0 {
			wanted = append(wanted, c.name)
		}
	}
	for _, controller := range wanted {
		parent, found := ownCgroup(table, string(own), controller)
		if !found {
			continue
		}
		if controller == "" {
			parent = delegatedParent(parent)
		}
		made := filepath.Join(parent, "holdfast-"+id)
		if err := os.Mkdir(made, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			g.warn("no cgroup for the task: %v", err)
			continue
		}
		switch controller {
		case "":
			g.unified = made
		case "devices":
			g.devices = made
		default:
			g.limited[controller] = made
		}
	}
	if g.unified == "" {
		g.warn("no cgroup version 2: the task's processes are found by parent, session and environment")
	}
	return g
}

func (g *cgroup) warn(format string, args ...any) {
	g.warnings = append(g.warnings, fmt.Sprintf(format, args...))
	slices.Sort(g.warnings)
	g.warnings = slices.Compact(g.warnings)
}

// ownCgroup returns the directory of this process's cgroup in a controller's hierarchy. An empty controller means
// version 2. own is the text of /proc/self/cgroup.
func ownCgroup(table mount.Mounts, own, controller string) (string, bool) {
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

// dirs lists the directories that exist. Two controllers may share one.
func (g *cgroup) dirs() []string {
	all := slices.AppendSeq([]string{g.unified, g.devices}, maps.Values(g.limited))
	slices.Sort(all)
	return slices.DeleteFunc(slices.Compact(all), func(d string) bool { return d == "" })
}

// cgroupFiles are open files of a cgroup. They are opened before a thread enters the task's mount namespace, because
// the hierarchies may be read-only there.
type cgroupFiles struct {
	unified *os.File
	tasks   []*os.File // of version 1
}

// openCgroups opens the cgroups of a task. Only those of version 1 have a file named tasks.
func openCgroups(dirs []string) (f cgroupFiles, err error) {
	for _, dir := range dirs {
		tasks, err := os.OpenFile(filepath.Join(dir, "tasks"), os.O_WRONLY, 0)
		if err == nil {
			f.tasks = append(f.tasks, tasks)
			continue
		}
		if errors.Is(err, fs.ErrNotExist) {
			f.unified, err = os.Open(dir)
		}
		if err != nil {
			f.close()
			return cgroupFiles{}, err
		}
	}
	return f, nil
}

// enter moves the calling thread into the version 1 cgroups, which its children inherit. Version 2 can only move whole
// processes, so clone3 creates the program in the version 2 cgroup.
func (f cgroupFiles) enter() error {
	for _, tasks := range f.tasks {
		if _, err := tasks.WriteString("0"); err != nil {
			return fmt.Errorf("enter cgroup %s: %w", tasks.Name(), err)
		}
	}
	return nil
}

func (f cgroupFiles) close() {
	f.unified.Close() // nil is fine
	for _, tasks := range f.tasks {
		tasks.Close()
	}
}

// confine enforces the policy for the processes of the cgroup. It returns ErrDenied for a device of the plan that the
// orchestrator's own cgroup may not use. If nothing can enforce the policy, confine refuses devices with restricted
// access, and only warns about others. In a user namespace it only warns in any case, because root there has
// no more rights than the user who made the namespace.
func (g *cgroup) confine(p devicePolicy) error {
	err := errors.New("no cgroup for devices")
	if g.devices != "" {
		err = p.writeRules(g.devices)
	} else if g.unified != "" {
		err = p.attachProgram(g.unified)
	}
	switch {
	case err == nil, errors.Is(err, registry.ErrDenied):
		return err
	case p.restricted && !inUserNamespace():
		return registry.Errorf(registry.ErrUnsupported,
			"read-only or write-only access to a device cannot be enforced: %w; "+
				"give the orchestrator a writable cgroup (version 1 with devices, or version 2; under systemd: "+
				"Delegate=yes)", err)
	}
	g.warn("the task can use all devices, and device access is not enforced: %v", err)
	return nil
}

// initialUserNamespace is the inode of the initial user namespace (linux/nsfs.h).
const initialUserNamespace = 0xEFFFFFFD

func inUserNamespace() bool {
	var ns unix.Stat_t
	err := unix.Stat("/proc/self/ns/user", &ns)
	return err == nil && ns.Ino != initialUserNamespace
}

// killCgroups kills every process of the version 2 cgroups. It does nothing in version 1 cgroups.
func killCgroups(dirs []string) {
	for _, dir := range dirs {
		_ = writeExisting(filepath.Join(dir, "cgroup.kill"), "1")
	}
}

// writeExisting writes to a file and fails if it does not exist.
func writeExisting(file, text string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

func cgroupMembers(dir string) []int {
	b, _ := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
	var pids []int
	for line := range strings.FieldsSeq(string(b)) {
		if pid, err := strconv.Atoi(line); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// removeCgroups removes empty cgroups, including those that the task made below. It retries for up to 30 s, because a
// process that has just exited may be a member for a moment longer.
func removeCgroups(dirs []string) error {
	deadline := time.Now().Add(30 * time.Second)
	for {
		var err error
		for _, dir := range dirs {
			err = errors.Join(err, removeCgroup(dir))
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

func removeCgroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.IsDir() {
			err = errors.Join(err, removeCgroup(filepath.Join(dir, e.Name())))
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
