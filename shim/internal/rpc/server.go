package rpc

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/config"
	"holdfast/hooks"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/cluster"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/endpoint"
	"holdfast/shim/internal/node"
	"holdfast/shim/internal/task"
)

// Life is the lifecycle of a shim, as Control drives it.
type Life interface {
	Hello(ctx context.Context, h Hello) (Status, error)
	Status() Status
	CallMetrics() []registry.CallMetric
	// Rehearse tries to take over the copy of the state in the file, as Activate would take over the state itself.
	Rehearse(ctx context.Context, copied string) (Rehearsal, error)
	Activate(ctx context.Context, h Handover) error
	// Quiesce refuses new mutating calls. It returns the number of open intents.
	Quiesce(ctx context.Context) (openIntents int, err error)
	// Release closes the state and returns its last revision.
	Release(ctx context.Context) (registry.Revision, error)
	Snapshot(ctx context.Context, write func(chunk []byte) error) (registry.Seq, error)
}

// Handover says how a shim gets the state.
type Handover struct {
	ReleasedAt registry.Revision // the revision at which the previous shim released the state; zero: unknown
	Resume     bool              // the shim had the state, and no other has written since: the generation stays
}

// Rehearsal is what a candidate found in a copy of the state.
type Rehearsal struct {
	At        registry.Revision // the revision of the copy
	Schema    uint32            // the schema of the copy, before it was migrated
	Readable  uint32            // the oldest schema whose shims can read the copy after that
	Instances int               // how many plugin tasks were probed
	Warnings  []string
}

// Hello describes the host.
type Hello struct {
	Node             registry.NodeName
	Operations       []hooks.Operation
	Blocks           []string
	StateDir, RunDir string
	Cluster          *config.Cluster // nil: the node shares nothing
}

// ClusterID returns the ID of the node's cluster; empty: the node shares nothing.
func (h *Hello) ClusterID() string {
	if h.Cluster == nil {
		return ""
	}
	return h.Cluster.ID
}

// Status describes the shim.
type Status struct {
	Version     string
	Lifecycle   pb.LifecycleState
	Generation  registry.Generation
	Index       registry.Seq
	Schema      uint32
	SchemaFrom  uint32 // the oldest schema that this build reads
	SchemaTo    uint32 // the newest
	OpenIntents int
	Instances   int
	Allocs      int
	PID         int
	// ClusterProblem says why changes of shared records cannot be made; empty: they can.
	ClusterProblem string
}

// Active holds what an active shim serves.
type Active struct {
	Node       registry.NodeName
	Generation registry.Generation
	State      registry.State
	Table      *registry.Registry
	Feed       *registry.Feed
	Notifier   *Notifier
	Tasks      *task.Tasks
	Uses       task.Uses // the uses of plugin tasks
	Allocs     *node.Allocs
	Volumes    *controller.Controller
	Meter      Meter
	Doctor     Doctor
	Endpoint   *endpoint.Endpoint
	Snapshots  *controller.Snapshots
	Literals   *Literals
	Cluster    *cluster.Node   // nil: the node shares nothing
	Context    context.Context // ends when the shim is not active any more; the cause says why
}

// Meter returns the usage of a volume that is mounted on this node.
type Meter interface {
	Stats(ctx context.Context, name registry.VolumeName) ([]registry.VolumeUsage, error)
}

// Doctor compares the records with this node.
type Doctor interface {
	// Examine returns the differences. It changes nothing.
	Examine(ctx context.Context) (registry.Diagnosis, error)
	// Repair carries out the plan with that digest. If the digest is empty, it carries out the current plan.
	// ErrConflict means that the plan has changed.
	Repair(ctx context.Context, digest string) (registry.Diagnosis, error)
}

// Server implements all gRPC services. Until Set, it serves as a candidate.
type Server struct {
	life       Life
	callbacks  *Callbacks
	log        hclog.Logger
	active     atomic.Pointer[Active]
	hello      atomic.Pointer[Hello]
	operations operations
	services   map[string]service // by name, for Serve
}

// New returns a server for life. The server calls the host through callbacks.
func New(life Life, callbacks *Callbacks, log hclog.Logger) *Server {
	return &Server{life: life, callbacks: callbacks, log: log, services: map[string]service{}}
}

// Set makes the server serve a. If a is nil, the server serves as a candidate.
func (s *Server) Set(a *Active) { s.active.Store(a) }

// Quiesce refuses new mutating calls. The host repeats them at the next shim.
func (s *Server) Quiesce() { s.operations.close() }

