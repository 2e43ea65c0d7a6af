package doctor

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

var (
	layout = hooks.Layout{Run: "/run/h", State: "/var/lib/h"}
	noon   = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
	data   = registry.Volume{State: registry.VolumeReady, VolumeSpec: registry.VolumeSpec{Namespace: "default",
		ID: "data", Plugin: "ebs",
		External: "ext-1"}}
	key     = data.VolumeKey()
	claimed = registry.ClaimKey{Volume: key, Alloc: "a1", Request: "vol"}
)

const (
	boot         = "boot-1"
	inspectLimit = 5 * time.Second // of a hung inspection
)

func root() registry.Tree { return registry.Tree{Host: layout.PluginRoot("ebs"), Task: "/csi"} }

func stagedAt() string    { return layout.Staging(key, root()).Host }
func publishedAt() string { return layout.Target(claimed, root()).Host }

// stray returns the path of an unknown volume, in the form of a staging path or a target.
func stray(kind, name string) string {
	if kind == "stage" {
		return filepath.Join(root().Host, "stage", name)
	}
	return filepath.Join(root().Host, "publish", name, "v")
}

// placed returns the records of the volume, attached and staged here.
func placed() []registry.Record {
	return []registry.Record{
		registry.Attachment{Volume: key, Name: data.VolumeName(), Node: "n1", NodeID: "i-1", State: registry.MarkDone},
		registry.Staging{
			Volume: key, Name: data.VolumeName(), State: registry.MarkDone, Stages: true,
			Path:   layout.Staging(key, root()),
			Mounts: true, Boot: boot,
		},
	}
}

func placement() Placement {
	p := placed()
	return Placement{
		Volume: key, Name: data.VolumeName(), Attachment: p[0].(registry.Attachment), Staging: p[1].(registry.Staging),
	}
}

// placedIn is where the volume is attached and staged.
func placedIn(v registry.View) Placement {
	for _, p := range placementsOf(v, "") {
		if p.Volume == key {
			return p
		}
	}
	return Placement{}
}

func ref() registry.Ref {
	return registry.Ref{
		Volume: key, Alloc: "a1", Request: "vol", Target: layout.Target(claimed, root()), Publish: registry.MarkDone,
		Boot:  boot,
		Usage: registry.Usage{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem},
	}
}

func claim() registry.Claim {
	return registry.Claim{Volume: key, Name: data.VolumeName(), Alloc: "a1", Request: "vol", Node: "n1"}
}

func instances(caps ...registry.Capability) []registry.Instance {
	well := registry.Health{State: registry.Healthy, Cause: registry.CauseProbed, Since: noon}
	slices.Sort(caps)
	return []registry.Instance{
		{InstanceKey: registry.InstanceKey{Role: registry.RoleController, Plugin: "ebs", Alloc: "p", Task: "c"},
			Health:   well,
			Endpoint: registry.Endpoint{Host: "/c"}, Fingerprint: registry.Fingerprint{Capabilities: caps}},
		{InstanceKey: registry.InstanceKey{Role: registry.RoleNode, Plugin: "ebs", Alloc: "p", Task: "n"}, Health: well,
			Volumes:  root(),
			Endpoint: registry.Endpoint{Host: "/n"}, Fingerprint: registry.Fingerprint{NodeID: "i-1"}},
	}
}

// machine is a mount table with directories and users, in memory. An unmount of a mount in use fails the test.
type machine struct {
	t           testing.TB
	mu          sync.Mutex
	boot        string
	mounts      mount.Mounts
	files       map[string]int // by existing directory: number of entries that are no directories
	users       map[string][]mount.User
	infos       map[string]mount.Info
	failure     error // of Users and Inspect
	asked       []string
	acts        []string
	before      func(act string) // before each act
	inspections chan []string    // gets the paths of each inspection, if the test receives them
	hang        chan struct{}
}

func newMachine(t testing.TB) *machine {
	m := &machine{t: t, boot: boot, files: map[string]int{}, users: map[string][]mount.User{},
		infos: map[string]mount.Info{}}
	m.dir(root().Host)
	return m
}

func (m *machine) dir(path string) {
	for ; path != "/"; path = filepath.Dir(path) {
		m.files[path] += 0
	}
}

func (m *machine) mount(paths ...string) {
	for _, path := range paths {
		m.dir(path)
		m.mounts = append(m.mounts, mount.Mount{Point: path, FSType: "ext4", Source: "/dev/loop1"})
	}
}

func (m *machine) covered(path string) bool {
	return slices.ContainsFunc(m.mounts, func(o mount.Mount) bool {
		return path == o.Point || strings.HasPrefix(path, o.Point+"/")
	})
}

func (m *machine) Boot() string { return m.boot }

