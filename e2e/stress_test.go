package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/csifake"
	"holdfast/internal/fault"
	"holdfast/registry"
)

// stress is an agent under load whose shim is replaced while processes are killed. It is judged from outside: by its
// clients and their events, the plugin's journal and storage, the kernel's tables of processes, locks and mounts, and
// the file that a task writes.
type stress struct {
	*agentEnv
	shims     string   // directory of shims
	args      []string // of each agent
	writer    control.Task
	mounts    string // before the load
	events    eventList
	watching  sync.WaitGroup
	stopWatch func()

	stop chan struct{} // closed when the load is to end
	load sync.WaitGroup

	mu        sync.Mutex      // guards what follows
	existing  map[string]bool // volumes whose creation was acknowledged and that no client deletes
	deleted   map[string]bool // volumes whose deletion was acknowledged
	created   []string        // volumes whose creation was acknowledged
	uncertain []string        // volumes whose last call failed
	failures  []error
	answered  int
	jobRuns   int
}

// retryDelay is how long a client waits after a failure.
const retryDelay = 20 * time.Millisecond

// newStress starts an agent with a plugin, a task that writes, and a load.
func newStress(t *testing.T) *stress {
	t.Helper()
	s := &stress{shims: t.TempDir(), stop: make(chan struct{}), existing: map[string]bool{}, deleted: map[string]bool{}}
	s.args = []string{"--shim", fault.Binary(t, faulty, s.shims, "first"), "--shim-swap-budget", waitLimit.String()}
	s.agentEnv = newAgentEnv(t, s.args...)
	s.strict = true
	s.watch()
	s.must(s.runJob("fake.hcl"))
	s.must(os.WriteFile(s.path("script"), []byte(`[
		{"rpc": "CreateVolume", "when": "after", "delay": "20ms"},
		{"rpc": "NodeStageVolume", "when": "after", "delay": "200ms"},
		{"rpc": "NodePublishVolume", "when": "after", "delay": "200ms"}
	]`), 0o600))
	s.must(s.create("kept"))
	s.must(s.create("turn"))
	s.must(s.runJob("writer.hcl", "FAILED", s.path("failed")))
	s.writer = s.alloc("writer").Tasks[0]
	s.waitUntil("the task writes", func() bool { return s.volumeFile("line", "1\n") != "" })
	s.mounts = s.mountTable()
	t.Cleanup(s.endLoad)
	for i := range 3 {
		s.load.Go(func() { s.createAndDelete(i) })
	}
	s.load.Go(s.runJobs)
	s.waitProgress("the load begins")
	return s
}

// binary returns a shim with faults.
func (s *stress) binary(name string, lines ...string) string {
	s.t.Helper()
	return fault.Binary(s.t, faulty, s.shims, name, lines...)
}

// mountTable returns the mounts of this machine but those of the job that comes and goes.
func (s *stress) mountTable() string {
	var lasting strings.Builder
	for line := range strings.Lines(mountLines(s.t, "self", s.dir+"/")) {
		if !strings.Contains(line, "/turn") {
			lasting.WriteString(line)
		}
	}
	return lasting.String()
}

