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
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/intent"
	"holdfast/shim/internal/node"
	"holdfast/shim/internal/task"
)

// stage is a server over a log in memory, and a connection to it. Only what reads works behind it: no plugin is there.
type stage struct {
	log       *registrytest.Log
	table     *registry.Registry
	server    *Server
	callbacks *Callbacks
	active    *Active
	release   context.CancelCauseFunc
	conn      *grpc.ClientConn
	services  map[string]grpc.ServiceInfo
}

// candidate is a stage that is not active.
func candidate(t *testing.T) *stage {
	s := &stage{log: registrytest.NewLog(time.Now), callbacks: &Callbacks{}}
	s.server = New(idle{}, s.callbacks, hclog.NewNullLogger())
	listener := bufconn.Listen(1 << 20)
	g := grpc.NewServer(grpc.WaitForHandlers(true))
	s.server.Register(g)
	s.services = g.GetServiceInfo()
	var serving sync.WaitGroup
	serving.Go(func() { _ = g.Serve(listener) })
	t.Cleanup(func() { g.Stop(); serving.Wait() })
	dial := func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }
	var err error
	s.conn, err = grpc.NewClient("passthrough:stage", grpc.WithContextDialer(dial),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.conn.Close() })
	return s
}

func newStage(t *testing.T) *stage {
	s := candidate(t)
	s.table = registry.New(s.log)
	feed, notifier := registry.NewFeed(s.log, s.table, registry.RecentEvents), &Notifier{}
	s.log.OnApplied(func(a registry.Applied) { s.table.Applied(a); feed.Applied(a); notifier.Applied(a) })
	ctx, cancel := context.WithCancelCause(t.Context())
	s.release = cancel
	t.Cleanup(func() { cancel(nil) })
	supervisor := task.New(s.log, nil, task.Clock{Now: time.Now}, nil, hclog.NewNullLogger())
	host, log := node.Host{Node: "here"}, hclog.NewNullLogger()
	calls := intent.Calls{
		Sender: intent.Sender{State: s.log, Now: time.Now}, Plugins: s.table, Secrets: s.callbacks,
		Locks: &intent.Locks{},
	}
	s.active = &Active{
		Node: "here", Generation: 7, State: s.log, Table: s.table, Feed: feed, Notifier: notifier, Context: ctx,
		Tasks:   task.NewTasks(supervisor, nil, hooks.Layout{}, nil),
		Allocs:  node.NewAllocs(calls, nil, nil, host, log),
		Volumes: controller.New(calls, nil, nil, log),
	}
	s.server.Set(s.active)
	return s
}

func (s *stage) put(t *testing.T, records ...registry.Record) {
	t.Helper()
	registrytest.Put(t, s.log, records...)
}

func (s *stage) index() (at registry.Seq) {
	_ = s.log.View(context.Background(), func(v registry.View) error { at = v.Index(); return nil })
	return at
}

// idle is a life in which nothing happens.
type idle struct{}

var errIdle = errors.New("nothing happens in this life")

func (idle) Hello(context.Context, Hello) (Status, error)                       { return Status{}, nil }
func (idle) Status() Status                                                     { return Status{Tenure: pb.Tenure_TENURE_CANDIDATE} }
func (idle) Rehearse(context.Context, string) (Rehearsal, error)                { return Rehearsal{}, errIdle }
func (idle) Activate(context.Context, Handover) error                           { return errIdle }
func (idle) Quiesce(context.Context, time.Duration) (int, error)                { return 0, errIdle }
func (idle) Release(context.Context) (registry.Revision, error)                 { return registry.Revision{}, errIdle }
func (idle) Snapshot(context.Context, func([]byte) error) (registry.Seq, error) { return 0, errIdle }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// nobody says whether err is what tells a host that nobody has answered.
func nobody(err error) bool {
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

// register registers instances.
func (s *stage) register(t *testing.T, instances ...registry.Instance) {
	t.Helper()
	_, err := s.log.Commit(t.Context(), func(v registry.View) (registry.Change, error) {
		return registry.PutChange(v, time.Now(), instances...), nil
	})
	must(t, err)
}
