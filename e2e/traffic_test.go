package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/registry"
)

// traffic is callers who make every call that a host has, all the time. Each call has an end that is known beforehand.
type traffic struct {
	*succession
	plugin  *pluginTask
	stopped context.Context // no new story begins after it
	callers sync.WaitGroup
	streams sync.WaitGroup
	lives   sync.RWMutex // held to write while nothing lives but the plugin, to read by whatever else lives
	calling sync.Mutex   // taken before lives is to write, and while guests are waited for: they have it to read, and would let nobody else come

	mu      sync.Mutex     // guards what follows
	made    map[string]int // calls that ended as they should, by method
	meeting *meeting       // nil: none
}

// meeting is where one caller of each of some methods waits, until all of them make their calls at once.
type meeting struct {
	guests map[string]*guest // by method; nil: not there yet
	begin  chan struct{}
}

// guest is a caller who has come to a meeting.
type guest struct {
	heed  chan struct{} // closed when the call has nothing to do but to wait
	ended chan struct{} // closed when the call has ended
}

// meets returns once a caller of each of the methods has come. They make their calls when begin is closed.
func (tr *traffic) meets(methods []string) *meeting {
	tr.t.Helper()
	m := &meeting{map[string]*guest{}, make(chan struct{})}
	for _, method := range methods {
		m.guests[method] = nil
	}
	if !slices.Contains(methods, "Sync") && !slices.Contains(methods, repair) {
		tr.calling.Lock()
		defer tr.calling.Unlock()
	}
	tr.mu.Lock()
	tr.meeting = m
	tr.mu.Unlock()
	tr.eventually(fmt.Sprintf("a caller of each of %v waits", methods), func() bool {
		tr.mu.Lock()
		defer tr.mu.Unlock()
		return !slices.Contains(slices.Collect(maps.Values(m.guests)), nil)
	})
	return m
}

// comes returns when the caller may make a call of the method: at once, unless that is one of a meeting, where nobody has come for it yet.
func (tr *traffic) comes(method string) *guest {
	tr.mu.Lock()
	m := tr.meeting
	if m == nil || !m.misses(method) {
		tr.mu.Unlock()
		return nil
	}
	g := &guest{make(chan struct{}), make(chan struct{})}
	m.guests[method] = g
	tr.mu.Unlock()
	select {
	case <-m.begin:
	case <-tr.stopped.Done():
	}
	return g
}

func (m *meeting) misses(method string) bool {
	g, expected := m.guests[method]
	return expected && g == nil
}

// makes makes a guest's call, or a call of somebody who is none.
func (g *guest) makes(ctx context.Context, f func(context.Context) error) error {
	if g == nil {
		return f(ctx)
	}
	defer close(g.ended)
	return f(&heeded{Context: ctx, heed: g.heed})
}

// ended is the methods whose guests' calls have ended.
func (m *meeting) ended() (methods []string) {
	for method, g := range m.guests {
		if closed(g.ended) {
			methods = append(methods, method)
		}
	}
	return methods
}

// newTraffic is a plugin and nobody who calls yet. stop ends the callers that come, and returns when all calls have ended.
func newTraffic(s *succession) (tr *traffic, stop func()) {
	s.caps = append([]string{"node/GET_VOLUME_STATS", "EXPAND_VOLUME", "expansion/ONLINE"}, everything...)
	tr = &traffic{succession: s, made: map[string]int{}, plugin: s.plugin("alloc-p", csifake.Monolith)}
	stopped, cancel := context.WithCancel(s.t.Context())
	tr.stopped = stopped
	return tr, func() {
		cancel()
		tr.callers.Wait()
		tr.streams.Wait()
	}
}

