package csi

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/registry"
)

// TestMain lets the test binary be a plugin process that can be killed.
func TestMain(m *testing.M) {
	if socket := os.Getenv("DRIVER_TEST_PLUGIN"); socket != "" {
		p, err := csifake.New(csifake.Config{Socket: socket, Blind: true, Caps: csifake.AllCaps})
		if err == nil {
			err = p.Run(context.Background())
		}
		fmt.Fprintln(os.Stderr, "plugin:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// patience is longer than any operation of these tests takes.
const patience = time.Minute

func patient(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// socketDir is a directory whose path leaves room for a socket's name.
func socketDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// process runs a plugin in a separate process. kill sends SIGKILL and waits.
func process(t *testing.T, socket string) (kill func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "DRIVER_TEST_PLUGIN="+socket)
	cmd.Stderr = os.Stderr
	must(t, cmd.Start())
	kill = sync.OnceFunc(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	t.Cleanup(kill)
	return kill
}

// eventually waits until the condition holds.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for ctx := patient(t); !holds(); time.Sleep(time.Millisecond) {
		if ctx.Err() != nil {
			t.Fatalf("it never came true that %s", what)
		}
	}
}

// receive returns the next value of the channel.
func receive[T any](t *testing.T, from <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-from:
	case <-patient(t).Done():
		t.Fatal("nothing came")
	}
	return v
}

// answers waits until the plugin at the socket answers a probe.
func answers(t *testing.T, c *Conn) {
	t.Helper()
	ctx := patient(t)
	eventually(t, "the plugin answers", func() bool { ready, err := c.Probe(ctx); return ready && err == nil })
}

// table has the instances that a fleet can look up.
type table map[registry.InstanceKey]registry.Instance

func (t table) Get(k registry.InstanceKey) (registry.Instance, bool) { in, ok := t[k]; return in, ok }

var taskKey = registry.TaskKey{Alloc: "alloc", Task: "plugin"}

func instanceKey(role registry.Role) registry.InstanceKey {
	return registry.InstanceKey{Role: role, Plugin: "disk", Alloc: taskKey.Alloc, Task: taskKey.Task}
}

var nodeKey, controllerKey = instanceKey(registry.RoleNode), instanceKey(registry.RoleController)

// fleetFor returns a fleet in which a monolith is registered at the socket.
func fleetFor(t *testing.T, socket string) *Fleet {
	t.Helper()
	at := registry.Endpoint{Host: socket, Task: "/csi/csi.sock"}
	instances := table{}
	for _, k := range []registry.InstanceKey{nodeKey, controllerKey} {
		instances[k] = registry.Instance{InstanceKey: k, Endpoint: at}
	}
	f := New(instances, Observer{Metrics: &CallMetrics{}})
	t.Cleanup(f.CloseAll)
	register(f, instances)
	return f
}

// register stores the description of the plugin at the socket, if there is a plugin, as a supervisor does.
func register(f *Fleet, instances table) {
	for k, in := range instances {
		c, err := f.Connect(k.Plugin, taskKey, in.Endpoint)
		if err != nil {
			continue
		}
		if said, err := c.Describe(context.Background(), []registry.Role{k.Role}); err == nil {
			in.Fingerprint = said[k.Role]
			instances[k] = in
		}
	}
}

// assumeDescribed makes the fleet believe that the server, which is not a plugin, has described itself as registered.
func assumeDescribed(t *testing.T, f *Fleet) *Fleet {
	t.Helper()
	l, err := open(t, f).connect(patient(t))
	must(t, err)
	l.setDescription(map[registry.Role]registry.Fingerprint{registry.RoleNode: {}, registry.RoleController: {}})
	return f
}

// open returns the connection of the fleet's only task.
func open(t *testing.T, f *Fleet) *Conn {
	t.Helper()
	c, _, err := f.beginCall(nodeKey)
	must(t, err)
	return c
}

// start returns a plugin in this process, in a directory that outlives it, and a fleet with it.
func start(t *testing.T, cfg csifake.Config) (*csifake.Plugin, *Fleet) {
	t.Helper()
	cfg.Blind = true
	if cfg.Caps == nil {
		cfg.Caps = csifake.AllCaps
	}
	cfg.AnyVolume = true
	if cfg.Socket == "" {
		cfg.Socket = filepath.Join(socketDir(t), "csi.sock")
	}
	fake := csifake.Start(t, cfg)
	return fake, fleetFor(t, fake.Socket())
}

// mutatingCall returns the call of the RPC.
func mutatingCall(rpc registry.RPC) call {
	return mutating[slices.IndexFunc(mutating, func(c call) bool { return c.rpc == rpc })]
}

// calls returns how many calls of the RPCs the plugin's journal has. Without RPCs it counts all but descriptions.
func calls(t *testing.T, fake *csifake.Plugin, rpcs ...string) int {
	t.Helper()
	return len(callsOf(t, fake, rpcs...))
}

var introductions = []string{"GetPluginInfo", "GetPluginCapabilities", "ControllerGetCapabilities",
	"NodeGetCapabilities", "NodeGetInfo"}

func callsOf(t *testing.T, fake *csifake.Plugin, rpcs ...string) []journal.Call {
	t.Helper()
	all, err := fake.Calls(rpcs...)
	must(t, err)
	if len(rpcs) == 0 {
		all = slices.DeleteFunc(all, func(c journal.Call) bool { return slices.Contains(introductions, c.RPC) })
	}
	return all
}

// wantNone fails if s has one of the words.
func wantNone(t *testing.T, what, s string, words ...string) {
	t.Helper()
	for _, w := range words {
		if strings.Contains(s, w) {
			t.Errorf("%s shows %q: %s", what, w, s)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
