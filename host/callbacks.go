package host

import (
	"context"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

const (
	callbackLimit  = 10 * time.Second      // for a callback without a deadline
	maxAnswer      = 4 << 20               // bytes; more would break the stream for all callbacks
	callbackResume = 20 * time.Millisecond // before a stream that broke is opened again
)

// serveCallbacks answers the shim's callbacks for as long as it lives. The host opens the stream, and opens it again
// if it breaks while the shim lives.
func (h *Host) serveCallbacks(sh *shim) {
	h.background.Go(func() {
		for {
			err := h.serveStream(sh.ctx, sh.process.Conn())
			if sh.ctx.Err() != nil {
				return
			}
			h.config.Logger.Debug("opening the stream of callbacks again", "error", err)
			select {
			case <-time.After(callbackResume):
			case <-sh.ctx.Done():
				return
			}
		}
	})
}

// serveStream answers on one stream until it ends, each callback on its own goroutine. It returns once all of them have
// ended.
func (h *Host) serveStream(ctx context.Context, conn grpc.ClientConnInterface) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := pb.NewCallbacksClient(conn).Serve(ctx)
	if err != nil {
		return err
	}
	var send sync.Mutex // a stream takes one Send at a time
	for {
		req, err := stream.Recv()
		if err != nil {
			return err
		}
		wg.Go(func() {
			reply := h.answer(ctx, req)
			if ctx.Err() != nil {
				return // the stream has ended, so the reply would only say that
			}
			send.Lock()
			defer send.Unlock()
			_ = stream.Send(reply)
		})
	}
}

// answer returns the reply to one request: the answer of the orchestrator's function within the time limit of the
// request, or an error. If the function does not return when its context ends, answer does not wait for it.
func (h *Host) answer(ctx context.Context, req *pb.CallbackRequest) *pb.CallbackReply {
	limit := callbackLimit
	if d := req.GetDeadline().AsDuration(); d > 0 {
		limit = d
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var value []byte
	var err error
	returned := make(chan struct{})
	go func() {
		defer close(returned)
		value, err = h.config.callback(ctx, req)
	}()
	select {
	case <-returned:
	case <-ctx.Done(): // Close must not wait for a function that ignores its context
		return &pb.CallbackReply{Id: req.GetId(), Error: ctx.Err().Error(), Kind: wire.Kind(ctx.Err())}
	}
	if err == nil && len(value) > maxAnswer {
		err = registry.Errorf(registry.ErrExhausted, "the answer has %d bytes; at most %d can be passed on",
			len(value), maxAnswer)
	}
	reply := &pb.CallbackReply{Id: req.GetId(), Value: value}
	if err != nil {
		reply.Error, reply.Kind, reply.Value = err.Error(), wire.Kind(err), nil
	}
	return reply
}

// callback calls the function of c that the request asks for.
func (c *Config) callback(ctx context.Context, req *pb.CallbackRequest) ([]byte, error) {
	switch q := req.GetAsk().(type) {
	case *pb.CallbackRequest_Secret:
		value, err := c.secret(ctx, q.Secret.GetName())
		return []byte(value), err
	case *pb.CallbackRequest_File:
		if c.File == nil {
			return nil, unsupported("this host reads no files for jobs: its orchestrator sets no Config.File")
		}
		return c.File(ctx, q.File.GetPath())
	case *pb.CallbackRequest_Fence:
		if c.Fence == nil {
			return nil, unsupported("this host cannot fence a node: its orchestrator sets no Config.Fence")
		}
		return nil, c.Fence(ctx, q.Fence.GetNode())
	}
	return nil, unsupported("this host does not know this callback; update the host")
}

func unsupported(text string) error { return registry.Errorf(registry.ErrUnsupported, "%s", text) }

func (c *Config) secret(ctx context.Context, name string) (string, error) {
	if c.Secret != nil {
		return c.Secret(ctx, name)
	}
	if env, is := strings.CutPrefix(name, "env:"); is {
		if value, set := os.LookupEnv(env); set {
			return value, nil
		}
		return "", registry.Errorf(registry.ErrNotFound,
			"the environment variable %s is not set at the host; set it, and start the host again", env)
	}
	return "", registry.Errorf(registry.ErrUnsupported,
		"this host has no secrets by name: its orchestrator sets no Config.Secret")
}