// AwaitCalls waits until ctx ends for the mutating calls in flight.
func (s *Server) AwaitCalls(ctx context.Context) error { return s.operations.await(ctx) }

// Resume accepts mutating calls again.
func (s *Server) Resume() { s.operations.open() }

// Register registers every service at g.
func (s *Server) Register(g grpc.ServiceRegistrar) {
	g = recorder{g, s.services}
	pb.RegisterControlServer(g, &control{s: s})
	pb.RegisterJobsServer(g, &jobs{s: s})
	pb.RegisterTasksServer(g, &tasks{s: s})
	pb.RegisterAllocsServer(g, &allocs{s: s})
	pb.RegisterPluginsServer(g, &plugins{s: s})
	pb.RegisterVolumesServer(g, &volumes{s: s})
	pb.RegisterSnapshotsServer(g, &snapshots{s: s})
	pb.RegisterVolumeChangesServer(g, &volumeChanges{s: s})
	pb.RegisterClaimsServer(g, &claims{s: s})
	pb.RegisterNodesServer(g, &nodes{s: s})
	pb.RegisterEventsServer(g, &events{s: s})
	pb.RegisterCallbacksServer(g, s.callbacks)
}

// errNotActive is the error of a shim that is not active. A host recognizes it because it has no details, and repeats
// the call at the next active shim.
var errNotActive = status.Error(codes.Unavailable, "this shim is not active")

// activeFor returns the active state for a request to this node.
func (s *Server) activeFor(req interface{ GetCall() *pb.Call }) (*Active, error) {
	a := s.active.Load()
	if a == nil {
		return nil, errNotActive
	}
	if node := req.GetCall().GetNode(); node != "" && node != string(a.Node) {
		return nil, wire.Status(registry.Invalid("this call is for node %q, but this shim serves node %q", node,
			a.Node))
	}
	return a, nil
}

// answer returns the Answer for an index.
func (a *Active) answer(at registry.Seq) *pb.Answer {
	return &pb.Answer{Index: uint64(at), Generation: uint64(a.Generation)}
}

// latest returns the Answer for the current index.
func (a *Active) latest(ctx context.Context) *pb.Answer {
	var at registry.Seq
	_ = a.State.View(ctx, func(v registry.View) error { at = v.Index(); return nil })
	return a.answer(at)
}

// cannotAnswer reports whether the next shim has to answer a call that ended with err. That is so if this shim is not
// active any more, or if its store refuses commits. If err is of a kind that the store returns, an empty commit tests
// the store.
func (a *Active) cannotAnswer(ctx context.Context, err error) bool {
	if a.Context.Err() != nil {
		return true
	}
	suspect := []error{registry.ErrUnavailable, registry.ErrUncertain, registry.ErrFenced, registry.ErrDamaged}
	if !slices.ContainsFunc(suspect, func(kind error) bool { return errors.Is(err, kind) }) {
		return false
	}
	nothing := func(registry.View) (registry.Change, error) { return registry.Change{}, nil }
	_, err = a.State.Commit(ctx, nothing)
	return err != nil && ctx.Err() == nil
}

// latest returns the Answer for the current index of the active shim, or of a shim that is not active.
func (s *Server) latest(ctx context.Context) *pb.Answer {
	if a := s.active.Load(); a != nil {
		return a.latest(ctx)
	}
	return statusAnswer(s.life.Status())
}

// status converts the error of a read for the wire.
func (a *Active) status(ctx context.Context, err error) error {
	if err != nil && ctx.Err() == nil && a.cannotAnswer(ctx, err) {
		return errNotActive
	}
	return wire.Status(err)
}

// query runs a request that changes nothing. The request ends when the caller gives up or the shim is not active any
// more.
func query[T any](
	ctx context.Context, s *Server, req interface{ GetCall() *pb.Call }, ask func(context.Context, *Active) (T, error),
) (T, *pb.Answer, error) {
	var none T
	a, err := s.activeFor(req)
	if err != nil {
		return none, nil, err
	}
	caller, end := withDeadline(ctx, callLimit)
	defer end()
	bound, cancel := a.whileActive(caller)
	defer cancel()
	answer, err := ask(bound, a)
	if err != nil {
		return none, nil, a.status(ctx, err)
	}
	return answer, a.latest(ctx), nil
}

// whileActive returns a context that ends with ctx, or when the shim is not active any more.
func (a *Active) whileActive(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(a.Context, func() { cancel(context.Cause(a.Context)) })
	return ctx, func() { stop(); cancel(nil) }
}
