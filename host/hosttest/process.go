package hosttest

import (
	"context"
	"net"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"holdfast/hooks"
	"holdfast/host/internal/launch"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// process stands for one shim process: a server that can be active.
type process struct {
	*Shim
	pid        int
	generation uint64
	server     *grpc.Server
	conn       *grpc.ClientConn
	done       chan struct{}
	once       sync.Once
	exit       *launch.Exit // readable after done

	// guarded by Shim.mu
	hello    *pb.HelloRequest
	quiesced bool
	life     context.Context // ends when p is not active any more; nil: p never was active
	endLife  context.CancelFunc
}

var _ launch.Running = (*process)(nil)

// start is a launch.Starter.
func (s *Shim) start(_ context.Context, o launch.Options) (launch.Running, error) {
	s.mu.Lock()
	s.started++
	p := &process{Shim: s, pid: s.started, generation: o.Generation, done: make(chan struct{})}
	s.mu.Unlock()
	listener := bufconn.Listen(1 << 20)
	conn, err := grpc.NewClient("passthrough:///hosttest", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(
			func(ctx context.Context, _ string) (net.Conn, error) {
				return listener.DialContext(ctx)
			}))
	if err != nil {
		return nil, err
	}
	p.conn = conn
	p.server = grpc.NewServer(grpc.UnaryInterceptor(p.unary), grpc.StreamInterceptor(p.stream))
	pb.RegisterControlServer(p.server, &control{p: p})
	pb.RegisterJobsServer(p.server, &jobs{p: p})
	pb.RegisterTasksServer(p.server, &tasks{p: p})
	pb.RegisterPluginsServer(p.server, &plugins{p: p})
	pb.RegisterEventsServer(p.server, &events{p: p})
	pb.RegisterVolumesServer(p.server, &volumes{p: p})
	pb.RegisterAllocsServer(p.server, &allocs{p: p})
	pb.RegisterClaimsServer(p.server, &claims{p: p})
	pb.RegisterCallbacksServer(p.server, &callbacks{p: p})
	go func() { _ = p.server.Serve(listener) }() // until end
	return p, nil
}

// end ends the process once.
func (p *process) end(how *launch.Exit) {
	p.once.Do(func() {
		p.deactivate()
		p.exit = how
		close(p.done)
		p.server.Stop()
		_ = p.conn.Close()
	})
}

// activate makes p the active process, or has it continue as that after Quiesce. ErrConflict: another one is active.
func (p *process) activate() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch p.active {
	case nil:
		p.life, p.endLife = context.WithCancel(context.Background()) // it outlives the call that activates p
		p.active = p
	case p:
	default:
		return registry.Errorf(registry.ErrConflict, "shim %d is active", p.active.pid)
	}
	p.quiesced = false
	p.wakeLocked()
	return nil
}

// deactivate ends that p is the active process, if it is.
func (p *process) deactivate() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.active == p {
		p.active = nil
		p.endLife()
	}
	p.quiesced = false
	p.wakeLocked()
}

// whileActive returns ctx, cancelled also when p is not active any more.
func (p *process) whileActive(ctx context.Context) (context.Context, context.CancelFunc) {
	p.mu.Lock()
	life := p.life
	p.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	if life == nil {
		return ctx, cancel
	}
	stop := context.AfterFunc(life, cancel)
	return ctx, func() { stop(); cancel() }
}

func (p *process) Conn() *grpc.ClientConn { return p.conn }
func (p *process) PID() int               { return p.pid }
func (p *process) Protocol() int          { return 1 }
func (p *process) Done() <-chan struct{}  { return p.done }
func (p *process) LastLines() []string    { return nil }

func (p *process) Err() error {
	select {
	case <-p.done:
		return p.exit
	default:
		return nil
	}
}

func (p *process) Kill(context.Context) error {
	p.end(&launch.Exit{PID: p.pid, Signal: 9, Asked: true})
	return nil
}

func (p *process) Stop(context.Context, time.Duration) error {
	p.end(&launch.Exit{PID: p.pid, Asked: true})
	return nil
}

// errNotActive has no detail: the host repeats the call at the next shim.
var errNotActive = status.Error(codes.Unavailable, "this shim is not active")

// admit records a call. It returns an error if the call has to fail without any effect.
func (p *process) admit(method string, request any) error {
	service, name, _ := strings.Cut(method, "/")
	p.mu.Lock()
	defer p.mu.Unlock()
	if service == "Control" && name != "Doctor" { // a shim in any state answers these
		return nil
	}
	message, _ := request.(proto.Message)
	mutates := operation(request) != ""
	if name != "Parse" && (p.active != p || p.quiesced && mutates) { // a candidate parses too
		return errNotActive
	}
	p.calls = append(p.calls, Call{method, message})
	if faults := p.faults[method]; len(faults) > 0 {
		p.faults[method] = faults[1:]
		return wire.Status(faults[0])
	}
	return nil
}

