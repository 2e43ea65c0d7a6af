package csi

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
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

// superviseTask supervises the task.
func superviseTask(t *testing.T, socket string) *watched {
	t.Helper()
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
	s := supervisor.New(w.log, supervised{fleet}, clock, func() float64 { return 0.5 }, hclog.NewNullLogger())
	spec := hooks.PluginSpec{ID: "disk", Type: hooks.TypeMonolith, HealthTimeout: time.Hour, Heartbeat: hooks.Heartbeat{
		Interval: time.Hour, Timeout: patience, Failures: 3,
	}}
	at := hooks.Preparation{Socket: socket, Endpoint: registry.Endpoint{Host: socket, Task: socket}}
	ctx, cancel := context.WithCancel(context.Background())
	running := make(chan error, 1)
	go func() { running <- s.Run(ctx, task, spec, at) }()
	t.Cleanup(func() {
		cancel()
		if err := <-running; !errors.Is(err, context.Canceled) {
			t.Errorf("Run returned %v", err)
		}
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

// TestProcessDiesAndComesBack: a real process, killed and started again, without any heartbeat in between.
func TestProcessDiesAndComesBack(t *testing.T) {
	socket := filepath.Join(socketDir(t), "csi.sock")
	w := superviseTask(t, socket)
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
