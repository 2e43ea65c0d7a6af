// Package hosttest has a shim in memory, for the tests of an orchestrator. It needs no shim binary, no CSI plugin, no
// root and no mounts. Everything else is real: the orchestrator uses a host.Host, which starts and swaps shims, holds
// and repeats calls, and follows events. Jobs and volume files are parsed as a real shim does.
//
//	shim := hosttest.New()
//	defer shim.Close()
//	h, err := host.Open(ctx, shim.Config())
//
// A task with a plugin counts as healthy once host.Host.TaskStarted has reported it; see Shim.SetHealth. A volume is a
// directory, which plans bind. Calls that this package does not implement return host.ErrUnsupported: those for
// snapshots, CSI endpoints and the doctor, for example, and those for volumes with a create or ephemeral block.
// Callbacks of host.Config are not called.
package hosttest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"holdfast/host"
	"holdfast/host/internal/launch"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// Call is a call that the host has made at the shim.
type Call struct {
	Method  string        // service and method of package holdfast.v1, such as "Volumes/Create"
	Request proto.Message // for example a *holdfastv1.CreateVolumeRequest
}

// Shim is a shim in memory. Its state outlives its shim processes, which are servers in this process. It serves one
// host at a time, and is safe for concurrent use.
type Shim struct {
	dir   string
	log   *registrytest.Log
	table *registry.Registry
	feed  *registry.Feed

	mu       sync.Mutex // guards all below; held only to read or change it
	changed  chan struct{}
	active   *process // nil: none
	started  int      // processes
	binaries int
	calls    []Call
	faults   map[string][]error
	answers  map[string]proto.Message // of mutating calls, by operation ID
}

// New returns a shim that knows no plugin and no volume. It panics if it cannot make a temporary directory.
func New() *Shim {
	dir, err := os.MkdirTemp("", "hf-") // a short path, as sockets and CSI need
	if err != nil {
		panic(fmt.Sprintf("hosttest: %v", err))
	}
	s := &Shim{
		dir: dir, log: registrytest.NewLog(time.Now), changed: make(chan struct{}),
		faults: map[string][]error{}, answers: map[string]proto.Message{},
	}
	s.table = registry.New(s.log)
	s.feed = registry.NewFeed(s.log, s.table, registry.RecentEvents)
	s.log.OnApplied(s.table.Applied)
	s.log.OnApplied(s.feed.Applied)
	s.log.OnApplied(func(registry.Applied) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.wakeLocked()
	})
	return s
}

// Close removes the directory of the shim, with the state directory of its hosts. Close the host before.
func (s *Shim) Close() { _ = os.RemoveAll(s.dir) }

// Config returns the configuration of a host that runs this shim. A test may change all but Start, for example set
// Workload for a host that was started again.
func (s *Shim) Config() host.Config {
	return host.Config{
		StateDir: filepath.Join(s.dir, "state"), RunDir: filepath.Join(s.dir, "run"), Node: "node-1",
		Shim: s.Binary(), Start: s.start,
	}
}

// Binary returns another binary of the shim at each call, for host.Host.Swap.
func (s *Shim) Binary() host.Binary {
	s.mu.Lock()
	s.binaries++
	n := s.binaries
	s.mu.Unlock()
	path := filepath.Join(s.dir, fmt.Sprintf("shim-%d", n))
	if err := os.WriteFile(path, fmt.Appendf(nil, "hosttest %d\n", n), 0o700); err != nil {
		panic(fmt.Sprintf("hosttest: %v", err))
	}
	return host.Binary{Path: path}
}

// Calls returns the calls of the host so far, without those that start, stop, ping or swap shims.
func (s *Shim) Calls() []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// Fail makes the next calls of a method fail without an effect, each with the next of the errors. The host gets the
// text and the kind of the error, such as host.ErrUnavailable.
func (s *Shim) Fail(method string, errs ...error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults[method] = append(s.faults[method], errs...)
}

// Crash ends the active process as a signal would. The host starts another one, and repeats its calls there.
func (s *Shim) Crash() {
	s.mu.Lock()
	p := s.active
	s.mu.Unlock()
	if p != nil {
		p.end(&launch.Exit{PID: p.pid, Signal: 9})
	}
}

// SetHealth changes the health of the plugin that a started task runs. The detail is for people. Calls that need an
// unhealthy plugin wait until it is healthy, as with a real shim.
func (s *Shim) SetHealth(task host.TaskKey, state registry.HealthState, detail string) {
	s.mustCommit(func(v registry.View) (registry.Change, error) {
		var instances []registry.Instance
		for _, i := range v.AllInstances() {
			if i.TaskKey() == task {
				i.Health = registry.Health{State: state, Cause: registry.CauseProbed, Detail: detail, Since: time.Now()}
				if state == registry.Unhealthy {
					i.Health.Cause = registry.CauseMissed
				}
				instances = append(instances, i)
			}
		}
		if len(instances) == 0 {
			return registry.Change{}, registry.Errorf(registry.ErrNotFound, "no task %s runs a plugin", task)
		}
		return registry.PutChange(v, time.Now(), instances...), nil
	})
}

// RequestRestart asks the host to restart a task, as the shim does for a plugin that does not become healthy.
func (s *Shim) RequestRestart(task host.TaskKey, detail string) {
	s.mustCommit(func(v registry.View) (registry.Change, error) {
		t, known := v.Task(task)
		if !known {
			return registry.Change{}, registry.Errorf(registry.ErrNotFound, "no task %s runs a plugin", task)
		}
		t.Restart = &registry.RestartRequest{
			Attempt: t.Attempt, Cause: registry.CauseStartTimeout, Detail: detail, Since: time.Now(),
		}
		return registry.Change{Put: []registry.Record{t}}, nil
	})
}

// mustCommit commits a change. It panics if that fails, as the test has then asked for something impossible.
func (s *Shim) mustCommit(decide func(registry.View) (registry.Change, error)) {
	if _, err := s.log.Commit(context.Background(), decide); err != nil {
		panic(fmt.Sprintf("hosttest: %v", err))
	}
}

// wakeLocked ends the waits for a change. The caller holds s.mu.
func (s *Shim) wakeLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// nextChange returns a channel that is closed at the next commit, or when the active process changes.
func (s *Shim) nextChange() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// view returns the last committed state.
func (s *Shim) view() (view registry.View) {
	_ = s.log.View(context.Background(), func(v registry.View) error { view = v; return nil })
	return view
}