// rolls starts callers of every method.
func (tr *traffic) rolls() {
	tr.must(tr.create("kept"))
	tr.must(tr.host.DeregisterVolume(tr.ctx(), volumeName("kept")))
	tr.users(3)
	tr.goesOn(func(n int) { tr.pluginLife(fmt.Sprintf("p%d", n)) })
	tr.goesOn(func(n int) { tr.hurried(fmt.Sprintf("hurried-%d", n), time.Duration(1+n*7%40)*time.Millisecond) })
	tr.goesOn(func(n int) { tr.known(fmt.Sprintf("known-%d", n)) })
	tr.goesOn(tr.reader)
	tr.goesOn(tr.refused)
	tr.goesOn(tr.alone)
	tr.listens(tr.stopped)
}

// users starts callers who make volumes and use them.
func (tr *traffic) users(count int) {
	for i := range count {
		tr.goesOn(func(n int) { tr.volumeLife(fmt.Sprintf("v-%d-%d", i, n)) })
	}
}

// goesOn tells one story after the other.
func (tr *traffic) goesOn(story func(n int)) {
	tr.callers.Go(func() {
		for n := 0; tr.stopped.Err() == nil; n++ {
			story(n)
			pause(tr.stopped, time.Millisecond)
		}
	})
}

// repair is the method Doctor, where it changes something.
const repair = "Doctor with repair"

// call makes a call with a deadline of its own, far enough. It has to end as wanted: well, or with that kind of error.
func (tr *traffic) call(method string, wanted error, f func(context.Context) error) bool {
	var g *guest
	if wanted == nil { // what is refused may need no shim for that
		g = tr.comes(method)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(tr.stopped), patience)
	defer cancel()
	err := g.makes(ctx, f)
	if wanted == nil && err != nil || !errors.Is(err, wanted) {
		tr.t.Errorf("%s ended with %v; it should be %v", method, err, wanted)
		return false
	}
	tr.count(method)
	return true
}

func (tr *traffic) count(method string) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.made[method]++
}

// calls is how many calls of each method have ended.
func (tr *traffic) calls() map[string]int {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	made := map[string]int{}
	for method, n := range tr.made {
		made[method] = n
	}
	return made
}

// flows returns once every method has been called, and volumes have come and gone, since it was called.
func (tr *traffic) flows(methods ...string) {
	tr.t.Helper()
	was := tr.calls()
	tr.eventually("the calls go on", func() bool {
		now := tr.calls()
		for _, method := range methods {
			if now[method] <= was[method] {
				return false
			}
		}
		return true
	})
}

// neverMade is the methods of a host that were not called, or never ended as they should.
func (tr *traffic) neverMade() (methods []string) {
	made := tr.calls()
	for m := range reflect.TypeFor[*host.Host]().Methods() {
		if made[m.Name] == 0 {
			methods = append(methods, m.Name)
		}
	}
	return methods
}

// volumeLife is a volume that is made, used once, forgotten, registered and deleted.
func (tr *traffic) volumeLife(id string) {
	tr.lives.RLock()
	defer tr.lives.RUnlock()
	h, name := tr.host, volumeName(id)
	var spec host.VolumeSpec
	var group host.AllocGroup
	var plans map[string]host.Plan
	steps := []struct {
		method string
		wanted error
		call   func(context.Context) error
	}{
		{"ParseVolume", nil, func(ctx context.Context) (err error) { spec, err = tr.spec(ctx, id); return err }},
		{"CreateVolume", nil, func(ctx context.Context) error { return second(h.CreateVolume(ctx, spec)) }},
		{"Parse", nil, func(ctx context.Context) (err error) { group, err = tr.user(ctx, id); return err }},
		{"PrepareAlloc", nil, func(ctx context.Context) (err error) { plans, err = h.PrepareAlloc(ctx, group); return err }},
		{"", nil, func(context.Context) error {
			return os.WriteFile(filepath.Join(env(plans["t"], "HOLDFAST_VOLUME_V0"), "f"), []byte("x"), 0o600)
		}},
		{"VolumeStats", nil, func(ctx context.Context) error { _, _, err := h.VolumeStats(ctx, name); return err }},
		{"ExpandVolume", nil, func(ctx context.Context) error { return tr.expanded(ctx, name, 3<<30) }},
		{"DeleteVolume", host.ErrConflict, func(ctx context.Context) error { return h.DeleteVolume(ctx, name) }},
		{"Claims", nil, func(ctx context.Context) error { return tr.claimed(ctx, group.Alloc) }},
		{"ReleaseAlloc", nil, func(ctx context.Context) error { return h.ReleaseAlloc(ctx, group.Alloc) }},
		{"Allocs", nil, func(ctx context.Context) error { return none(h.Allocs(ctx, group.Alloc)) }},
		{"ExpandVolume", host.ErrInvalid, func(ctx context.Context) error { return tr.expanded(ctx, name, 1) }},
		{"DeleteVolume", nil, func(ctx context.Context) error { return h.DeleteVolume(ctx, name) }},
		{"Volumes", nil, func(ctx context.Context) error { return none(h.Volumes(ctx, host.VolumeQuery{Name: name})) }},
	}
	for _, s := range steps {
		if !tr.call(s.method, s.wanted, s.call) {
			return
		}
	}
}

