package rpc

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/durationpb"

	"holdfast/hooks"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/intent"
	"holdfast/shim/internal/node"
	"holdfast/shim/internal/task"
)

// newBlocking returns an active server without a listener, for tests with fake time.
func newBlocking(t *testing.T) (*Server, *registrytest.Log, context.CancelCauseFunc) {
	log := registrytest.NewLog(time.Now)
	table := registry.New(log)
	notifier := NewNotifier(0)
	log.OnApplied(func(a registry.Applied) { table.Applied(a); notifier.Applied(a) })
	ctx, cancel := context.WithCancelCause(t.Context())
	calls := intent.Calls{Sender: intent.Sender{State: log, Now: time.Now}, Plugins: table, Locks: &intent.Locks{}}
	volumes := controller.New(calls, nil, nil, nil)
	s := New(idle{}, NewCallbacks(), nil)
	s.Set(&Active{Node: "here", State: log, Table: table, Notifier: notifier, Context: ctx,
		Tasks:  task.NewTasks(task.New(log, nil, task.Clock{Now: time.Now}, nil, nil), nil, hooks.Layout{}, nil),
		Uses:   task.Uses{State: log, Mounts: noMounts{}, Running: func(registry.TaskKey) int { return 0 }},
		Allocs: node.NewAllocs(calls, nil, nil, node.Host{Node: "here"}, nil), Volumes: volumes})
	return s, log, cancel
}

// waiters counts the waiters of all buckets.
func (n *Notifier) waiters() (count int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, of := range n.waiting {
		count += len(of)
	}
	return count
}

// A list with a min_index is answered after a change of its own records, or at once if there was one since that index.
func TestListsWaitForTheirRecords(t *testing.T) {
	claim := registry.Claim{Volume: registry.VolumeKey{Plugin: "p", External: "e"}, Alloc: "a", Request: "r"}
	use := registry.EndpointUse{Volume: claim.Volume, Node: "n"}
	group := registry.VolumeSnapshot{SnapshotSpec: registry.SnapshotSpec{Namespace: "default", ID: "g",
		Volumes: []registry.VolumeID{"v"}}}
	lists := map[protoreflect.FullName]struct {
		list        func(context.Context, *Server, *pb.Page) (*pb.Answer, error)
		wakes, none registry.Record
	}{
		"holdfast.v1.ListVolumesRequest": {func(ctx context.Context, s *Server, p *pb.Page) (*pb.Answer, error) {
			reply, err := (&volumes{s: s}).List(ctx, &pb.ListVolumesRequest{Page: p})
			return reply.GetAnswer(), err
		}, volume("v"), instance("a")},
		"holdfast.v1.ListAllocsRequest": {func(ctx context.Context, s *Server, p *pb.Page) (*pb.Answer, error) {
			reply, err := (&allocs{s: s}).List(ctx, &pb.ListAllocsRequest{Page: p})
			return reply.GetAnswer(), err
		}, registry.Alloc{ID: "a"}, group},
		"holdfast.v1.ListClaimsRequest": {func(ctx context.Context, s *Server, p *pb.Page) (*pb.Answer, error) {
			reply, err := (&claims{s: s}).List(ctx, &pb.ListClaimsRequest{Page: p})
			return reply.GetAnswer(), err
		}, claim, volume("v")},
		"holdfast.v1.ListPluginsRequest": {func(ctx context.Context, s *Server, p *pb.Page) (*pb.Answer, error) {
			reply, err := (&plugins{s: s}).List(ctx, &pb.ListPluginsRequest{Page: p})
			return reply.GetAnswer(), err
		}, instance("a"), claim},
		"holdfast.v1.ListSnapshotsRequest": {func(ctx context.Context, s *Server, p *pb.Page) (*pb.Answer, error) {
			reply, err := (&snapshots{s: s}).List(ctx, &pb.ListSnapshotsRequest{Page: p})
			return reply.GetAnswer(), err
		}, group, claim},
		"holdfast.v1.ListEndpointUsesRequest": {func(ctx context.Context, s *Server, p *pb.Page) (*pb.Answer, error) {
			reply, err := (&plugins{s: s}).EndpointUses(ctx, &pb.ListEndpointUsesRequest{Page: p, Plugin: "p"})
			return reply.GetAnswer(), err
		}, use, claim},
		"holdfast.v1.ListNodesRequest": {func(ctx context.Context, s *Server, p *pb.Page) (*pb.Answer, error) {
			reply, err := (&nodes{s: s}).List(ctx, &pb.ListNodesRequest{Page: p})
			return reply.GetAnswer(), err
		}, registry.Node{Name: "n"}, claim},
	}
	protoregistry.GlobalTypes.RangeMessages(func(m protoreflect.MessageType) bool {
		d := m.Descriptor()
		if page := d.Fields().ByName("page"); page != nil &&
			page.Message() == (*pb.Page)(nil).ProtoReflect().Descriptor() {
			if lists[d.FullName()].list == nil {
				t.Errorf("%s is not tested", d.FullName())
			}
		}
		return true
	})
	for name, c := range lists {
		synctest.Test(t, func(t *testing.T) {
			s, log, _ := newBlocking(t)
			put(t, log, registry.Task{})
			index := s.active.Load().Notifier.Index()
			answered := make(chan *pb.Answer, 1)
			go func() {
				answer, err := c.list(t.Context(), s,
					&pb.Page{MinIndex: uint64(index), Wait: durationpb.New(time.Hour)})
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
				answered <- answer
			}()
			put(t, log, c.none)
			if synctest.Wait(); len(answered) > 0 {
				t.Errorf("%s: answered after a change of %s", name, c.none.Key().Bucket)
			}
			put(t, log, c.wakes)
			answer := <-answered
			if got := registry.Seq(answer.GetIndex()); got != s.active.Load().Notifier.Index() {
				t.Errorf("%s: answered with index %d", name, got)
			}
			began := time.Now()
			if _, err := c.list(t.Context(), s, &pb.Page{MinIndex: uint64(index)}); err != nil ||
				time.Since(began) > 0 {
				t.Errorf("%s: a change before the call: %v after %v", name, err, time.Since(began))
			}
			if _, err := c.list(t.Context(), s, &pb.Page{MinIndex: 1 << 40}); err != nil || time.Since(began) > 0 {
				t.Errorf("%s: an index of another state: %v after %v", name, err, time.Since(began))
			}
			answer, err := c.list(t.Context(), s, &pb.Page{MinIndex: answer.GetIndex()})
			if err != nil || time.Since(began) != 10*time.Minute {
				t.Errorf("%s: without a change: %v, %v after %v", name, answer, err, time.Since(began))
			}
		})
	}
}

