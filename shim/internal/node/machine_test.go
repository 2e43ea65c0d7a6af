package node

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/csifake"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// machine implements Machine in memory. Its mount table has what the plugin has staged and published, without lost
// mounts and with stray mounts and parts. Mounted reports a change only late after the first look at the path.
type machine struct {
	t       *testing.T
	storage *csifake.Backend
	late    time.Duration
	fuse    bool // all mounts are FUSE

	mu      sync.Mutex
	boots   int
	shown   map[string]bool
	changed map[string]time.Time
	stray   map[string]bool // mounts that the plugin does not know
	lost    map[string]bool // mounts that another program has unmounted
	dirs    map[string]bool
	parts   map[string]*mountedPart
	users   map[string]string // of mounts, by path
	full    bool              // volumes have files
	owned   []string          // what SetOwnership has set
	journal []string          // of parts
	// partFault fails a mount or unmount of a part, before or after its effect.
	partFault func(what string) (err error, effect bool)
}

// mountedPart is a part of what was mounted at target. It is stale once that mount was lost.
type mountedPart struct {
	target string
	stale  bool
}

func newMachine(t *testing.T, storage *csifake.Backend) *machine {
	m := &machine{t: t, storage: storage, dirs: map[string]bool{}}
	m.reboot()
	return m
}

func (m *machine) reboot() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.boots++
	m.shown, m.changed, m.parts = map[string]bool{}, map[string]time.Time{}, map[string]*mountedPart{}
	m.stray, m.lost = map[string]bool{}, map[string]bool{}
}

func (m *machine) Served(string) bool { return m.fuse }

func (m *machine) SetOwnership(_ context.Context, _ string, o registry.Ownership) (registry.OwnershipResult, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.partFault != nil {
		if err, _ := m.partFault("own"); err != nil {
			return "", err
		}
	}
	if m.full && !o.Recursive {
		return registry.OwnershipNotEmpty, nil
	}
	m.owned = append(m.owned, o.String())
	return registry.OwnershipSet, nil
}

// Inspect reports each mount as a block device: findPublished asks only about paths of block devices.
func (m *machine) Inspect(_ context.Context, paths ...string) (map[string]mount.Info, error) {
	found := map[string]mount.Info{}
	for _, path := range paths {
		mounted, _ := m.Mounted(path)
		found[path] = mount.Info{Block: mounted}
	}
	return found, nil
}

func (m *machine) Boot() string { return fmt.Sprintf("boot-%d", m.boots) }

func (m *machine) Mounted(path string) (bool, error) {
	is := m.held()[path]
	m.mu.Lock()
	defer m.mu.Unlock()
	if is {
		delete(m.stray, path) // the plugin knows it again
	}
	switch {
	case m.parts[path] != nil:
		return true, nil
	case m.stray[path] || m.lost[path]: // nothing is late any more
		m.shown[path] = m.stray[path]
		delete(m.changed, path)
		return m.shown[path], nil
	}
	since, changes := m.changed[path]
	switch {
	case is == m.shown[path]:
		delete(m.changed, path)
	case !changes && m.late > 0:
		m.changed[path] = time.Now()
	case !changes || time.Since(since) >= m.late:
		m.shown[path] = is
		delete(m.changed, path)
	}
	return m.shown[path], nil
}

// hostPath returns the host's path of a path of the plugin.
func hostPath(path string) string { return strings.Replace(path, tree.Task, tree.Host, 1) }

// held returns the mounts that the plugin knows, by the host's paths.
func (m *machine) held() map[string]bool {
	held := map[string]bool{}
	all, _ := m.storage.Volumes() // a backend in memory does not fail
	for _, v := range all {
		for _, at := range append(v.Published[string(nodeName)], v.Staged[string(nodeName)]) {
			if at != "" {
				held[hostPath(at)] = true
			}
		}
	}
	return held
}

// forgotten records the mounts that the plugin knew before and has forgotten.
func (m *machine) forgotten(before map[string]bool) {
	now := m.held()
	m.mu.Lock()
	defer m.mu.Unlock()
	for path := range before {
		if !now[path] && !m.lost[path] {
			m.stray[path] = true
		}
	}
}

// mountStray mounts something that no record and no plugin knows.
func (m *machine) mountStray(path string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stray[path] = true
}

