package csi

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/internal/csifake"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/task"
)

// supervised is a fleet as supervisors use it.
type supervised struct{ *Fleet }

func (s supervised) Connect(id registry.PluginID, t registry.TaskKey, at registry.Endpoint) (task.Plugin, error) {
	return s.Fleet.Connect(id, t, at)
}

// pluginTasks runs supervised plugin tasks over real sockets, and counts the connections to them.
type pluginTasks struct {
	t     *testing.T
	log   *registrytest.Log
	table *registry.Registry
	fleet *Fleet
	tasks *task.Tasks
	open  atomic.Int64
}

// countedConn is a connection that is counted while it is open.
type countedConn struct {
	net.Conn
	closed func()
}

func (c *countedConn) Close() error { c.closed(); return c.Conn.Close() }

// socketDirs is the disk of tasks whose sockets are in directories of the test.
type socketDirs struct{}

func (socketDirs) MakeDirs(dirs []hooks.HostDir) error {
	for _, d := range dirs {
		if err := os.MkdirAll(d.Path, 0o700); err != nil {
			return err
		}
	}
	return nil
}
func (socketDirs) ClearSocket(context.Context, string) (bool, error) { return false, nil }
func (socketDirs) RemoveSocketDir(string) error                      { return nil }
func (socketDirs) SweepSocketDirs(map[string]bool) error             { return nil }

func startPluginTasks(t *testing.T) *pluginTasks {
	t.Helper()
	dir := socketDir(t)
	p := &pluginTasks{t: t, log: registrytest.NewLog(time.Now)}
	p.table = registry.New(p.log)
	p.log.OnApplied(p.table.Applied)
	p.fleet = NewDialing(p.table, p.dial)
	boot := func() registry.BootTime { return registry.BootTime{Boot: "b", At: time.Hour} }
	supervisor := task.New(p.log, supervised{p.fleet}, task.Clock{Now: time.Now, Boot: boot},
		func() float64 { return 0.5 }, hclog.NewNullLogger())
	p.tasks = task.NewTasks(supervisor, socketDirs{}, hooks.Layout{Run: filepath.Join(dir, "r"),
		State: filepath.Join(dir, "s")},
		hooks.Operations)
	ctx, cancel := context.WithCancel(context.Background())
	var loops sync.WaitGroup
	loops.Go(func() { _ = p.tasks.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		loops.Wait()
		p.fleet.CloseAll()
	})
	return p
}

func (p *pluginTasks) dial(ctx context.Context, path string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	p.open.Add(1)
	return &countedConn{conn, sync.OnceFunc(func() { p.open.Add(-1) })}, nil
}

// start starts a plugin task and returns once its controller is registered.
func (p *pluginTasks) start(id registry.AllocID) (*csifake.Plugin, registry.InstanceKey) {
	p.t.Helper()
	text := "task \"t\" {\n driver = \"exec\"\n csi_plugin {\n id = \"p\"\n type = \"controller\"\n}\n}\n"
	job, diags := config.ParseJob(config.Source{Name: "p.hcl", Text: []byte(text)}, config.Options{})
	must(p.t, diags.Err())
	at := hooks.AllocTask{Alloc: id, Task: "t", Attempt: 1, Isolated: true, Sealed: job.Groups[0].Tasks[0].Sealed}
	k := registry.InstanceKey{Role: registry.RoleController, Plugin: "p", Alloc: id, Task: "t"}
	registered := make(chan struct{})
	once := sync.OnceFunc(func() { close(registered) })
	p.log.OnApplied(func(registry.Applied) {
		if _, is := p.table.Get(k); is {
			once()
		}
	})
	if _, err := p.tasks.Starting(p.t.Context(), registry.Call{}, at); err != nil {
		p.t.Fatal(err)
	}
	var record registry.Task
	_ = p.log.View(p.t.Context(), func(v registry.View) error { record, _ = v.Task(k.TaskKey()); return nil })
	fake := csifake.Start(p.t, csifake.Config{Socket: record.Endpoint.Host, Blind: true, Caps: csifake.AllCaps})
	if err := p.tasks.Started(p.t.Context(), registry.Call{}, k.TaskKey(), 1,
		registry.BootTime{Boot: "b", At: time.Hour}); err != nil {
		p.t.Fatal(err)
	}
	receive(p.t, registered)
	return fake, k
}

func (p *pluginTasks) stopping(k registry.InstanceKey) {
	p.t.Helper()
	if err := p.tasks.Stopping(p.t.Context(), registry.Call{}, k.TaskKey(), 1); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pluginTasks) exited(k registry.InstanceKey) {
	p.t.Helper()
	if err := p.tasks.Exited(p.t.Context(), registry.Call{}, k.TaskKey(), 1, task.Exit{Final: true}); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pluginTasks) create(k registry.InstanceKey, name string) error {
	_, err := p.fleet.Create(p.t.Context(), k, CreateRequest{Name: name, Capabilities: []registry.VolumeCapability{
		{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem},
	}})
	return err
}

// When its task is stopped, a plugin has its kill grace to finish calls in flight.
func TestStoppingAPluginTaskLetsCallsEnd(t *testing.T) {
	p := startPluginTasks(t)
	fake, k := p.start("a")
	gate := fake.On("CreateVolume").Hold()
	ended := make(chan error, 1)
	go func() { ended <- p.create(k, "v") }()
	<-gate.Arrived()
	p.stopping(k)
	gate.Open()
	if err := <-ended; err != nil {
		t.Errorf("a call that was at the plugin as its task was stopped: %v", err)
	}
	calls, err := fake.Calls("CreateVolume")
	must(t, err)
	if len(calls) != 1 || calls[0].End == nil || calls[0].End.Code != "OK" || calls[0].Abandoned {
		t.Errorf("the plugin's journal: %+v", calls)
	}
	fake.Stop()
	p.exited(k)
}

// Every connection is closed after its task has exited, even one that a call opened while the task was being stopped.
func TestNoConnectionOutlivesItsPluginTask(t *testing.T) {
	p := startPluginTasks(t)
	var at atomic.Pointer[registry.InstanceKey]
	var load sync.WaitGroup
	end := make(chan struct{})
	for worker := range 4 {
		load.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-end:
					return
				default:
				}
				if k := at.Load(); k != nil {
					_ = p.create(*k, fmt.Sprint("v-", worker, "-", i))
				}
			}
		})
	}
	const updates = 10
	for i := range updates {
		fake, k := p.start(registry.AllocID(fmt.Sprint("a-", i)))
		at.Store(&k)
		p.stopping(k)
		if err := p.create(k, "last"); err != nil {
			t.Errorf("a call of a plugin that is being stopped: %v", err)
		}
		fake.Stop()
		p.exited(k)
		if err := p.create(k, "late"); !errors.Is(err, registry.ErrUnavailable) {
			t.Errorf("a call of a plugin that has exited: %v", err)
		}
	}
	close(end)
	load.Wait()
	p.fleet.mu.Lock()
	left := len(p.fleet.conns)
	p.fleet.mu.Unlock()
	if left > 0 {
		t.Errorf("the fleet keeps %d connections after %d updates", left, updates)
	}
	eventually(t, "all connections are closed", func() bool { return p.open.Load() == 0 })
}
