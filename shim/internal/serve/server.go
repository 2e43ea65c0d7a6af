package serve

import (
	"context"
	"sync/atomic"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"

	"holdfast/hooks"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/alloc"
	"holdfast/shim/internal/controller"
)

// Life is a shim's life, as Control drives it.
type Life interface {
	Hello(ctx context.Context, h Hello) (Status, error)
	Status() Status
	Activate(ctx context.Context) error
	// Quiesce refuses new mutating calls and waits for those that run. It returns how many CSI calls go on.
	Quiesce(ctx context.Context) (openIntents int, err error)
	Release(ctx context.Context) error
	Snapshot(ctx context.Context, write func(chunk []byte) error) (registry.Seq, error)
}

// Hello is what the host says of itself.
type Hello struct {
	HostVersion      string
	Node             registry.NodeName
	Operations       []hooks.Operation
	Blocks           []string
	Features         []string
	StateDir, RunDir string
}

// Status is what the shim says of itself.
type Status struct {
	Version     string
	Tenure      pb.Tenure
	Generation  registry.Generation
	Index       registry.Seq
	Schema      uint32
	SchemaFrom  uint32 // the oldest schema that this build reads
	SchemaTo    uint32 // the newest
	Features    []string
	OpenIntents int
	Instances   int
	Allocs      int
	PID         int
}

// Active is what an active shim serves.
type Active struct {
	Generation registry.Generation
	Log        registry.Log
	Table      *registry.Registry
	Feed       *registry.Feed
	Pulse      *Pulse
	Tasks      *alloc.Tasks
	Allocs     *alloc.Allocs
	Volumes    *controller.Mediator
	Context    context.Context // ends, with its cause, when the shim ceases to be active
}

// Server serves every service. It is a candidate's until Set gives it something active.
type Server struct {
	life      Life
	callbacks *Callbacks
	log       hclog.Logger
	active    atomic.Pointer[Active]
	hello     atomic.Pointer[Hello]
	flights   flights
}

// New serves life. It asks the host through callbacks.
func New(life Life, callbacks *Callbacks, log hclog.Logger) *Server {
	return &Server{life: life, callbacks: callbacks, log: log}
}

// Set makes what is served active, or with nil a candidate's again.
func (s *Server) Set(a *Active) { s.active.Store(a) }

// Quiesce refuses mutating calls from now on, and waits for those under way until ctx ends.
func (s *Server) Quiesce(ctx context.Context) error { return s.flights.close(ctx) }

// Resume takes mutating calls again.
func (s *Server) Resume() { s.flights.open() }

// Register puts every service on g.
func (s *Server) Register(g grpc.ServiceRegistrar) {
	pb.RegisterControlServer(g, &control{s: s})
	pb.RegisterJobsServer(g, &jobs{s: s})
	pb.RegisterTasksServer(g, &tasks{s: s})
	pb.RegisterAllocsServer(g, &allocs{s: s})
	pb.RegisterPluginsServer(g, &plugins{s: s})
	pb.RegisterVolumesServer(g, &volumes{s: s})
	pb.RegisterClaimsServer(g, &claims{s: s})
	pb.RegisterEventsServer(g, &events{s: s})
	pb.RegisterCallbacksServer(g, s.callbacks)
}

// now is what is active, or ErrUnavailable.
func (s *Server) now() (*Active, error) {
	a := s.active.Load()
	if a == nil {
		return nil, wire.Status(registry.Errorf(registry.ErrUnavailable, "this shim is not active"))
	}
	return a, nil
}

// answer is true for the index that it names.
func (a *Active) answer(at registry.Seq) *pb.Answer {
	return &pb.Answer{Index: uint64(at), Generation: uint64(a.Generation)}
}

// latest is an answer true for the state as it is now.
func (a *Active) latest(ctx context.Context) *pb.Answer {
	var at registry.Seq
	_ = a.Log.View(ctx, func(v registry.View) error { at = v.Index(); return nil })
	return a.answer(at)
}

// bound is ctx, ended also when the shim ceases to be active.
func (a *Active) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(a.Context, func() { cancel(context.Cause(a.Context)) })
	return ctx, func() { stop(); cancel(nil) }
}