// expanded has a volume expanded, and says what is wrong unless it is as large, here too.
func (tr *traffic) expanded(ctx context.Context, name host.VolumeName, size int64) error {
	v, err := tr.host.ExpandVolume(ctx, name, host.CapacityRange{Required: size})
	if err == nil && (v.Capacity != size || v.Expansion.Pending()) {
		err = fmt.Errorf("expanded to %d bytes: %+v", v.Capacity, v.Expansion)
	}
	return err
}

// known is a volume that its plugin has had for long, which is made known and forgotten.
func (tr *traffic) known(id string) {
	tr.lives.RLock()
	defer tr.lives.RUnlock()
	var spec host.VolumeSpec
	if !tr.call("ParseVolume", nil, func(ctx context.Context) (err error) { spec, err = tr.spec(ctx, id); return err }) {
		return
	}
	spec.External, spec.Context = registry.ExternalID(csifake.VolumeID("kept")), map[string]string{"csifake/name": "kept", "pool": "p"}
	tr.call("RegisterVolume", nil, func(ctx context.Context) error { return second(tr.host.RegisterVolume(ctx, spec)) })
	tr.call("DeregisterVolume", nil, func(ctx context.Context) error { return tr.host.DeregisterVolume(ctx, volumeName(id)) })
}

// spec is a volume's, parsed.
func (tr *traffic) spec(ctx context.Context, id string) (host.VolumeSpec, error) {
	text := fmt.Sprintf("id = %q\nname = %q\nplugin_id = \"fake\"\ncapability {\n access_mode = %q\n attachment_mode = \"file-system\"\n}\n", id, id, oneWriter)
	spec, _, err := tr.host.ParseVolume(ctx, host.Source{Name: id + ".hcl", Text: []byte(text)}, host.ParseOptions{})
	return spec, err
}

// user is an alloc that uses the volume.
func (tr *traffic) user(ctx context.Context, volume string) (host.AllocGroup, error) {
	job, _, err := tr.host.Parse(ctx, host.Source{Name: "user.hcl", Text: []byte(groupText(oneWriter, volume))}, host.ParseOptions{})
	if err != nil {
		return host.AllocGroup{}, err
	}
	return host.AllocGroup{Alloc: host.AllocID("user-" + volume), Job: "user", Group: "g", Namespace: "default", Sealed: job.Groups[0].Sealed}, nil
}

// claimed says what is wrong unless the alloc has exactly one claim.
func (tr *traffic) claimed(ctx context.Context, id host.AllocID) error {
	list, _, err := tr.host.Claims(ctx)
	held := 0
	for _, c := range list {
		if c.Alloc == id {
			held++
		}
	}
	if err == nil && held != 1 {
		err = fmt.Errorf("%s has %d claims", id, held)
	}
	return err
}

// none says what is wrong unless a list is empty.
func none[T any](list []T, _ host.Seq, err error) error {
	if err == nil && len(list) > 0 {
		err = fmt.Errorf("it is there: %+v", list)
	}
	return err
}

