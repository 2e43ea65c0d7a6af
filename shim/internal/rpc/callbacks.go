package rpc

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"holdfast/internal/secretfile"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// Limits of one callback to the host, if the caller sets no earlier deadline.
const (
	callbackLimit = 10 * time.Second
	fenceLimit    = 5 * time.Minute // the host may have to switch a machine off
)

// maxSecret bounds a secret's value, in bytes.
const maxSecret = secretfile.Max

// Callbacks sends requests to the host, over a stream that the host opens. A request waits for that stream.
type Callbacks struct {
	pb.UnimplementedCallbacksServer
	queue chan *callback // leads to the newest stream

	mu         sync.Mutex // guards stopNewest; held only briefly
	stopNewest func()     // makes the newest stream take no more requests
}

// NewCallbacks returns the Callbacks of a process whose host has not opened a stream yet.
func NewCallbacks() *Callbacks { return &Callbacks{queue: make(chan *callback), stopNewest: func() {}} }

// callback is one request to the host.
type callback struct {
	req   *pb.CallbackRequest
	reply chan *pb.CallbackReply // gets one reply, or is closed at the end of the stream
}

// Serve serves the host's stream. New requests go to the newest stream only.
func (c *Callbacks) Serve(stream grpc.BidiStreamingServer[pb.CallbackReply, pb.CallbackRequest]) error {
	ctx, cancel := context.WithCancel(stream.Context())
	c.mu.Lock()
	c.stopNewest()
	c.stopNewest = cancel
	c.mu.Unlock()
	var pending sync.Map // of *callback by ID: the requests on this stream that have no reply yet
	defer pending.Range(func(_, call any) bool {
		close(call.(*callback).reply)
		return true
	})
	var sending sync.WaitGroup
	defer sending.Wait()
	defer cancel()
	sending.Go(func() {
		for id := uint64(1); ; id++ {
			select {
			case call := <-c.queue:
				call.req.Id = id
				pending.Store(id, call)
				if stream.Send(call.req) != nil {
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
		if call, found := pending.LoadAndDelete(reply.GetId()); found {
			call.(*callback).reply <- reply
		}
	}
}

// call sends one request to the host and returns the value of the reply. If the stream ends first, call sends the
// request on the next one: only the stream has broken, or this process ends, and the next shim answers the caller.
func (c *Callbacks) call(ctx context.Context, what string, req *pb.CallbackRequest) ([]byte, error) {
	limit := callbackLimit
	if req.GetFence() != nil {
		limit = fenceLimit
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	end, _ := ctx.Deadline()
	for {
		req.Deadline = durationpb.New(time.Until(end))
		call := &callback{req, make(chan *pb.CallbackReply, 1)}
		select {
		case c.queue <- call:
		case <-ctx.Done():
			return nil, registry.Errorf(registry.ErrUnavailable, "%s: the host serves no callbacks: %w", what,
				context.Cause(ctx))
		}
		select {
		case reply, answered := <-call.reply:
			if !answered {
				continue
			}
			if reply.GetError() != "" {
				kind, _ := wire.KindError(reply.GetKind())
				return nil, registry.Errorf(kind, "%s: %s", what, reply.GetError())
			}
			return reply.GetValue(), nil
		case <-ctx.Done():
			return nil, registry.Errorf(registry.ErrUnavailable, "%s: the host gave no answer: %w", what,
				context.Cause(ctx))
		}
	}
}

// File reads a file of the host that a job names with file().
func (c *Callbacks) File(ctx context.Context, path string) ([]byte, error) {
	return c.call(ctx, fmt.Sprintf("file %q", path),
		&pb.CallbackRequest{Ask: &pb.CallbackRequest_File{File: &pb.AskFile{Path: path}}})
}

// Fence asks the host to stop all writes from a lost node.
func (c *Callbacks) Fence(ctx context.Context, node registry.NodeName) error {
	_, err := c.call(ctx, fmt.Sprintf("fence node %q", node),
		&pb.CallbackRequest{Ask: &pb.CallbackRequest_Fence{Fence: &pb.AskFence{Node: string(node)}}})
	return err
}

// Resolve returns the values of secrets for one call. Environment variables come from the host, because the shim's own
// environment lacks them.
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
	fromHost := func(name string) ([]byte, error) {
		return c.call(ctx, fmt.Sprintf("secret %q", name),
			&pb.CallbackRequest{Ask: &pb.CallbackRequest_Secret{Secret: &pb.AskSecret{Name: name}}})
	}
	switch {
	case ref.Env != "":
		return fromHost("env:" + ref.Env)
	case ref.File != "":
		return secretfile.Read(ctx, ref.File)
	case ref.Callback != "":
		return fromHost(ref.Callback)
	}
	return nil, registry.Invalid("it names no environment variable, file or callback")
}
