package rpc

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"holdfast/hooks"
	"holdfast/internal/mount"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/intent"
	"holdfast/shim/internal/node"
	"holdfast/shim/internal/task"
)

// env is a server over a state in memory, with a connection to it. It has no plugin.
type env struct {
	log       *registrytest.Log
	table     *registry.Registry
	server    *Server
	callbacks *Callbacks
	active    *Active
	release   context.CancelCauseFunc
	conn      *grpc.ClientConn
	services  map[string]grpc.ServiceInfo
}

// newCandidate returns an env whose shim is not active.
func newCandidate(t *testing.T) *env {
	e := &env{log: registrytest.NewLog(time.Now), callbacks: NewCallbacks()}
	e.server = New(idle{}, e.callbacks, hclog.NewNullLogger())
	listener := bufconn.Listen(1 << 20)
	g := grpc.NewServer(grpc.WaitForHandlers(true))
	e.server.Register(g)
	e.services = g.GetServiceInfo()
	var serving sync.WaitGroup
	serving.Go(func() { _ = g.Serve(listener) })
	t.Cleanup(func() { g.Stop(); serving.Wait() })
	dial := func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }
	var err error
	e.conn, err = grpc.NewClient("passthrough:env", grpc.WithContextDialer(dial),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { _ = e.conn.Close() })
	return e
}

func newEnv(t *testing.T) *env {
	e := newCandidate(t)
	e.table = registry.New(e.log)
	feed, notifier := registry.NewFeed(e.log, e.table, registry.RecentEvents), NewNotifier(e.table.Index())
	e.log.OnApplied(func(a registry.Applied) { e.table.Applied(a); feed.Applied(a); notifier.Applied(a) })
	ctx, cancel := context.WithCancelCause(t.Context())
	e.release = cancel
	t.Cleanup(func() { cancel(nil) })
	log := hclog.NewNullLogger()
	calls := intent.Calls{
		Sender: intent.Sender{State: e.log, Now: time.Now}, Plugins: e.table, Secrets: e.callbacks,
		Locks: &intent.Locks{},
	}
	e.active = &Active{
		Node: "here", Generation: 7, State: e.log, Table: e.table, Feed: feed, Notifier: notifier, Context: ctx,
		Tasks:   task.NewTasks(task.New(e.log, nil, task.Clock{Now: time.Now}, nil, log), nil, hooks.Layout{}, nil),
		Uses:    task.Uses{State: e.log, Mounts: noMounts{}, Running: func(registry.TaskKey) int { return 0 }},
		Allocs:  node.NewAllocs(calls, nil, nil, node.Host{Node: "here"}, log),
		Volumes: controller.New(calls, nil, nil, log),
	}
	e.server.Set(e.active)
	return e
}

// noMounts is a node without mounts.
type noMounts struct{}

func (noMounts) Mounts(string) (mount.Mounts, error) { return nil, nil }
func (noMounts) Serves(string) bool                  { return false }

func commit(t *testing.T, log *registrytest.Log, change func(registry.View) registry.Change) {
	t.Helper()
	_, err := log.Commit(t.Context(), func(v registry.View) (registry.Change, error) { return change(v), nil })
	must(t, err)
}

func put(t *testing.T, log *registrytest.Log, records ...registry.Record) {
	t.Helper()
	registrytest.Put(t, log, records...)
}

// register registers instances.
func (e *env) register(t *testing.T, instances ...registry.Instance) {
	t.Helper()
	commit(t, e.log, func(v registry.View) registry.Change { return registry.PutChange(v, time.Now(), instances...) })
}

// idle is a Life in which nothing happens.
type idle struct{ Life }

var errIdle = errors.New("nothing happens in this life")

func (idle) Status() Status {
	return Status{Lifecycle: pb.LifecycleState_LIFECYCLE_STATE_CANDIDATE}
}

func (idle) Activate(context.Context, Handover) error { return errIdle }
func (idle) Quiesce(context.Context) (int, error)     { return 0, errIdle }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// notActive reports whether err tells a host to repeat the call at the next shim.
func notActive(err error) bool {
	st, is := status.FromError(err)
	return is && st.Code() == codes.Unavailable && len(st.Details()) == 0
}

func volume(id string) registry.Volume {
	return registry.Volume{
		VolumeSpec: registry.VolumeSpec{Namespace: "default", ID: registry.VolumeID(id), Plugin: "p",
			External: registry.ExternalID("e-" + id)},
		State: registry.VolumeReady,
	}
}

func instance(alloc registry.AllocID) registry.Instance {
	return registry.Instance{
		InstanceKey: registry.InstanceKey{Role: registry.RoleNode, Plugin: "p", Alloc: alloc, Task: "t"},
		Endpoint:    registry.Endpoint{Host: "/run/" + string(alloc), Task: "/csi"},
		Health:      registry.Health{State: registry.Healthy},
	}
}
