package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
)

// calm takes the faults back, and everything down.
func (m *mess) calm() {
	for _, s := range m.seats {
		if p := s.plugin(); p != nil {
			p.ClearScript()
		}
	}
	m.mu.Lock()
	var owed []string
	for id := range m.owed {
		owed = append(owed, id)
	}
	for id := range m.living.allocs {
		owed = append(owed, string(id))
	}
	m.mu.Unlock()
	for _, id := range owed {
		if !m.letGo(id, patience) {
			m.t.Errorf("alloc %s cannot be released", id)
			m.explain()
		}
	}
	for _, s := range m.volumes {
		if err := m.remove(s, patience); err != nil && !errors.Is(err, host.ErrNotFound) {
			m.t.Errorf("volume %s cannot be deleted: %v", s.id, err)
			m.explain()
		}
	}
	close(m.over)
	m.nursing.Wait()
}

// explain logs what is there.
func (m *mess) explain() {
	allocs, _, _ := m.host.Allocs(m.ctx(), "")
	for _, a := range allocs {
		m.t.Logf("alloc %s %s waits %q uses %+v", a.ID, a.State, registry.Waits(a.Waiting), a.Uses)
	}
	volumes, _, _ := m.host.Volumes(m.ctx(), host.VolumeQuery{})
	for _, v := range volumes {
		m.t.Logf("volume %s %s placement %+v holders %+v intent %+v", v.ID, v.State, v.Placement, v.Holders, v.Intent)
	}
}

// judge holds what is left against what may be. The mount table and the journal are judged as the world ends.
func (m *mess) judge() {
	m.listed()
	for _, s := range m.seats {
		s.end(false, true)
	}
	m.runs.Wait()
	m.empty()
	m.replayed()
	m.unused()
	m.untidy()
	m.tell()
}

// tell logs what the journal says of the volumes that it is held against. The violation itself is an error as the world ends.
func (m *mess) tell() {
	lines, err := journal.Read(m.journal)
	m.must(err)
	for _, v := range journal.Check(lines, journal.Options{Settled: true}) {
		m.t.Logf("to explain: %s", v)
		if v.Line == 0 {
			continue
		}
		about := lines[v.Line-1]
		for i, l := range lines[max(0, v.Line-200):min(len(lines), v.Line+20)] {
			if l.Volume == about.Volume || l.Kind == journal.Start || l.Kind == journal.Stop {
				m.t.Logf("line %d %s %s %s call %d of %s %s %s peer %d effect %v killed %v", max(0, v.Line-200)+i+1, l.Wall.Format("05.000"), l.Kind, l.RPC,
					l.Call, l.Instance, l.Code, l.Target, l.Peer, l.Effect, l.Killed)
			}
		}
	}
}

// listed: every seat's task is in the list of plugins, and its instances are.
func (m *mess) listed() {
	var want []registry.InstanceKey
	for _, s := range m.seats {
		m.registeredTask(s)
		for _, role := range map[csifake.Role][]registry.Role{
			csifake.Monolith: {registry.RoleController, registry.RoleNode}, csifake.Node: {registry.RoleNode}, csifake.Controller: {registry.RoleController},
		}[s.role] {
			want = append(want, registry.InstanceKey{Role: role, Plugin: registry.PluginID(s.plug.id), Alloc: s.task.Alloc, Task: s.task.Task})
		}
	}
	list, _, err := m.host.Plugins(m.ctx(), host.PluginQuery{})
	if err != nil {
		m.t.Errorf("list plugins: %v", err)
	}
	var got []registry.InstanceKey
	for _, i := range list.Instances {
		got = append(got, i.InstanceKey)
	}
	order := func(a, b registry.InstanceKey) int { return compareText(a.String(), b.String()) }
	slices.SortFunc(want, order)
	slices.SortFunc(got, order)
	if !slices.Equal(got, want) {
		m.t.Errorf("instances are\n%v\nwant\n%v", got, want)
	}
	if len(list.Tasks) != len(m.seats) {
		m.t.Errorf("%d plugin tasks are known, %d run", len(list.Tasks), len(m.seats))
	}
}

