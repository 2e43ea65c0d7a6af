package rpc

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/hooks"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/intent"
	"holdfast/shim/internal/node"
	"holdfast/shim/internal/task"
)

// Life is a shim's life, as Control drives it.
type Life interface {
	Hello(ctx context.Context, h Hello) (Status, error)
	Status() Status
	// Rehearse tries a copy of the state in the file, as Activate would take over the state itself.
	Rehearse(ctx context.Context, copied string) (Rehearsal, error)
	Activate(ctx context.Context, h Handover) error
	// Quiesce refuses new mutating calls and waits for those that run, but for those that have run for longer than long, and for those that wait
	// because none begins another CSI call; 0: for all. It returns how many CSI calls go on.
	Quiesce(ctx context.Context, long time.Duration) (openIntents int, err error)
	// Release returns as what it has left the state.
	Release(ctx context.Context) (registry.Revision, error)
	Snapshot(ctx context.Context, write func(chunk []byte) error) (registry.Seq, error)
}

// Handover says how the state comes to a shim. The zero value: nobody knows.
type Handover struct {
	ReleasedAt registry.Revision // by the previous shim; the zero value: not known
	Resume     bool              // it was this shim's, and nobody else has written: no new generation begins
}

// Rehearsal is what a candidate found in a copy of the state.
type Rehearsal struct {
	At        registry.Revision // of the copy
	Schema    uint32            // of the copy, before it was migrated
	Readable  uint32            // the oldest schema whose shims can read it after that
	Instances int               // plugins that were asked
	Warnings  []string
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
	Node       registry.NodeName
	Generation registry.Generation
	Log        registry.State
	Table      *registry.Registry
	Feed       *registry.Feed
	Pulse      *Pulse
	Tasks      *task.Tasks
	Allocs     *node.Allocs
	Volumes    *controller.Controller
	Meter      Meter           // nil: there is none
	Doctor     Doctor          // nil: there is none
	Pause      *intent.Pause   // nil: there never is one
	Context    context.Context // ends, with its cause, when the shim ceases to be active
}

// Meter says how full a volume is that is mounted here.
type Meter interface {
	Stats(ctx context.Context, name registry.VolumeName) ([]registry.VolumeUsage, error)
}

// Doctor compares what is recorded with what is.
type Doctor interface {
	// Examine changes nothing.
	Examine(ctx context.Context) (registry.Diagnosis, error)
	// Repair does what the plan of that digest says; an empty digest means the plan of now. ErrConflict: it is another one by now.
	Repair(ctx context.Context, digest string) (registry.Diagnosis, error)
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
func (s *Server) Set(a *Active) {
	if a != nil && a.Pause != nil {
		a.Pause.Notify(s.flights.paused)
	}
	s.active.Store(a)
}

// Quiesce refuses mutating calls from now on, and waits for those under way, until ctx ends; with long only for those that have not been
// under way for so long already. What it refuses is made again at the next shim.
func (s *Server) Quiesce(ctx context.Context, long time.Duration) error {
	return s.flights.close(ctx, long)
}

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

// errNotActive is the answer of a shim that is not active, not yet or not any more. It carries no detail, and by that a host knows it for
// the answer of nobody: it makes the call again at the next active shim.
var errNotActive = status.Error(codes.Unavailable, "this shim is not active")

// now is what is active, for a request that means this node.
func (s *Server) now(req interface{ GetCall() *pb.Call }) (*Active, error) {
	a := s.active.Load()
	if a == nil {
		return nil, errNotActive
	}
	if node := req.GetCall().GetNode(); node != "" && node != string(a.Node) {
		return nil, wire.Status(registry.Invalid("this call is meant for node %q, and this shim serves node %q", node, a.Node))
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

// over says that this shim cannot answer any more, so that the next one has to: it has ceased to be active, or its log takes no more
// commits. err is what a call ended with.
func (a *Active) over(ctx context.Context, err error) bool {
	if a.Context.Err() != nil {
		return true
	}
	suspect := []error{registry.ErrUnavailable, registry.ErrUncertain, registry.ErrFenced, registry.ErrDamaged}
	if !slices.ContainsFunc(suspect, func(kind error) bool { return errors.Is(err, kind) }) {
		return false
	}
	nothing := func(registry.View) (registry.Change, error) { return registry.Change{}, nil }
	_, err = a.Log.Commit(ctx, nothing)
	return err != nil && ctx.Err() == nil
}

// status is the error of a read, for the wire.
func (a *Active) status(ctx context.Context, err error) error {
	if err != nil && ctx.Err() == nil && a.over(ctx, err) {
		return errNotActive
	}
	return wire.Status(err)
}

// look asks what is active for something that changes nothing, for as long as it is active and the caller waits.
func look[T any](
	ctx context.Context, s *Server, req interface{ GetCall() *pb.Call }, ask func(context.Context, *Active) (T, error),
) (T, *pb.Answer, error) {
	var none T
	a, err := s.now(req)
	if err != nil {
		return none, nil, err
	}
	caller, end := limited(ctx)
	defer end()
	bound, cancel := a.bound(caller)
	defer cancel()
	answer, err := ask(bound, a)
	if err != nil {
		return none, nil, a.status(ctx, err)
	}
	return answer, a.latest(ctx), nil
}

// bound is ctx, ended also when the shim ceases to be active.
func (a *Active) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(a.Context, func() { cancel(context.Cause(a.Context)) })
	return ctx, func() { stop(); cancel(nil) }
}