func operation(request any) string {
	if r, ok := request.(interface{ GetCall() *pb.Call }); ok {
		return r.GetCall().GetOperationId()
	}
	return ""
}

func methodName(full string) string { return strings.TrimPrefix(full, "/holdfast.v1.") }

// unary answers a call. A call that is repeated after it has succeeded gets the same answer.
func (p *process) unary(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler,
) (any, error) {
	if err := p.admit(methodName(info.FullMethod), req); err != nil {
		return nil, err
	}
	id := operation(req)
	p.mu.Lock()
	answer, repeated := p.answers[id]
	p.mu.Unlock()
	if repeated {
		return answer, nil
	}
	bound, cancel := p.whileActive(ctx)
	defer cancel()
	replaced := func() bool { return bound.Err() != nil && ctx.Err() == nil } // p is not active any more
	p.await(bound, req)
	if replaced() {
		return nil, errNotActive
	}
	reply, err := next(bound, req)
	if err != nil {
		if replaced() || p.Err() != nil {
			err = errNotActive
		}
		return nil, wire.Status(err)
	}
	if id != "" {
		p.mu.Lock()
		p.answers[id] = reply.(proto.Message)
		p.mu.Unlock()
	}
	return reply, nil
}

// await waits as the page of a list request asks for. Any change of the state ends the wait.
func (p *process) await(ctx context.Context, req any) {
	r, paged := req.(interface{ GetPage() *pb.Page })
	if !paged || r.GetPage().GetMinIndex() == 0 || r.GetPage().GetToken() != "" {
		return
	}
	limit := time.After(r.GetPage().GetWait().AsDuration())
	for {
		changed := p.nextChange()
		if uint64(p.view().Index()) > r.GetPage().GetMinIndex() {
			return
		}
		select {
		case <-changed:
		case <-limit:
			return
		case <-ctx.Done():
			return
		}
	}
}

func (p *process) stream(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	if err := p.admit(methodName(info.FullMethod), nil); err != nil {
		return err
	}
	return wire.Status(next(srv, s))
}

// answer returns the Answer for the current index.
func (p *process) answer() *pb.Answer {
	return &pb.Answer{Index: uint64(p.view().Index()), Generation: p.generation}
}

type control struct {
	pb.UnimplementedControlServer
	p *process
}

func (c *control) Hello(_ context.Context, req *pb.HelloRequest) (*pb.HelloReply, error) {
	c.p.mu.Lock()
	c.p.hello = req
	c.p.mu.Unlock()
	reply := &pb.HelloReply{Answer: c.p.answer(), ShimVersion: "hosttest"}
	for _, op := range hooks.Operations {
		reply.Operations = append(reply.Operations, string(op))
	}
	return reply, nil
}

func (c *control) Status(context.Context, *pb.StatusRequest) (*pb.StatusReply, error) {
	v := c.p.view()
	return &pb.StatusReply{
		Answer: c.p.answer(), Version: "hosttest", Pid: int64(c.p.pid),
		Instances: uint32(len(v.AllInstances())), Allocs: uint32(len(v.Allocs())),
	}, nil
}

func (c *control) Activate(context.Context, *pb.ActivateRequest) (*pb.ActivateReply, error) {
	return &pb.ActivateReply{Answer: c.p.answer()}, c.p.activate()
}

func (c *control) Quiesce(context.Context, *pb.QuiesceRequest) (*pb.QuiesceReply, error) {
	c.p.mu.Lock()
	c.p.quiesced = true
	c.p.mu.Unlock()
	return &pb.QuiesceReply{Answer: c.p.answer()}, nil
}

func (c *control) Release(context.Context, *pb.ReleaseRequest) (*pb.ReleaseReply, error) {
	c.p.deactivate()
	return &pb.ReleaseReply{Answer: c.p.answer()}, nil
}

func (c *control) Snapshot(_ *pb.SnapshotRequest, s grpc.ServerStreamingServer[pb.SnapshotChunk]) error {
	return s.Send(&pb.SnapshotChunk{Answer: c.p.answer()})
}

func (c *control) Rehearse(context.Context, *pb.RehearseRequest) (*pb.RehearseReply, error) {
	return &pb.RehearseReply{Answer: c.p.answer()}, nil
}

func (c *control) Metrics(context.Context, *pb.MetricsRequest) (*pb.MetricsReply, error) {
	return &pb.MetricsReply{Answer: c.p.answer()}, nil
}

type callbacks struct {
	pb.UnimplementedCallbacksServer
	p *process
}

// Serve never sends a callback.
func (c *callbacks) Serve(s grpc.BidiStreamingServer[pb.CallbackReply, pb.CallbackRequest]) error {
	<-s.Context().Done()
	return context.Cause(s.Context())
}
