package csi

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/internal/csifake"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	supervisor "holdfast/shim/internal/task"
)

// watched is a plugin task under supervision, over real sockets.
type watched struct {
	t      *testing.T
	log    *registrytest.Log
	events chan registry.Event
}

// supervised is a fleet as supervisors use it.
type supervised struct{ *Fleet }

func (s supervised) Connect(id registry.PluginID, t registry.TaskKey, at registry.Endpoint) (supervisor.Plugin, error) {
	return s.Fleet.Connect(id, t, at)
}

// superviseTask watches the task. sockets may stand in front of the real directories.
func superviseTask(t *testing.T, socket string, sockets func(*supervisor.Directories) supervisor.Sockets) *watched {
	t.Helper()
	dirs, err := supervisor.NewDirectories()
	if err != nil {
		t.Fatal(err)
	}
	w := &watched{t: t, log: registrytest.NewLog(time.Now), events: make(chan registry.Event, registry.MaxEvents)}
	boot := registry.BootTime{Boot: "boot", At: time.Hour}
	task := registry.Task{TaskKey: taskKey, Attempt: 1, Phase: registry.TaskRunning, Started: boot}
	if _, err := w.log.Commit(t.Context(), func(registry.View) (registry.Change, error) {
		return registry.Change{Put: []registry.Record{task}}, nil
	}); err != nil {
		t.Fatal(err)
	}
	w.log.OnApplied(func(a registry.Applied) {
		for _, e := range a.Change.Events {
			w.events <- e
		}
	})
	began := time.Now()
	clock := supervisor.Clock{Now: time.Now, Boot: func() registry.BootTime {
		return registry.BootTime{Boot: boot.Boot, At: boot.At + time.Since(began)}
	}}
	fleet := New(nil)
	s := supervisor.New(w.log, supervised{fleet}, sockets(dirs), clock, func() float64 { return 0.5 }, hclog.NewNullLogger())
	spec := hooks.PluginSpec{ID: "disk", Type: hooks.TypeMonolith, HealthTimeout: time.Hour, Heartbeat: hooks.Heartbeat{
		Interval: time.Hour, Timeout: patience, Failures: 3,
	}}
	at := hooks.Preparation{Socket: socket, Endpoint: registry.Endpoint{Host: socket, Task: socket}}
	ctx, cancel := context.WithCancel(context.Background())
	telling, running := make(chan error, 1), make(chan error, 1)
	go func() { telling <- dirs.Run(ctx) }()
	go func() { running <- s.Run(ctx, task, spec, at) }()
	t.Cleanup(func() {
		cancel()
		if err := <-running; !errors.Is(err, context.Canceled) {
			t.Errorf("Run returned %v", err)
		}
		<-telling
		_ = dirs.Close()
		fleet.CloseAll()
	})
	return w
}

// await reads events up to the next one of the kind.
func (w *watched) await(kind registry.EventKind) (seen []registry.EventKind, last registry.Event) {
	w.t.Helper()
	ctx := patient(w.t)
	for {
		select {
		case last = <-w.events:
			seen = append(seen, last.Kind)
			if last.Kind == kind {
				return seen, last
			}
		case <-ctx.Done():
			w.t.Fatalf("no event %q; there were %v", kind, seen)
		}
	}
}

// blind never comes back for its caller's back-off: only a change in the directory wakes it.
type blind struct {
	*supervisor.Directories
	ctx     context.Context
	waiting chan struct{} // has one for each wait that has begun
}

func (b blind) Changed(ctx context.Context, socket string) {
	select {
	case b.waiting <- struct{}{}:
	default:
	}
	b.Directories.Changed(b.ctx, socket)
}

// TestRegisteredAsTheSocketAppears: without its back-off a watch is woken by inotify alone. The socket is moved into place, so that it
// listens as it appears.
func TestRegisteredAsTheSocketAppears(t *testing.T) {
	dir := socketDir(t)
	real := filepath.Join(socketDir(t), "csi.sock")
	csifake.Start(t, csifake.Config{Socket: real, Blind: true})
	ctx, cancel := context.WithCancel(context.Background())
	waiting := make(chan struct{}, 1)
	socket := filepath.Join(dir, "csi.sock")
	w := superviseTask(t, socket, func(d *supervisor.Directories) supervisor.Sockets { return blind{d, ctx, waiting} })
	t.Cleanup(cancel) // before the watch has to end
	<-waiting
	if err := os.Link(real, socket); err != nil {
		t.Fatal(err)
	}
	for ctx := patient(t); len(w.events) == 0 && ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
		if err := os.Chmod(socket, 0o600); err != nil { // a change for a wait that had not quite begun
			t.Fatal(err)
		}
	}
	seen, _ := w.await(registry.EventTaskRegistered)
	want := []registry.EventKind{
		registry.EventRegistered, registry.EventRegistered, registry.EventActivated, registry.EventActivated, registry.EventTaskHealthy, registry.EventTaskRegistered,
	}
	if !slices.Equal(seen, want) {
		t.Errorf("events are %v, want %v", seen, want)
	}
}

// TestProcessDiesAndComesBack: a real process, killed and started again, without any heartbeat in between.
func TestProcessDiesAndComesBack(t *testing.T) {
	socket := filepath.Join(socketDir(t), "csi.sock")
	w := superviseTask(t, socket, func(d *supervisor.Directories) supervisor.Sockets { return d })
	kill := process(t, socket)
	w.await(registry.EventTaskRegistered)
	for range 2 {
		kill()
		seen, last := w.await(registry.EventTaskUnhealthy)
		if last.Cause != registry.CauseGone || last.Detail == "" || len(seen) != 3 {
			t.Errorf("its end is %+v after %v", last, seen)
		}
		kill = process(t, socket)
		if seen, _ := w.await(registry.EventTaskHealthy); len(seen) != 3 {
			t.Errorf("its return is %v", seen)
		}
	}
}