// unmount unmounts path, as a person does.
func (m *machine) unmount(path string) {
	held := m.held()[path]
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.stray, path)
	delete(m.shown, path)
	for _, p := range m.parts {
		p.stale = p.stale || p.target == path
	}
	if held {
		m.lost[path] = true
	}
}

func (m *machine) Users(points []string) (map[string][]mount.User, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	users := map[string][]mount.User{}
	for _, p := range points {
		if text := m.users[p]; text != "" {
			user := mount.User{Text: text}
			if strings.HasPrefix(text, "/") {
				user.Mount = text
			}
			if _, there, isContainer := strings.Cut(text, "container has it at "); isContainer {
				user.PID, user.There = 7, there
			}
			users[p] = append(users[p], user)
		}
	}
	return users, nil
}

func (m *machine) Unmount(_ context.Context, path string) error {
	if users, _ := m.Users([]string{path}); len(users) > 0 {
		m.t.Errorf("%s is unmounted while it is in use", path)
	}
	m.unmount(path)
	return nil
}

// setUser sets the user of the mount at path. text names a process, or the mount point of a mount, or a container if it
// is "a container has it at PATH". If text is empty, there is no user.
func (m *machine) setUser(path, text string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.users = map[string]string{path: text}
}

// mountedAgain clears the loss of a mount, because the plugin has mounted at the path again.
func (m *machine) mountedAgain(path string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.lost, hostPath(path))
}

// unknown lists the mounts that the plugin does not know.
func (m *machine) unknown() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.stray))
}

// inMount reports whether path lies in a mount. The caller holds m.mu.
func (m *machine) inMount(path string) bool {
	for ; path != "/"; path = filepath.Dir(path) {
		if m.shown[path] || m.stray[path] {
			return true
		}
	}
	return false
}

func (m *machine) MakeDir(path string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.inMount(path) {
		m.t.Errorf("a directory is made at or in a mount: %s", path)
	}
	m.dirs[path] = true
	return nil
}

func (m *machine) RemoveDir(path string) error {
	held := m.held()[path]
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.inMount(filepath.Dir(path)) {
		m.t.Errorf("a directory is removed in a mount: %s", path)
	}
	if held || m.stray[path] {
		return unix.EBUSY
	}
	delete(m.dirs, path)
	return nil
}

// left lists mounts that remain.
func (m *machine) left() (left []string) {
	for _, path := range m.unknown() {
		left = append(left, path+" is still mounted")
	}
	for path := range m.parts {
		left = append(left, path+" is still mounted as a part")
	}
	return left
}

// checkNoParts fails the test if a part of what is mounted at the plugin's path is mounted.
func (m *machine) checkNoParts(target string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for at, p := range m.parts {
		if p.target == hostPath(target) {
			m.t.Errorf("%s is unpublished while a part of it is mounted at %s", target, at)
		}
	}
}

func (m *machine) HasPart(target, at string) (has, mounted bool, err error) {
	there, _ := m.Mounted(target)
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.parts[at]
	return p != nil && p.target == target && !p.stale && there, p != nil || m.stray[at], nil
}

func (m *machine) MountPart(_ context.Context, target, path, at string, create bool) error {
	return m.changePart(fmt.Sprintf("mount %s %v", path, create), func() {
		if m.parts[at] != nil || m.stray[at] || !strings.HasPrefix(at, layout.MountRoot()+"/parts/") {
			m.t.Errorf("a part is mounted at %s", at)
		}
		m.parts[at] = &mountedPart{target: target}
	})
}

func (m *machine) UnmountPart(_ context.Context, at string) error {
	return m.changePart("unmount", func() { delete(m.parts, at) })
}

func (m *machine) changePart(what string, effect func()) (err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.journal = append(m.journal, what)
	happens := false
	if m.partFault != nil {
		err, happens = m.partFault(what)
	}
	if err == nil || happens {
		effect()
	}
	return err
}

// failParts sets a function that decides what happens to mounts and unmounts of parts. With nil they succeed.
func (m *machine) failParts(f func(what string) (err error, effect bool)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.partFault = f
}

// takeParts returns the operations on parts since its last call.
func (m *machine) takeParts() (done []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	done, m.journal = m.journal, nil
	return done
}

// errPartHangs is the failure of a part whose mount or unmount may take effect.
var errPartHangs = registry.Errorf(registry.ErrUncertain, "it hangs")
