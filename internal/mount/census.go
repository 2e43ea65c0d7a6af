package mount

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// census counts the users of mount points.
type census struct {
	asked map[string]bool
	ns    string      // our namespace
	own   Mounts      // what is mounted there, the oldest first
	index map[int]int // by ID

	all   map[part][]int // its mounts, as indices of own, by what they show
	parts map[part][]int // those that were asked about

	held   map[int][]string               // the points of each mount that has to go with them: ours, and copies that go by propagation
	places map[string]map[string][]string // the same by namespace and path
	copies map[int]int                    // copies that go by propagation, with the oldest mount of ours with which they go
	reach  map[int]map[int]bool           // the peer groups that receive what happens in a group
	slaves map[int][]int                  // the groups that receive from a group

	users map[string][]User
	seen  map[claim]bool
	comms map[int]string
}

// part is a file system, or a directory in it.
type part struct {
	major, minor int
	root         string
}

// claim is what is told once, however many files of a mount a process has open.
type claim struct {
	point string
	pid   int
	use   Use
	path  string // of a mount
}

// namespace is a mount namespace, by one of its processes.
type namespace struct {
	id     string
	pid    int
	mounts Mounts
}

func newCensus(points []string) (*census, error) {
	c := &census{
		asked: map[string]bool{}, index: map[int]int{}, all: map[part][]int{}, parts: map[part][]int{}, held: map[int][]string{},
		places: map[string]map[string][]string{}, copies: map[int]int{}, reach: map[int]map[int]bool{}, slaves: map[int][]int{},
		users: map[string][]User{}, seen: map[claim]bool{}, comms: map[int]string{},
	}
	for _, p := range points {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p {
			return nil, fmt.Errorf("who uses %q: it has to be an absolute path as the mount table writes it", p)
		}
		c.asked[p] = true
	}
	var err error
	if c.ns, err = os.Readlink("/proc/thread-self/ns/mnt"); err != nil {
		return nil, fmt.Errorf("tell the mount namespace: %w", err)
	}
	if c.own, err = Table(0); err != nil {
		return nil, err
	}
	c.learn(c.own)
	for i, m := range c.own {
		c.index[m.ID] = i
		c.all[partOf(m)] = append(c.all[partOf(m)], i)
		for at := range upwards(m.Point) {
			if c.asked[at] {
				c.hold(c.ns, m, at)
			}
		}
		if len(c.held[m.ID]) > 0 {
			c.parts[partOf(m)] = append(c.parts[partOf(m)], i)
		}
	}
	return c, nil
}

// hold notes a mount that has to go with the points.
func (c *census) hold(ns string, m Mount, points ...string) {
	if c.places[ns] == nil {
		c.places[ns] = map[string][]string{}
	}
	for _, p := range points {
		if !slices.Contains(c.held[m.ID], p) {
			c.held[m.ID] = append(c.held[m.ID], p)
		}
		if !slices.Contains(c.places[ns][m.Point], p) {
			c.places[ns][m.Point] = append(c.places[ns][m.Point], p)
		}
	}
}

// learn notes which groups are slaves of which.
func (c *census) learn(ms Mounts) {
	for _, m := range ms {
		if m.Shared() && m.Master != 0 && !slices.Contains(c.slaves[m.Master], m.Group) {
			c.slaves[m.Master] = append(c.slaves[m.Master], m.Group)
		}
	}
}

// namespaces reads the mount table of each namespace that one of the processes is in, and gives ours first.
func (c *census) namespaces(all []process) []namespace {
	found := []namespace{{id: c.ns, mounts: c.own}}
	members, ids := map[string][]task{}, []string{}
	for _, p := range all {
		for _, t := range p.tasks {
			if t.ns != c.ns && len(members[t.ns]) == 0 {
				ids = append(ids, t.ns)
			}
			members[t.ns] = append(members[t.ns], t)
		}
	}
	for _, id := range ids {
		ns := namespace{id: id, pid: members[id][0].pid, mounts: tableOf(members[id])}
		c.learn(ns.mounts)
		found = append(found, ns)
	}
	return found
}

// tableOf is the mount table of a namespace, from the first of its threads that can tell it: one with the namespace's root is asked first.
func tableOf(members []task) Mounts {
	slices.SortStableFunc(members, func(a, b task) int { return len(a.root) - len(b.root) })
	for _, t := range members {
		if ms, err := t.table(); err == nil && len(ms) > 0 { // else it has ended
			return ms
		}
	}
	return nil
}

// shown goes through the asked mounts of which m shows all or a part.
func (c *census) shown(m Mount) func(func(int) bool) {
	return func(yield func(int) bool) {
		for at := range upwards(cleanRoot(m)) {
			for _, i := range c.parts[part{m.Major, m.Minor, at}] {
				if c.own[i].ID != m.ID && !yield(i) {
					return
				}
			}
		}
	}
}