func compareText(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// registeredTask waits until the seat's task is registered and healthy.
func (m *mess) registeredTask(s *seat) {
	healthy := func(list host.PluginList) bool {
		n := 0
		for _, i := range list.Instances {
			if i.Alloc == s.task.Alloc && i.Health.State == host.Healthy && i.Attempt == s.task.Attempt {
				n++
			}
		}
		return n > 0
	}
	for deadline := time.Now().Add(patience); ; {
		list, _, err := m.host.Plugins(m.ctx(), host.PluginQuery{Plugin: host.PluginID(s.plug.id)})
		if err == nil && healthy(list) {
			return
		}
		s.nurse() // the last crash may come late
		if time.Now().After(deadline) {
			m.t.Errorf("task %s, attempt %d, is not registered: %+v, %v", s.task.Key(), s.task.Attempt, list, err)
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// empty: no record is left.
func (m *mess) empty() {
	volumes, _, err := m.host.Volumes(m.ctx(), host.VolumeQuery{})
	if err != nil || len(volumes) > 0 {
		m.t.Errorf("volumes left: %+v, %v", volumes, err)
	}
	claims, _, err := m.host.Claims(m.ctx())
	if err != nil || len(claims) > 0 {
		m.t.Errorf("claims left: %+v, %v", claims, err)
	}
	allocs, _, err := m.host.Allocs(m.ctx(), "")
	if err != nil || len(allocs) > 0 {
		m.t.Errorf("allocs left: %+v, %v", allocs, err)
	}
	plugins, _, err := m.host.Plugins(m.ctx(), host.PluginQuery{})
	if err != nil || len(plugins.Instances)+len(plugins.Tasks) > 0 {
		m.t.Errorf("plugins left: %+v, %v", plugins, err)
	}
	st, err := m.host.Status(m.ctx())
	if err != nil || st.OpenIntents > 0 {
		m.t.Errorf("%d intents are open, %v", st.OpenIntents, err)
	}
}

// unused: the storage systems have nothing left.
func (m *mess) unused() {
	for _, p := range m.plugins {
		volumes, err := p.backend.Volumes()
		if err != nil || len(volumes) > 0 {
			m.t.Errorf("the storage of %s still has %+v, %v", p.id, volumes, err)
		}
	}
}

// untidy finds directories of volumes.
func (m *mess) untidy() {
	left, err := filepath.Glob(filepath.Join(m.config.StateDir, "mnt", "*", "*", "*"))
	if err != nil || len(left) > 0 {
		m.t.Errorf("directories left: %v, %v", left, err)
	}
	for _, dir := range left {
		m.tellOf(dir)
	}
	left, err = filepath.Glob(filepath.Join(m.config.RunDir, "t", "*"))
	if err != nil || len(left) > 0 {
		m.t.Errorf("socket directories left: %v, %v", left, err)
	}
}

// tellOf logs when a directory was changed last, and the events that name it.
func (m *mess) tellOf(dir string) {
	if st, err := os.Stat(dir); err == nil {
		m.t.Logf("to explain: %s was changed at %s", dir, st.ModTime().UTC().Format("05.000"))
	}
	for _, e := range m.told.all() {
		if strings.Contains(e.Detail, dir) {
			m.t.Logf("generation %d at %s: %s", e.Generation, e.At.UTC().Format("05.000"), e)
		}
	}
}

// lastAlloc serves a plugin as the very last thing that happens, so that a reader of events knows when it has seen all.
const lastAlloc = "end-monolith-0-1"

func isLast(e host.Event) bool { return e.Kind == registry.EventTaskRemoved && e.Alloc == lastAlloc }

// replayed: the events from the beginning are those that the watcher was told as they happened, and they add up to nothing.
func (m *mess) replayed() {
	end := m.newSeat(&service{id: "end", backend: csifake.NewBackend("")}, csifake.Monolith, 0)
	end.next()
	end.start()
	m.registeredTask(end)
	end.end(false, true)
	m.watching.Wait()
	history := m.history(isLast)
	m.happened(history)
	for _, p := range replay(history) {
		m.t.Errorf("events: %s", p)
	}
	told := m.told.all()
	for i, e := range history {
		if i >= len(told) {
			m.t.Errorf("the watcher was told %d of %d events; the first that it was not is %s", i, len(history), e)
			return
		}
		if got := told[i]; got.String() != e.String() || got.Generation != e.Generation {
			m.t.Errorf("event %d is %s; the watcher was told %s", i, e, got)
			return
		}
	}
}

// happened: a run in which nothing went up or wrong proves nothing.
func (m *mess) happened(history []host.Event) {
	count := map[host.EventKind]int{}
	for _, e := range history {
		count[e.Kind]++
	}
	m.t.Logf("happened: %v, %d shims", count, history[len(history)-1].Generation)
	for _, kind := range lacks(history) {
		m.t.Errorf("no event says %q", kind)
	}
}

// lacks are the kinds of events without which a run proves nothing.
func lacks(history []host.Event) (kinds []host.EventKind) {
	for _, kind := range []host.EventKind{"volume created", "published", "step failed", "activated"} {
		if !slices.ContainsFunc(history, func(e host.Event) bool { return e.Kind == kind }) {
			kinds = append(kinds, kind)
		}
	}
	return kinds
}

// rage waits for a time, and on a busy machine until something has happened.
func (m *mess) rage(long time.Duration) {
	for begin := time.Now(); time.Since(begin) < patience/2; time.Sleep(50 * time.Millisecond) {
		if time.Since(begin) >= long && len(lacks(m.told.all())) == 0 {
			return
		}
	}
}

// history reads the events from the beginning up to the last.
func (w *world) history(last func(host.Event) bool) (list []host.Event) {
	w.until(func(e host.Event) bool {
		list = append(list, e)
		return last(e)
	})
	return list
}

// replay adds events up, and says what does not add up to nothing.
func replay(events []host.Event) (problems []string) {
	opens := map[host.EventKind]host.EventKind{
		"deregistered": "registered", "volume deleted": "volume created", "released": "claimed",
		"detached": "attached", "unstaged": "staged", "unpublished": "published", "task deregistered": "task registered",
	}
	starts := map[host.EventKind]bool{}
	for _, up := range opens {
		starts[up] = true
	}
	strict := map[host.EventKind]bool{"registered": true, "volume created": true, "claimed": true}
	standing := map[string]host.Event{}
	last := host.Seq(0)
	for _, e := range events {
		if e.Kind == host.EventResync {
			problems = append(problems, "a gap: "+e.String())
		}
		if e.Seq <= last {
			problems = append(problems, fmt.Sprintf("%s comes after %d", e, last))
		}
		last = e.Seq
		subject := fmt.Sprint(e.Role, "/", e.Plugin, "/", e.Alloc, "/", e.Task, "/", e.Volume, "/", e.Request)
		if starts[e.Kind] {
			key := string(e.Kind) + subject
			if was, up := standing[key]; up && strict[e.Kind] {
				problems = append(problems, fmt.Sprintf("%s, and before it %s", e, was))
			}
			standing[key] = e
		} else if up := opens[e.Kind]; up != "" {
			key := string(up) + subject
			if _, is := standing[key]; !is && strict[up] {
				problems = append(problems, fmt.Sprintf("%s without its beginning", e))
			}
			delete(standing, key)
		}
	}
	for _, e := range standing {
		problems = append(problems, fmt.Sprintf("%s has no end", e))
	}
	return problems
}

// TestChaosIsJudged: what judges the chaos finds a target that was not unpublished, and an event that was lost.
func TestChaosIsJudged(t *testing.T) {
	w := newWorld(t, everything...)
	p := w.plugin("alloc-p", csifake.Monolith)
	w.must(w.story())
	w.exit(p)
	lines, err := journal.Read(w.journal)
	w.must(err)
	dropped := map[uint64]bool{}
	kept := slices.DeleteFunc(slices.Clone(lines), func(l journal.Line) bool {
		if l.RPC == "NodeUnpublishVolume" {
			dropped[l.Call] = true
		}
		return dropped[l.Call] && (l.Kind == journal.Begin || l.Kind == journal.End) && l.RPC == "NodeUnpublishVolume"
	})
	if len(kept) == len(lines) {
		t.Fatal("nothing was dropped")
	}
	if found := journal.Check(kept, journal.Options{Settled: true}); len(found) == 0 {
		t.Error("a journal without its NodeUnpublish is found legal")
	}
	history := w.history(func(e host.Event) bool { return e.Kind == registry.EventTaskRemoved })
	if problems := replay(history); len(problems) > 0 {
		t.Errorf("a sound history: %v", problems)
	}
	for _, kind := range []host.EventKind{"released", "unpublished", "volume deleted", "deregistered"} {
		less := slices.DeleteFunc(slices.Clone(history), func(e host.Event) bool { return e.Kind == kind })
		if len(replay(less)) == 0 {
			t.Errorf("a history without its events %q is found sound", kind)
		}
	}
}

// openFiles is how many files this process has open.
func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// growth: nothing of the worlds is left in this process.
func growth(t *testing.T, goroutines, files int) {
	t.Helper()
	const slack = 10
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() > goroutines+slack || openFiles(t) > files+slack {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			t.Errorf("goroutines %d -> %d, files %d -> %d\n%s", goroutines, runtime.NumGoroutine(), files, openFiles(t), stacks[:runtime.Stack(stacks, true)])
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}
