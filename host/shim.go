package host

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"

	"holdfast/host/internal/launch"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// Version of this host, as Hello tells it.
const Version = "0.1.0"

// shim is one process: a candidate, active, or one that stands by.
type shim struct {
	process *launch.Process
	binary  digest
	life    context.Context // of what the host does for it
	cancel  context.CancelFunc
	sync    func(ctx context.Context) error // tells it what lives
	schema  uint32                          // the newest that it can read; zero: it has not said
}

const (
	endGrace  = time.Second     // for a shim to end by itself
	killLimit = 5 * time.Second // for a process to die
	lastWords = 8               // lines of a dead shim that an error shows
)

// start runs the shim's binary and makes it active: Hello, Activate, the stream on which it asks us, Sync. ctx bounds that; run bounds its
// life. With an error it gives one that was to be active, and does not die.
func (h *Host) start(ctx, run context.Context) (*shim, error) {
	sh, err := h.launch(ctx, run, h.running.now())
	if err != nil {
		return nil, err
	}
	if err := h.employ(ctx, sh); err != nil {
		if !gone(sh) { // else it says so itself
			err = withLastWords(err, sh.process)
		}
		if err = errors.Join(err, sh.end(run)); gone(sh) {
			sh = nil
		}
		return sh, err
	}
	return sh, nil
}

// launch starts a binary and sends it Hello: a candidate.
func (h *Host) launch(ctx, run context.Context, binary digest) (*shim, error) {
	log := h.config.Logger.Named("shim")
	process, err := launch.Start(ctx, launch.Options{
		Store: h.binaries, Digest: binary, RunDir: h.config.RunDir, Database: h.config.layout().Database(), Generation: h.launches.Add(1),
		Args: logLevel(log), StartTimeout: h.config.StartTimeout, Logger: log,
	})
	if err != nil {
		return nil, err
	}
	sh := &shim{process: process, binary: binary, sync: func(ctx context.Context) error { return h.sync(ctx, process.Conn()) }}
	sh.life, sh.cancel = context.WithCancel(run)
	if err := h.greet(ctx, sh); err != nil {
		return nil, errors.Join(fmt.Errorf("greet the shim: %w", err), sh.end(run))
	}
	return sh, nil
}

func (h *Host) greet(ctx context.Context, sh *shim) error {
	ctx, cancel := noLongerThan(ctx, h.config.StartTimeout)
	defer cancel()
	reply, err := sh.control().Hello(ctx, h.hello())
	sh.schema = reply.GetSchemaNewest()
	return sh.explained(ctx, err)
}

// employ makes a candidate active that no other shim hands over to.
func (h *Host) employ(ctx context.Context, sh *shim) error {
	ctx, cancel := noLongerThan(ctx, activateLimit)
	defer cancel()
	if _, err := sh.activate(ctx, left{}); err != nil {
		return err
	}
	h.answerFor(sh)
	return nil
}

// answerFor answers what the shim asks, for as long as it lives.
func (h *Host) answerFor(sh *shim) {
	h.asked.Go(func() { h.answerCallbacks(sh.life, sh.process.Conn()) })
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

// logLevel has the shim log what the logger takes, and no more.
func logLevel(log hclog.Logger) []string {
	level := log.GetLevel()
	switch level {
	case hclog.NoLevel:
		level = hclog.DefaultLevel
	case hclog.Off:
		level = hclog.Error
	}
	return []string{"-log-level", level.String()}
}

// end ends the process, if it lives. It is never cut short by what ended ctx.
func (s *shim) end(ctx context.Context) error {
	s.cancel()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killLimit)
	defer cancel()
	return s.process.Stop(ctx, endGrace)
}

// withLastWords adds what the process wrote last: of a panic its first lines, which say what it was about.
func withLastWords(err error, p *launch.Process) error {
	lines := p.LastLines()
	if len(lines) == 0 {
		return err
	}
	from := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "panic: ") || strings.HasPrefix(l, "fatal error: ") })
	if from < 0 {
		from = max(0, len(lines)-lastWords)
	}
	lines = lines[from:min(len(lines), from+lastWords)]
	return fmt.Errorf("%w; its last words:\n  %s", err, strings.Join(lines, "\n  "))
}

// answerCallbacks answers what the shim asks, until life ends. A stream that breaks while the shim lives is opened again.
func (h *Host) answerCallbacks(life context.Context, conn grpc.ClientConnInterface) {
	for {
		err := h.answerStream(life, conn)
		if life.Err() != nil {
			return
		}
		h.config.Logger.Debug("the stream of the shim's questions is opened again", "error", err)
		select {
		case <-time.After(resumeFirst):
		case <-life.Done():
			return
		}
	}
}

// answerStream answers on one stream until it ends, each question on a goroutine of its own.
func (h *Host) answerStream(life context.Context, conn grpc.ClientConnInterface) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(life)
	defer cancel()
	stream, err := pb.NewCallbacksClient(conn).Serve(ctx)
	if err != nil {
		return err
	}
	var send sync.Mutex // a stream takes one Send at a time
	for {
		ask, err := stream.Recv()
		if err != nil {
			return err
		}
		wg.Go(func() {
			reply := h.answer(ctx, ask)
			send.Lock()
			defer send.Unlock()
			_ = stream.Send(reply)
		})
	}
}

const (
	answerLimit = 10 * time.Second // for an answer to a question without a deadline
	maxAnswer   = 4 << 20          // bytes; more would break the stream for all questions
)

func (h *Host) answer(ctx context.Context, ask *pb.CallbackRequest) *pb.CallbackReply {
	limit := answerLimit
	if d := ask.GetDeadline().AsDuration(); d > 0 {
		limit = d
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	value, err := h.ask(ctx, ask)
	if err == nil && len(value) > maxAnswer {
		err = registry.Errorf(registry.ErrExhausted, "the answer has %d bytes; at most %d can be passed on", len(value), maxAnswer)
	}
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
		return "", registry.Errorf(registry.ErrNotFound, "the environment variable %s is not set at the host; set it, and start the host again", env)
	}
	return "", registry.Errorf(registry.ErrUnsupported, "this host has no secrets by name: its orchestrator sets no Config.Secret")
}
