package rpc

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// callbackLimit bounds one callback to the host if the caller sets no earlier deadline.
const callbackLimit = 10 * time.Second

// maxSecret bounds a secret's value, in bytes.
const maxSecret = 64 << 10

// Callbacks sends requests to the host over the stream that the host opened. The zero value waits for that stream.
type Callbacks struct {
	pb.UnimplementedCallbacksServer

	mu      sync.Mutex // guards stream, arrived and last; never held during I/O
	stream  *callbackStream
	arrived chan struct{} // closed when a stream arrives
	last    uint64

	files secretFiles
}

// callbackStream is one stream from the host and its pending requests.
type callbackStream struct {
	out     chan *pb.CallbackRequest
	gone    chan struct{}
	mu      sync.Mutex // guards waiting
	waiting map[uint64]chan *pb.CallbackReply
}

// Serve serves the host's stream. A newer stream replaces the older one.
func (c *Callbacks) Serve(stream grpc.BidiStreamingServer[pb.CallbackReply, pb.CallbackRequest]) error {
	s := &callbackStream{out: make(chan *pb.CallbackRequest), gone: make(chan struct{}),
		waiting: map[uint64]chan *pb.CallbackReply{}}
	defer close(s.gone)
	c.attach(s)
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	wg.Go(func() {
		for {
			select {
			case ask := <-s.out:
				if stream.Send(ask) != nil {
					return
				}
			case <-ctx.Done():
				return
			}
		}
	})
	for {
		reply, err := stream.Recv()
		if err != nil {
			return err
		}
		s.answer(reply)
	}
}

func (c *Callbacks) attach(s *callbackStream) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stream = s
	if c.arrived != nil {
		close(c.arrived)
		c.arrived = nil
	}
}

func (s *callbackStream) answer(reply *pb.CallbackReply) {
	s.mu.Lock()
	waits := s.waiting[reply.GetId()]
	delete(s.waiting, reply.GetId())
	s.mu.Unlock()
	if waits != nil {
		waits <- reply
	}
}

// current waits for an open stream and returns it with the next request id.
func (c *Callbacks) current(ctx context.Context) (*callbackStream, uint64, error) {
	for {
		c.mu.Lock()
		if c.stream != nil && !closed(c.stream.gone) {
			defer c.mu.Unlock()
			c.last++
			return c.stream, c.last, nil
		}
		if c.arrived == nil {
			c.arrived = make(chan struct{})
		}
		arrived := c.arrived
		c.mu.Unlock()
		select {
		case <-arrived:
		case <-ctx.Done():
			return nil, 0, registry.Errorf(registry.ErrUnavailable, "the host serves no callbacks: %w",
				context.Cause(ctx))
		}
	}
}

func closed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// ask sends one request to the host and returns the value of the reply.
func (c *Callbacks) ask(ctx context.Context, what string, ask *pb.CallbackRequest) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, callbackLimit)
	defer cancel()
	s, id, err := c.current(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	end, _ := ctx.Deadline()
	ask.Id, ask.Deadline = id, durationpb.New(time.Until(end))
	reply, err := s.put(ctx, ask)
	switch {
	case err != nil:
		return nil, fmt.Errorf("%s: %w", what, err)
	case reply.GetError() != "":
		kind, _ := wire.KindError(reply.GetKind())
		return nil, registry.Errorf(kind, "%s: %s", what, reply.GetError())
	}
	return reply.GetValue(), nil
}

// put sends the request and waits for the reply with its id.
func (s *callbackStream) put(ctx context.Context, ask *pb.CallbackRequest) (*pb.CallbackReply, error) {
	answer := make(chan *pb.CallbackReply, 1)
	s.expect(ask.GetId(), answer)
	defer s.expect(ask.GetId(), nil)
	out := s.out
	for {
		select {
		case out <- ask:
			out = nil
		case reply := <-answer:
			return reply, nil
		case <-s.gone:
			return nil, registry.Errorf(registry.ErrUnavailable, "the host went away")
		case <-ctx.Done():
			return nil, registry.Errorf(registry.ErrUnavailable, "the host gave no answer: %w", context.Cause(ctx))
		}
	}
}

// expect delivers the reply with that id to answer. A nil answer discards the reply.
func (s *callbackStream) expect(id uint64, answer chan *pb.CallbackReply) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if answer == nil {
		delete(s.waiting, id)
		return
	}
	s.waiting[id] = answer
}

// File reads a file of the host that a job names with file().
func (c *Callbacks) File(ctx context.Context, path string) ([]byte, error) {
	return c.ask(ctx, fmt.Sprintf("file %q", path),
		&pb.CallbackRequest{Ask: &pb.CallbackRequest_File{File: &pb.AskFile{Path: path}}})
}

// Fence asks the host to stop all writes from a lost node.
func (c *Callbacks) Fence(ctx context.Context, node registry.NodeName) error {
	_, err := c.ask(ctx, fmt.Sprintf("fence node %q", node),
		&pb.CallbackRequest{Ask: &pb.CallbackRequest_Fence{Fence: &pb.AskFence{Node: string(node)}}})
	return err
}

// Resolve returns the secret values of the references for one call. Environment variables come from the host, because
// the shim's own environment lacks them.
func (c *Callbacks) Resolve(
	ctx context.Context, refs map[string]registry.Secret,
) (map[string]registry.SecretValue, error) {
	if len(refs) == 0 {
		return nil, nil
	}
	out := map[string]registry.SecretValue{}
	for name, ref := range refs {
		value, err := c.secret(ctx, ref)
		if err != nil {
			return nil, fmt.Errorf("secret %q: %w", name, err)
		}
		if len(value) > maxSecret {
			return nil, registry.Invalid("secret %q has %d bytes; at most %d are allowed", name, len(value), maxSecret)
		}
		out[name] = registry.SecretValue(value)
	}
	return out, nil
}

func (c *Callbacks) secret(ctx context.Context, ref registry.Secret) ([]byte, error) {
	askFor := func(name string) ([]byte, error) {
		return c.ask(ctx, fmt.Sprintf("secret %q", name),
			&pb.CallbackRequest{Ask: &pb.CallbackRequest_Secret{Secret: &pb.AskSecret{Name: name}}})
	}
	switch {
	case ref.Env != "":
		return askFor("env:" + ref.Env)
	case ref.File != "":
		return c.files.read(ctx, ref.File)
	case ref.Callback != "":
		return askFor(ref.Callback)
	}
	return nil, registry.Invalid("it names no environment variable, file or callback")
}
