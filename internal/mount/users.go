package mount

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"holdfast/internal/proc"
)

// A User is a process or another mount that uses a mount.
type User struct {
	Text  string // for people
	Mount string // the mount point of a mount in this namespace; empty: a process, or a mount in another namespace
	PID   int    // the process, or a process in that other namespace
	There string // the mount point in that other namespace
}

// Users returns the users of the mounts at each point and below:
//   - processes whose working directory, root, program or open file is there;
//   - mounts inside;
//   - other mounts of the same file system, in any mount namespace, that remain when the mount at the point is
//     unmounted. A copy that the kernel unmounts with it (mount_namespaces(7)) is not a user.
//
// A bind mount does not record its source. If several mounts of one file system lie beside each other, only the oldest
// counts as the source of the others. A staged volume is therefore used by its publishes, but a publish is not used by
// other publishes.
//
// Users asks no file system, so it never hangs. It does not find everything: mapped files, processes that this process
// may not examine, and uses by the kernel itself (loop devices, swap) are missing. Only the kernel's refusal to unmount
// (ErrBusy) is certain.
func Users(points []string) (map[string][]User, error) {
	t, err := newUserTable(points)
	if err != nil {
		return nil, err
	}
	pids, err := proc.PIDs()
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	slices.Sort(pids)
	t.addMounts(namespaces(pids, t.own))
	for _, pid := range pids {
		if pid != os.Getpid() {
			t.addProcess(pid)
		}
	}
	return t.users, nil
}

// userTable collects the users of mount points.
type userTable struct {
	points  map[string]bool
	own     Mounts           // of this namespace, the oldest first
	parents map[int]Mount    // the mounts in own, by ID
	shows   map[source][]int // indices in own, by the directory that they show
	users   map[string][]User
}

// source is a directory of a file system.
type source struct {
	major, minor int
	root         string
}

// namespace is a mount namespace other than that of this process.
type namespace struct {
	pid    int // one of its processes
	mounts Mounts
}

func newUserTable(points []string) (*userTable, error) {
	t := &userTable{points: map[string]bool{}, parents: map[int]Mount{}, shows: map[source][]int{},
		users: map[string][]User{}}
	for _, p := range points {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p {
			return nil, fmt.Errorf("find users of %q: not a clean absolute path", p)
		}
		t.points[p] = true
	}
	var err error
	if t.own, err = Table(0); err != nil {
		return nil, err
	}
	for i, m := range t.own {
		t.parents[m.ID] = m
		t.shows[sourceOf(m)] = append(t.shows[sourceOf(m)], i)
	}
	return t, nil
}

// pointsAbove returns those of the points that are path or one of its parents.
func (t *userTable) pointsAbove(path string) (points []string) {
	for p := range upwards(path) {
		if t.points[p] {
			points = append(points, p)
		}
	}
	return points
}

func (t *userTable) add(points []string, u User) {
	for _, p := range points {
		if !slices.Contains(t.users[p], u) {
			t.users[p] = append(t.users[p], u)
		}
	}
}

// addMounts adds mounts inside the points, and other mounts of the same file systems.
func (t *userTable) addMounts(others []namespace) {
	masters := masters(append(others, namespace{mounts: t.own}))
	for i, m := range t.own {
		if on, known := t.parents[m.Parent]; known && on.Point != m.Point {
			t.add(t.pointsAbove(on.Point), User{Text: "something is mounted inside it, at " + printable(m.Point),
				Mount: m.Point})
		}
		if t.isCopy(m, i, t.parents, masters) {
			continue
		}
		for _, s := range t.sources(m) {
			points := slices.DeleteFunc(t.pointsAbove(t.own[s].Point), func(p string) bool {
				return within(p, m.Point)
			})
			if s < i && len(points) > 0 && !t.hasElder(s, i) {
				t.add(points, User{Text: "it is also mounted at " + printable(m.Point), Mount: m.Point})
			}
		}
	}
	for _, ns := range others {
		t.addNamespace(ns, masters)
	}
}

// addNamespace adds mounts in another namespace that show a directory inside the points. It leaves out copies of all
// mounts of this namespace.
func (t *userTable) addNamespace(ns namespace, masters map[int]int) {
	mounts := map[int]Mount{} // by ID
	for _, m := range ns.mounts {
		mounts[m.ID] = m
	}
	for _, m := range ns.mounts {
		if t.isCopy(m, len(t.own), mounts, masters) {
			continue
		}
		for _, s := range t.sources(m) {
			t.add(t.pointsAbove(t.own[s].Point), User{
				PID: ns.pid, There: m.Point,
				Text: fmt.Sprintf("it is mounted at %s in the mount namespace of %s", printable(m.Point),
					proc.Name(ns.pid)),
			})
		}
	}
}

// sources returns the mounts of this namespace that m shows, in whole or in part.
func (t *userTable) sources(m Mount) (all []int) {
	s := sourceOf(m)
	for s.root = range upwards(s.root) {
		for _, i := range t.shows[s] {
			if t.own[i].ID != m.ID {
				all = append(all, i)
			}
		}
	}
	return all
}

