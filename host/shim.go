package host

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	"holdfast/host/internal/launch"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// Version of this host, as Hello tells it.
const Version = "0.1.0"

// shim is one process that has been made active.
type shim struct {
	process *launch.Process
	cancel  context.CancelFunc
	wg      sync.WaitGroup
}

// killLimit is how long the end of a process may take.
const killLimit = 5 * time.Second

// start runs a shim and makes it active: Hello, Activate, the stream on which it asks us, Sync. ctx bounds that; run bounds its life.
func (h *Host) start(ctx, run context.Context) (*shim, error) {
	process, err := launch.Start(ctx, launch.Options{
		Store: h.binaries, Digest: h.digest, RunDir: h.config.RunDir, StartTimeout: h.config.StartTimeout, Logger: h.config.Logger.Named("shim"),
	})
	if err != nil {
		return nil, err
	}
	life, cancel := context.WithCancel(run)
	sh := &shim{process: process, cancel: cancel}
	if err := h.activate(ctx, life, sh); err != nil {
		err = fmt.Errorf("%w%s", err, lastLines(process))
		sh.end()
		return nil, err
	}
	return sh, nil
}

func (h *Host) activate(ctx, life context.Context, sh *shim) error {
	ctx, cancel := context.WithTimeout(ctx, activateLimit)
	defer cancel()
	conn := sh.process.Conn()
	control := pb.NewControlClient(conn)
	if _, err := control.Hello(ctx, h.hello()); err != nil {
		return fmt.Errorf("greet the shim: %w", wire.Error(err))
	}
	if _, err := control.Activate(ctx, &pb.ActivateRequest{Call: &pb.Call{}}); err != nil {
		return fmt.Errorf("activate the shim: %w", wire.Error(err))
	}
	sh.wg.Go(func() { h.answerCallbacks(life, conn) })
	if _, err := pb.NewAllocsClient(conn).Sync(ctx, h.living.request()); err != nil {
		return fmt.Errorf("tell the shim what lives: %w", wire.Error(err))
	}
	return nil
}

func (h *Host) hello() *pb.HelloRequest {
	req := &pb.HelloRequest{
		Call: &pb.Call{}, HostVersion: Version, Node: h.config.Node, Blocks: h.config.Blocks, StateDir: h.config.StateDir, RunDir: h.config.RunDir,
	}
	for _, op := range h.config.Operations {
		req.Operations = append(req.Operations, string(op))
	}
	return req
}

// end ends the process, if it lives, and what waits on it.
func (s *shim) end() {
	s.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), killLimit) // the end is never cut short by its cause
	defer cancel()
	_ = s.process.Stop(ctx, time.Second)
	s.wg.Wait()
}

func lastLines(p *launch.Process) string {
	lines := p.LastLines()
	if len(lines) == 0 {
		return ""
	}
	return "; its last words:\n  " + strings.Join(lines, "\n  ")
}

// answerCallbacks answers what the shim asks, until life ends or the stream does. Each question is answered on a goroutine of its own.
func (h *Host) answerCallbacks(life context.Context, conn grpc.ClientConnInterface) {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(life)
	defer cancel()
	stream, err := pb.NewCallbacksClient(conn).Serve(ctx)
	if err != nil {
		h.config.Logger.Warn("the shim takes no answers", "error", err)
		return
	}
	var send sync.Mutex // a stream takes one Send at a time
	for {
		ask, err := stream.Recv()
		if err != nil {
			return
		}
		wg.Go(func() {
			reply := h.answer(ctx, ask)
			send.Lock()
			defer send.Unlock()
			_ = stream.Send(reply)
		})
	}
}

func (h *Host) answer(ctx context.Context, ask *pb.CallbackRequest) *pb.CallbackReply {
	ctx, cancel := context.WithTimeout(ctx, ask.GetDeadline().AsDuration())
	defer cancel()
	value, err := h.ask(ctx, ask)
	reply := &pb.CallbackReply{Id: ask.GetId(), Value: value}
	if err != nil {
		reply.Error, reply.Kind, reply.Value = err.Error(), wire.Kind(err), nil
	}
	return reply
}

func (h *Host) ask(ctx context.Context, ask *pb.CallbackRequest) ([]byte, error) {
	switch q := ask.GetAsk().(type) {
	case *pb.CallbackRequest_Secret:
		value, err := h.secret(ctx, q.Secret.GetName())
		return []byte(value), err
	case *pb.CallbackRequest_File:
		if h.config.File == nil {
			return nil, registry.Errorf(registry.ErrUnsupported, "this host reads no files for jobs")
		}
		return h.config.File(ctx, q.File.GetPath())
	case *pb.CallbackRequest_Fence:
		if h.config.Fence == nil {
			return nil, registry.Errorf(registry.ErrUnsupported, "this host cannot fence a node")
		}
		return nil, h.config.Fence(ctx, q.Fence.GetNode())
	}
	return nil, registry.Errorf(registry.ErrUnsupported, "this host does not know what it is asked; update it")
}

func (h *Host) secret(ctx context.Context, name string) (string, error) {
	if h.config.Secret != nil {
		return h.config.Secret(ctx, name)
	}
	if env, is := strings.CutPrefix(name, "env:"); is {
		if value, set := os.LookupEnv(env); set {
			return value, nil
		}
		return "", registry.Errorf(registry.ErrNotFound, "the environment variable %s is not set at the host", env)
	}
	return "", registry.Errorf(registry.ErrUnsupported, "this host has no secrets by name")
}