// follow finds the copies in a namespace that an unmount of ours takes off too: they are mounted at the same place of a mount that receives
// from the one that ours is mounted on (mount_namespaces(7)). One with a mount inside stays; what only covers it is no hindrance.
func (c *census) follow(ns namespace) {
	byID, goes := make(map[int]Mount, len(ns.mounts)), map[int][]int{}
	for _, m := range ns.mounts {
		byID[m.ID] = m
	}
	for _, m := range ns.mounts {
		for _, i := range c.all[partOf(m)] {
			if parent, known := byID[m.Parent]; known && m.ID != c.own[i].ID && c.travels(c.own[i], m, parent) {
				goes[m.ID] = append(goes[m.ID], i)
			}
		}
	}
	c.keepBearers(ns, byID, goes)
	for id, with := range goes {
		c.copies[id] = with[0]
		for _, i := range with {
			c.hold(ns.id, byID[id], c.held[c.own[i].ID]...)
		}
	}
}

// keepBearers removes from what goes that in which something else is mounted.
func (c *census) keepBearers(ns namespace, byID map[int]Mount, goes map[int][]int) {
	for again := len(goes) > 0; again; {
		again = false
		for _, m := range ns.mounts {
			if goes[m.ID] != nil || c.held[m.ID] != nil {
				continue
			}
			on := byID[m.Parent]
			for goes[on.ID] != nil && on.Point == m.Point { // it is taken from under m, which comes down
				on = byID[on.Parent]
			}
			if goes[on.ID] != nil {
				delete(goes, on.ID)
				again = true
			}
		}
	}
}

// travels says whether an unmount of ours reaches m, which is mounted on parent.
func (c *census) travels(ours, m, parent Mount) bool {
	i, known := c.index[ours.Parent]
	if !known || !c.own[i].Shared() || cleanRoot(ours) != cleanRoot(m) {
		return false
	}
	receives := c.receivers(c.own[i].Group)
	return parent.ID != c.own[i].ID && (receives[parent.Group] || receives[parent.Master]) && spot(ours, c.own[i]) == spot(m, parent)
}

// receivers is a peer group with those below it.
func (c *census) receivers(group int) map[int]bool {
	if c.reach[group] == nil {
		c.reach[group] = map[int]bool{group: true}
		for todo := []int{group}; len(todo) > 0; todo = todo[1:] {
			for _, g := range c.slaves[todo[0]] {
				if !c.reach[group][g] {
					c.reach[group][g] = true
					todo = append(todo, g)
				}
			}
		}
	}
	return c.reach[group]
}

// elsewhere counts the mounts in a namespace that show all or a part of an asked one and stay. A copy of one of ours is not counted: that
// one is, or is not.
func (c *census) elsewhere(ns namespace) {
	for j, m := range ns.mounts {
		if first, is := c.copies[m.ID]; is && (ns.id != c.ns || first < j) {
			continue
		}
		for i := range c.shown(m) {
			if ns.id == c.ns && !c.made(i, j) {
				continue
			}
			points := slices.DeleteFunc(slices.Clone(c.held[c.own[i].ID]), func(p string) bool { return slices.Contains(c.held[m.ID], p) })
			c.add(points, User{PID: ns.pid, Use: MountedAt, Path: m.Point})
		}
	}
}

// made says whether mount j of ours may have been made from mount i.
func (c *census) made(i, j int) bool {
	if j < i || c.own[i].Parent != c.own[j].Parent {
		return j > i
	}
	for at := range upwards(cleanRoot(c.own[j])) {
		if all := c.all[part{c.own[j].Major, c.own[j].Minor, at}]; len(all) > 0 && all[0] < i {
			return false
		}
	}
	return true
}

// inside counts what is mounted in an asked mount; what is stacked on it is it.
func (c *census) inside() {
	for _, m := range c.own {
		if i, known := c.index[m.Parent]; known && c.own[i].Point != m.Point {
			c.add(c.held[m.Parent], User{Use: MountedIn, Path: m.Point})
		}
	}
}

func (c *census) add(points []string, u User) {
	for _, point := range points {
		key := claim{point: point, pid: u.PID, use: u.Use}
		if u.Use == MountedAt || u.Use == MountedIn {
			key.path = u.Path
		}
		if c.seen[key] {
			continue
		}
		if _, known := c.comms[u.PID]; !known && u.PID != 0 {
			c.comms[u.PID] = commOf(u.PID)
		}
		u.Comm = c.comms[u.PID]
		c.seen[key], c.users[point] = true, append(c.users[point], u)
	}
}

// devices are those of the asked mounts, as /proc/pid/maps writes them.
func (c *census) devices() map[string]bool {
	all := map[string]bool{}
	for p := range c.parts {
		all[fmt.Sprintf("%02x:%02x", p.major, p.minor)] = true
	}
	return all
}

func partOf(m Mount) part { return part{m.Major, m.Minor, cleanRoot(m)} }

// spot is where m is mounted, in the file system of the mount that carries it.
func spot(m, parent Mount) part {
	below := strings.TrimPrefix(m.Point, strings.TrimSuffix(parent.Point, "/"))
	return part{parent.Major, parent.Minor, filepath.Join(cleanRoot(parent), below)}
}

// cleanRoot is m.Root, also once it was removed.
func cleanRoot(m Mount) string { return strings.TrimSuffix(m.Root, "//deleted") }