func (s *stress) locked(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func (s *stress) endLoad() {
	if !isClosed(s.stop) {
		close(s.stop)
	}
	s.load.Wait()
}

// createAndDelete creates volumes and deletes every other one.
func (s *stress) createAndDelete(client int) {
	for n := 0; !isClosed(s.stop); n++ {
		id := fmt.Sprintf("v%d-%d", client, n)
		src, err := s.hclFile("disk.volume.hcl", `"disk"`, fmt.Sprintf("%q", id))
		if err == nil {
			_, err = s.client.CreateVolume(s.ctx(), src)
		}
		if !s.record(id, err) {
			continue
		}
		s.locked(func() { s.existing[id] = true; s.created = append(s.created, id) })
		if n%2 == 0 {
			s.locked(func() { delete(s.existing, id) })
			if s.record(id, s.client.DeleteVolume(s.ctx(), volumeName(id))) {
				s.locked(func() { s.deleted[id] = true })
			}
		}
	}
}

// record records the answer to a client.
func (s *stress) record(id string, err error) bool {
	s.locked(func() {
		if err == nil {
			s.answered++
			return
		}
		s.failures = append(s.failures, fmt.Errorf("%s: %w", id, err))
		s.uncertain = append(s.uncertain, id)
	})
	if err != nil {
		time.Sleep(retryDelay)
	}
	return err == nil
}

// runJobs runs a job on a volume again and again.
func (s *stress) runJobs() {
	for !isClosed(s.stop) {
		if err := errors.Join(os.RemoveAll(s.path("turned")), s.runBatch("turn", s.path("turned"))); err != nil {
			s.t.Errorf("a job on a volume: %v", err)
			return
		}
		s.locked(func() { s.jobRuns++ })
	}
}

// waitProgress waits until calls are answered and a job has run.
func (s *stress) waitProgress(what string) {
	s.t.Helper()
	var answered, runs int
	s.locked(func() { answered, runs = s.answered, s.jobRuns })
	s.waitUntil("calls are answered: "+what, func() (progress bool) {
		s.locked(func() { progress = s.answered > answered+5 && s.jobRuns > runs })
		return progress || s.t.Failed()
	})
}

// watch records events from now on, from agent to agent.
func (s *stress) watch() {
	ctx, cancel := context.WithCancel(s.ctx())
	s.watching.Go(func() {
		for ctx.Err() == nil {
			_ = s.client.Events(ctx, uint64(s.events.last()), true, func(event host.Event) error {
				s.events.add(event)
				return nil
			})
			sleep(ctx, retryDelay)
		}
	})
	s.stopWatch = func() { cancel(); s.watching.Wait() }
	s.t.Cleanup(s.stopWatch)
}

// verify compares what there is with what was acknowledged, after whatever happened.
func (s *stress) verify() {
	s.t.Helper()
	s.waitProgress("before verification")
	s.endLoad()
	s.wantOneActive()
	s.wantNothingLost()
	for _, id := range append(s.uncertain, s.created...) {
		if !s.deleted[id] {
			s.must(s.delete(id))
		}
	}
	if now := s.mountTable(); now != s.mounts {
		s.t.Errorf("mounted was\n%s\nand is\n%s", s.mounts, now)
	}
	if now := s.alloc("writer").Tasks[0]; now.PID != s.writer.PID ||
		now.Attempt != s.writer.Attempt || !alive(now.PID) {
		s.t.Errorf("the task was %+v and is %+v", s.writer, now)
	}
	s.waitLines()
	s.must(s.stopJob("writer"))
	s.must(s.delete("kept"))
	s.must(s.delete("turn"))
	s.must(s.stopJob("fake"))
	s.verifyEvents()
}

// wantOneActive waits until one process may write, and it is the one that answers.
func (s *stress) wantOneActive() {
	s.t.Helper()
	s.waitUntil("one shim holds the state and answers", func() bool {
		st, err := s.client.Shim(s.ctx())
		return err == nil && slices.Equal(s.writers(), []int{st.PID})
	})
}

// wantNothingLost checks that acknowledged volumes are listed and at the plugin, and deleted ones are neither.
func (s *stress) wantNothingLost() {
	s.t.Helper()
	list, err := s.client.Volumes(s.ctx(), "")
	s.must(err)
	stored, err := csifake.NewBackend(s.path("backend")).Volumes()
	s.must(err)
	calls, err := csifake.Calls(s.path("journal"), "CreateVolume")
	s.must(err)
	called := map[string]bool{}
	for _, c := range calls {
		called[c.Name] = called[c.Name] || codeOf(c) == "OK"
	}
	listed := map[string]control.Volume{}
	for _, v := range list {
		listed[string(v.ID)] = v
	}
	for id := range s.existing {
		_, is := listed[id]
		if _, there := stored[csifake.VolumeID(id)]; !is || !there || !called[id] {
			s.t.Errorf("volume %s was acknowledged: listed %t, stored %t, in the journal %t", id, is, there, called[id])
		}
	}
	for id := range s.deleted {
		_, is := listed[id]
		if _, there := stored[csifake.VolumeID(id)]; is || there {
			s.t.Errorf("the deletion of volume %s was acknowledged: listed %t, stored %t", id, is, there)
		}
	}
	if turn := listed["turn"]; len(turn.Holders) > 0 {
		s.t.Errorf("released allocs hold a volume: %+v", turn.Holders)
	}
	if alloc := s.alloc("batch"); alloc.ID != "" {
		s.t.Errorf("a purged job exists: %+v", alloc)
	}
	if len(s.existing) == 0 || len(s.deleted) == 0 || s.jobRuns == 0 {
		s.t.Errorf("there was no load: %d volumes, %d deleted, %d jobs", len(s.existing), len(s.deleted), s.jobRuns)
	}
}

// wantNoFailures checks that no call failed.
func (s *stress) wantNoFailures() {
	s.t.Helper()
	s.locked(func() {
		for _, err := range s.failures {
			s.t.Errorf("a call failed, and the host lives: %v", err)
		}
	})
}

// restartAgent starts the next agent after one was killed.
func (s *stress) restartAgent() {
	s.t.Helper()
	select {
	case err := <-s.exited:
		if err == nil || !strings.Contains(err.Error(), "killed") {
			s.t.Errorf("the agent exited: %v", err)
		}
	case <-time.After(waitLimit):
		s.t.Fatal("the agent lives")
	}
	s.agent = nil
	s.must(s.startAgent(s.args...))
}

// verifyEvents checks that the watcher got what a new watcher gets, and that it is what was acknowledged.
func (s *stress) verifyEvents() {
	s.t.Helper()
	var history []host.Event
	s.waitUntil("the end of the plugin's task is reported", func() bool {
		history = nil
		err := s.client.Events(s.ctx(), 0, false, func(event host.Event) error {
			history = append(history, event)
			return nil
		})
		return err == nil && slices.ContainsFunc(history, func(event host.Event) bool {
			return event.Kind == registry.EventTaskRemoved
		})
	})
	s.waitUntil("the watcher has all events", func() bool { return s.events.last() >= history[len(history)-1].Seq })
	s.stopWatch()
	for _, problem := range stressEventErrors(s.events.all(), history, s.created) {
		s.t.Error(problem)
	}
	s.t.Logf("%d events of %d acknowledged volumes", len(s.events.all()), len(s.created))
}

// stressEventErrors compares the watcher's events with those of a new watcher, which may lack the oldest. They must
// add up to nothing and have no illness, and each of the created volumes must be created and deleted once.
func stressEventErrors(watched, now []host.Event, created []string) (problems []string) {
	recent := watched
	if len(now) > 0 && now[0].Kind == host.EventResync {
		from := now[0].Seq
		now = now[1:]
		recent = slices.DeleteFunc(slices.Clone(watched), func(event host.Event) bool { return event.Seq <= from })
	}
	if problem := eventDiff(recent, now); problem != "" {
		problems = append(problems, problem)
	}
	problems = append(problems, replayErrors(watched)...)
	problems = append(problems, healthErrors(watched, nil)...)
	times := map[string]int{}
	for _, event := range watched {
		if event.Kind == "volume created" || event.Kind == "volume deleted" {
			times[fmt.Sprintf("%s %s", event.Kind, event.Volume.ID)]++
		}
	}
	for what, n := range times {
		if n > 1 {
			problems = append(problems, fmt.Sprintf("%q is reported %d times", what, n))
		}
	}
	for _, id := range created {
		for _, what := range []string{"volume created " + id, "volume deleted " + id} {
			if times[what] == 0 {
				problems = append(problems, fmt.Sprintf("%q was acknowledged and never reported", what))
			}
		}
	}
	return problems
}

// TestStressEventsAreJudged is a negative control of stressEventErrors.
func TestStressEventsAreJudged(t *testing.T) {
	event := func(seq host.Seq, kind host.EventKind) host.Event {
		e := host.Event{Seq: seq, Kind: kind, Plugin: "fake"}
		if strings.HasPrefix(string(kind), "volume ") {
			e.Volume = volumeName("v")
		} else {
			e.Role, e.Alloc = host.RoleNode, "alloc"
		}
		return e
	}
	legal := []host.Event{event(1, "registered"), event(3, "volume created"), event(4, "volume deleted"),
		event(7, "deregistered")}
	with := func(at int, more ...host.Event) []host.Event { return slices.Insert(slices.Clone(legal), at, more...) }
	without := func(at int) []host.Event { return slices.Delete(slices.Clone(legal), at, at+1) }
	twice := with(3, event(5, "volume created"), event(6, "volume deleted"))
	sick := with(3, event(5, "unhealthy"), event(6, "healthy"))
	gap := with(2, event(3, host.EventResync))
	for what, c := range map[string]struct {
		watched, now []host.Event
		created      []string
		legal        bool
	}{
		"all once": {legal, legal, []string{"v"}, true},
		"the oldest are forgotten": {legal, append([]host.Event{event(3, host.EventResync)}, legal[2:]...),
			[]string{"v"}, true},
		"the watcher lacks one":      {without(2), legal, []string{"v"}, false},
		"one is lost":                {without(2), without(2), []string{"v"}, false},
		"the watcher gets one twice": {with(1, legal[1]), legal, []string{"v"}, false},
		"the order is wrong": {[]host.Event{legal[0], legal[2], legal[1], legal[3]}, legal, []string{"v"},
			false},
		"one is created twice":    {twice, twice, []string{"v"}, false},
		"the plugin was not sick": {sick, sick, []string{"v"}, false},
		"a volume is missing":     {legal, legal, []string{"v", "w"}, false},
		"a gap":                   {gap, gap, []string{"v"}, false},
	} {
		if problems := stressEventErrors(c.watched, c.now, c.created); (len(problems) == 0) != c.legal {
			t.Errorf("%s: %q", what, problems)
		}
	}
}