// pluginLife is a plugin's task that starts, is healthy, and ends on purpose.
func (tr *traffic) pluginLife(id string) {
	tr.lives.RLock()
	defer tr.lives.RUnlock()
	h := tr.host
	task := host.AllocTask{Alloc: host.AllocID("alloc-" + id), Task: "plugin", Attempt: 1}
	var plan host.Plan
	ok := tr.call("Parse", nil, func(ctx context.Context) (err error) { task.Sealed, err = tr.seal(ctx, id); return err }) &&
		tr.call("TaskStarting", nil, func(ctx context.Context) (err error) { plan, err = h.TaskStarting(ctx, task); return err })
	if !ok {
		return
	}
	p := tr.run(id, plan)
	defer p.end()
	tr.call("TaskStarted", nil, func(ctx context.Context) error { return h.TaskStarted(ctx, task.Key(), 1) })
	tr.eventually(id+" is healthy", func() bool {
		var list host.PluginList
		tr.call("Plugins", nil, func(ctx context.Context) (err error) {
			list, _, err = h.Plugins(ctx, host.PluginQuery{Plugin: host.PluginID(id)})
			return err
		})
		return len(list.Instances) == 2
	})
	tr.call("TaskStopping", nil, func(ctx context.Context) error { return h.TaskStopping(ctx, task.Key(), 1) })
	p.end()
	tr.call("TaskExited", nil, func(ctx context.Context) error { return h.TaskExited(ctx, task.Key(), 1, 0, 0, true) })
}

func (tr *traffic) seal(ctx context.Context, id string) (host.Sealed, error) {
	text := fmt.Sprintf("task \"plugin\" {\n driver = \"raw_exec\"\n csi_plugin {\n id = %q\n type = \"monolith\"\n }\n}\n", id)
	job, _, err := tr.host.Parse(ctx, host.Source{Name: "plugin.hcl", Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		return nil, err
	}
	return job.Groups[0].Tasks[0].Sealed, nil
}

// hurried is a call whose caller has hardly any time: it is done, or the time was up. Who asks again, and has time, has what was asked for.
func (tr *traffic) hurried(id string, limit time.Duration) {
	tr.lives.RLock()
	defer tr.lives.RUnlock()
	var spec host.VolumeSpec
	if !tr.call("ParseVolume", nil, func(ctx context.Context) (err error) { spec, err = tr.spec(ctx, id); return err }) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(tr.stopped), limit)
	defer cancel()
	if _, err := tr.host.CreateVolume(ctx, spec); err != nil && (!errors.Is(err, context.DeadlineExceeded) || ctx.Err() == nil) {
		tr.t.Errorf("a volume that had to be made in %s: %v", limit, err)
	}
	tr.call("CreateVolume", nil, func(ctx context.Context) error { return second(tr.host.CreateVolume(ctx, spec)) })
	tr.call("DeleteVolume", nil, func(ctx context.Context) error { return tr.host.DeleteVolume(ctx, volumeName(id)) })
}

// reader looks at everything.
func (tr *traffic) reader(int) {
	h := tr.host
	for method, look := range map[string]func(context.Context) error{
		"Status":    func(ctx context.Context) error { return second(h.Status(ctx)) },
		"Volumes":   func(ctx context.Context) error { _, _, err := h.Volumes(ctx, host.VolumeQuery{}); return err },
		"Allocs":    func(ctx context.Context) error { _, _, err := h.Allocs(ctx, ""); return err },
		"Plugins":   func(ctx context.Context) error { _, _, err := h.Plugins(ctx, host.PluginQuery{}); return err },
		"Swaps":     func(context.Context) error { h.Swaps(); return nil },
		"ShimState": func(context.Context) error { h.ShimState(); return nil },
		"Doctor":    func(ctx context.Context) error { return second(h.Doctor(ctx, false, "")) },
	} {
		tr.call(method, nil, look)
	}
}