// A list of plugins also has tasks, so a restart request answers it.
func TestListOfPluginsWaitsForTasks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, log, _ := newBlocking(t)
		put(t, log, registry.Task{})
		page := &pb.Page{MinIndex: uint64(s.active.Load().Notifier.Index())}
		began, answered := time.Now(), make(chan error)
		go func() {
			_, err := (&plugins{s: s}).List(t.Context(), &pb.ListPluginsRequest{Page: page})
			answered <- err
		}()
		synctest.Wait()
		put(t, log, registry.Task{Restart: &registry.RestartRequest{}})
		if err := <-answered; err != nil || time.Since(began) > 0 {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

// One commit answers a thousand waiting calls. A call whose caller or shim is gone leaves no waiter.
func TestManyListsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, log, release := newBlocking(t)
		put(t, log, registry.Task{})
		notifier := s.active.Load().Notifier
		const many = 1000
		begin := func(ctx context.Context) chan error {
			ended := make(chan error, many)
			page := &pb.Page{MinIndex: uint64(notifier.Index())}
			for range many {
				go func() {
					_, err := (&claims{s: s}).List(ctx, &pb.ListClaimsRequest{Page: page})
					ended <- err
				}()
			}
			if synctest.Wait(); notifier.waiters() != many || len(ended) > 0 {
				t.Fatalf("%d of %d wait", notifier.waiters(), many)
			}
			return ended
		}
		end := func(ended chan error, wanted func(error) bool) {
			for range many {
				if err := <-ended; !wanted(err) {
					t.Fatalf("a call ended with %v", err)
				}
			}
			if synctest.Wait(); notifier.waiters() > 0 {
				t.Errorf("%d waiters are left", notifier.waiters())
			}
		}
		ended := begin(t.Context())
		put(t, log, registry.Claim{Volume: registry.VolumeKey{Plugin: "p", External: "e"}, Alloc: "a", Request: "r"})
		end(ended, func(err error) bool { return err == nil })

		ctx, cancel := context.WithCancel(t.Context())
		ended = begin(ctx)
		cancel()
		end(ended, func(err error) bool { return err != nil })

		ended = begin(t.Context())
		release(errors.New("released"))
		end(ended, notActive)
	})
}