func (m *machine) Mounts(root string) (found mount.Mounts, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range m.mounts {
		if strings.HasPrefix(o.Point, root+"/") {
			found = append(found, o)
		}
	}
	return found, nil
}

func (m *machine) Dirs(root string) (found []mount.DirInfo, _ error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for path := range m.files {
		if !strings.HasPrefix(path, root+"/") || m.covered(path) {
			continue
		}
		d := mount.DirInfo{Path: path, Entries: m.files[path]}
		for other := range m.files {
			if filepath.Dir(other) == path {
				d.Entries++
			}
		}
		found = append(found, d)
	}
	slices.SortFunc(found, func(a, b mount.DirInfo) int { return strings.Compare(b.Path, a.Path) })
	return found, nil
}

func (m *machine) Users(points []string) (map[string][]mount.User, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asked = append(m.asked, points...)
	if m.failure != nil {
		return nil, m.failure
	}
	found := map[string][]mount.User{}
	for _, p := range points {
		for _, u := range m.users[p] {
			if u.Mount == "" || m.covered(u.Mount) {
				found[p] = append(found[p], u)
			}
		}
	}
	return found, nil
}

func (m *machine) Inspect(ctx context.Context, paths ...string) (map[string]mount.Info, error) {
	if m.inspections != nil {
		m.inspections <- paths
	}
	if m.hang != nil {
		select {
		case <-m.hang:
		case <-time.After(inspectLimit):
		case <-ctx.Done():
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failure != nil {
		return nil, m.failure
	}
	seen := map[string]mount.Info{}
	for _, p := range paths {
		seen[p] = m.infos[p]
	}
	return seen, nil
}

func (m *machine) act(format string, args ...any) {
	what := fmt.Sprintf(format, args...)
	if m.before != nil {
		m.before(what)
	}
	m.acts = append(m.acts, what)
}

func (m *machine) Unmount(_ context.Context, path string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.act("unmount %s", path)
	users := slices.DeleteFunc(slices.Clone(m.users[path]), func(u mount.User) bool {
		return u.Mount != "" && !m.covered(u.Mount)
	})
	if len(users) > 0 {
		m.t.Errorf("a mount in use is unmounted: %s", path)
		return unix.EBUSY
	}
	for i, o := range slices.Backward(m.mounts) {
		if o.Point == path {
			m.mounts = slices.Delete(m.mounts, i, i+1)
			return nil
		}
	}
	return unix.EINVAL
}

func (m *machine) RemoveDir(path string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.act("rmdir %s", path)
	for other := range m.files {
		if strings.HasPrefix(other, path+"/") {
			return unix.ENOTEMPTY
		}
	}
	switch {
	case m.covered(path):
		return unix.EBUSY
	case m.files[path] > 0:
		return unix.ENOTEMPTY
	}
	delete(m.files, path)
	return nil
}

// env is a doctor with its machine and its records.
type env struct {
	*machine
	*Doctor
	log  *registrytest.Log
	undo func() // what Undo does
}

func newEnv(t testing.TB, records ...registry.Record) *env {
	w := &env{machine: newMachine(t), log: registrytest.NewLog(func() time.Time { return noon }), undo: func() {}}
	w.put(records...)
	w.build(Options{Live: true})
	return w
}

func (w *env) build(o Options) {
	o.Layout, o.Now, o.Logger = layout, func() time.Time { return noon }, hclog.NewNullLogger()
	if o.Live {
		o.Undo = func(context.Context) error { w.undo(); return nil }
	}
	w.Doctor = New(w.log, w.machine, o)
}

func (w *env) put(records ...registry.Record) {
	w.t.Helper()
	registrytest.Put(w.t, w.log, records...)
}

func (w *env) drop(keys ...registry.Key) {
	w.t.Helper()
	if _, err := registrytest.Write(context.Background(), w.log, registry.Change{Delete: keys}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *env) view(read func(registry.View)) {
	w.t.Helper()
	if err := w.log.View(context.Background(), func(v registry.View) error { read(v); return nil }); err != nil {
		w.t.Fatal(err)
	}
}

// events returns the events of a kind as texts.
func (w *env) events(kind registry.EventKind) (texts []string) {
	w.view(func(v registry.View) {
		all, _ := v.Events(0, registry.MaxEvents)
		for _, e := range all {
			if e.Kind == kind {
				texts = append(texts, e.Detail)
			}
		}
	})
	return texts
}

// brief returns findings as short texts: kind, action and place.
func brief(findings []registry.Finding) (texts []string) {
	for _, f := range findings {
		where := f.Path
		if where == "" {
			where = f.Volume.String()
		}
		texts = append(texts, strings.Join(strings.Fields(fmt.Sprintf("%s %s %s", f.Kind, f.Action, where)), " "))
	}
	return texts
}

func same(t testing.TB, what string, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s:\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