// refused is what has to be refused as it always is.
func (tr *traffic) refused(int) {
	pause(tr.stopped, 20*time.Millisecond)
	h := tr.host
	tr.call("TaskStarting", host.ErrInvalid, func(ctx context.Context) error {
		return second(h.TaskStarting(ctx, host.AllocTask{Alloc: "../a", Task: "t", Attempt: 1}))
	})
	tr.call("PrepareAlloc", host.ErrInvalid, func(ctx context.Context) error {
		return second(h.PrepareAlloc(ctx, host.AllocGroup{Alloc: "../a", Namespace: "default"}))
	})
	tr.call("Parse", host.ErrInvalid, func(ctx context.Context) error {
		_, _, err := h.Parse(ctx, host.Source{Name: "bad.hcl", Text: []byte("job {")}, host.ParseOptions{})
		return err
	})
	tr.call("DeleteVolume", host.ErrNotFound, func(ctx context.Context) error { return h.DeleteVolume(ctx, volumeName("none")) })
	tr.call("VolumeStats", host.ErrNotFound, func(ctx context.Context) error { _, _, err := h.VolumeStats(ctx, volumeName("none")); return err })
	tr.call("Watch", host.ErrInvalid, func(ctx context.Context) error { return h.Watch(ctx, host.WatchOptions{Role: "../x"}, nil) })
}

// alone is what is about everything that lives. There is nothing to repair while only the plugin lives.
func (tr *traffic) alone(int) {
	pause(tr.stopped, 200*time.Millisecond)
	tr.calling.Lock()
	defer tr.calling.Unlock()
	tr.lives.Lock()
	defer tr.lives.Unlock()
	living := host.Workload{Tasks: []host.WorkloadTask{{AllocTask: tr.plugin.task, Running: true, Started: tr.sinceBoot()}}}
	tr.call("Sync", nil, func(ctx context.Context) error { return tr.host.Sync(ctx, living) })
	var found host.Diagnosis
	if tr.call("Doctor", nil, func(ctx context.Context) (err error) { found, err = tr.host.Doctor(ctx, false, ""); return err }) {
		tr.call(repair, nil, func(ctx context.Context) error { return second(tr.host.Doctor(ctx, true, found.Digest)) })
	}
	if len(found.Findings) > 0 {
		tr.t.Errorf("nothing lives, and there is something to repair: %+v", found.Findings)
	}
}

// listens follows what can be followed, until ctx ends. Nothing else ends it.
func (tr *traffic) listens(ctx context.Context) {
	for method, follow := range map[string]func() error{
		"Watch":    func() error { return tr.host.Watch(ctx, host.WatchOptions{}, func(host.Event) error { return nil }) },
		"Restarts": func() error { return tr.host.Restarts(ctx, func([]host.PendingRestart) error { return nil }) },
		"Fingerprints": func() error {
			return tr.host.Fingerprints(ctx, host.PluginQuery{}, func([]host.PluginFingerprint, bool) error { return nil })
		},
	} {
		tr.streams.Go(func() {
			if err := follow(); !errors.Is(err, context.Canceled) {
				tr.t.Errorf("%s ended with %v", method, err)
			}
			tr.count(method)
		})
	}
}

// runs is a plugin that runs beside the world's own.
type runs struct {
	*csifake.Plugin
	ended chan struct{}
}

// end returns when it has ended; again is as good.
func (r runs) end() {
	r.Stop()
	<-r.ended
}

// run runs a plugin that has nothing to do.
func (tr *traffic) run(id string, plan host.Plan) runs {
	p, err := csifake.New(csifake.Config{
		Name: id + ".example.org", Socket: csifake.SocketPath(env(plan, "CSI_ENDPOINT")), Journal: tr.journal, Blind: true, Instance: id,
	})
	tr.must(err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := p.Run(context.WithoutCancel(tr.t.Context())); err != nil {
			tr.t.Errorf("%s: %v", id, err)
		}
	}()
	return runs{p, ended}
}