// hasElder reports whether mount i has an older source than s, mounted beside s.
func (t *userTable) hasElder(s, i int) bool {
	return t.own[s].Parent == t.own[i].Parent && slices.ContainsFunc(t.sources(t.own[i]), func(o int) bool {
		return o < s && t.own[o].Parent == t.own[s].Parent
	})
}

// isCopy reports whether m, in a namespace with the given mounts, is a copy of one of the first n mounts of this
// namespace. The kernel made such a copy together with the original, and also unmounts it with the original.
func (t *userTable) isCopy(m Mount, n int, mounts map[int]Mount, masters map[int]int) bool {
	target, known := mounts[m.Parent]
	return known && slices.ContainsFunc(t.shows[sourceOf(m)], func(i int) bool {
		original := t.own[i]
		return i < n && original.ID != m.ID && t.receivesFrom(target, original, masters) &&
			mountedAt(m, target) == mountedAt(original, t.parents[original.Parent])
	})
}

// receivesFrom reports whether a mount that is made on the parent of original propagates to target: target is in the
// parent's peer group, or receives from that group, directly or through other groups.
func (t *userTable) receivesFrom(target, original Mount, masters map[int]int) bool {
	source, known := t.parents[original.Parent]
	if !known || !source.Shared() || source.ID == target.ID {
		return false
	}
	group := target.Group
	if group == 0 {
		group = target.Master
	}
	for range len(masters) { // no chain of groups is longer
		if group == 0 || group == source.Group {
			break
		}
		group = masters[group]
	}
	return group == source.Group
}

// masters maps each peer group to the peer group from which it receives propagation.
func masters(all []namespace) map[int]int {
	masters := map[int]int{}
	for _, ns := range all {
		for _, m := range ns.mounts {
			if m.Shared() && m.Master != 0 {
				masters[m.Group] = m.Master
			}
		}
	}
	return masters
}

// mountedAt returns the directory on which m is mounted, in the file system of the mount below.
func mountedAt(m, below Mount) source {
	rel := strings.TrimPrefix(m.Point, strings.TrimSuffix(below.Point, "/"))
	s := sourceOf(below)
	s.root = filepath.Join(s.root, rel)
	return s
}

func sourceOf(m Mount) source {
	return source{m.Major, m.Minor, strings.TrimSuffix(m.Root, "//deleted")}
}

// namespaces returns the other mount namespaces of the processes, as far as they can be read.
func namespaces(pids []int, own Mounts) (all []namespace) {
	ours, _ := os.Readlink("/proc/thread-self/ns/mnt")
	members := map[string]int{}
	for _, pid := range pids {
		id := link(pid, "ns/mnt")
		if id == "" || id == ours {
			continue
		}
		// A process sees only mounts below its root, so prefer one with the root of the namespace.
		if first, known := members[id]; !known || len(link(pid, "root")) < len(link(first, "root")) {
			members[id] = pid
		}
	}
	for _, pid := range members {
		if mounts, err := Table(pid); err == nil {
			all = append(all, namespace{pid, mounts})
		}
	}
	slices.SortFunc(all, func(a, b namespace) int { return a.pid - b.pid })
	return all
}

// addProcess adds a process. Its files are compared by path, in any mount namespace.
func (t *userTable) addProcess(pid int) {
	for _, l := range []struct{ name, does string }{
		{"cwd", "has its working directory in"}, {"root", "has its root at"}, {"exe", "runs"},
	} {
		t.addPath(pid, l.does, link(pid, l.name))
	}
	opened := map[string]bool{} // one file per point suffices to name the process
	for _, fd := range proc.FDs(pid) {
		for _, p := range t.pointsAbove(fd.Path) {
			if !opened[p] {
				opened[p] = true
				t.add([]string{p}, User{
					PID: pid, Text: fmt.Sprintf("%s has %s open", proc.Name(pid), printable(fd.Path)),
				})
			}
		}
	}
}

func (t *userTable) addPath(pid int, does, path string) {
	if points := t.pointsAbove(path); len(points) > 0 {
		t.add(points, User{PID: pid, Text: fmt.Sprintf("%s %s %s", proc.Name(pid), does, printable(path))})
	}
}

// link returns the text of a link in /proc/pid, or an empty string if the process is gone or may not be examined.
func link(pid int, name string) string {
	text, _ := os.Readlink(filepath.Join("/proc", strconv.Itoa(pid), name))
	return text
}

// upwards yields an absolute path and its parents, up to "/".
func upwards(path string) func(func(string) bool) {
	return func(yield func(string) bool) {
		if !filepath.IsAbs(path) {
			return
		}
		for path = filepath.Clean(path); yield(path) && path != "/"; path = filepath.Dir(path) {
		}
	}
}

// printable quotes text that would confuse a terminal.
func printable(s string) string {
	if strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return strconv.Quote(s)
	}
	return s
}
