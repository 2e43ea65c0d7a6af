package csifake

import (
	"context"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	headers "google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// served has the services of a plugin, by the full names of their methods.
type served struct {
	unary   map[string]unary
	streams map[string]func(grpc.ServerStream) error
}

// unary handles a call with one answer.
type unary func(ctx context.Context, read func(any) error, i grpc.UnaryServerInterceptor) (any, error)

// RegisterService implements grpc.ServiceRegistrar.
func (s *served) RegisterService(desc *grpc.ServiceDesc, impl any) {
	if s.unary == nil {
		s.unary, s.streams = map[string]unary{}, map[string]func(grpc.ServerStream) error{}
	}
	for _, m := range desc.Methods {
		name := "/" + desc.ServiceName + "/" + m.MethodName
		s.unary[name] = func(ctx context.Context, read func(any) error, i grpc.UnaryServerInterceptor) (any, error) {
			return m.Handler(impl, ctx, read, i)
		}
	}
	for _, m := range desc.Streams {
		s.streams["/"+desc.ServiceName+"/"+m.StreamName] = func(out grpc.ServerStream) error {
			return m.Handler(impl, out)
		}
	}
}

// call is the plugin's end of a call with one answer.
func (s *served) call(c *portCall, method string, sent mem.BufferSlice) (mem.BufferSlice, error) {
	p, do := c.line.plugin, s.unary[method]
	if do == nil {
		return nil, p.unserved(c.ctx, method)
	}
	reply, err := do(c.ctx, func(v any) error { return garbling{}.Unmarshal(sent, v) }, p.intercept)
	if err != nil {
		return nil, err
	}
	return garbling{}.Marshal(reply)
}

// NewStream implements grpc.ClientConnInterface.
func (o *Port) NewStream(
	ctx context.Context, _ *grpc.StreamDesc, method string, opts ...grpc.CallOption,
) (grpc.ClientStream, error) {
	s := &portStream{caller: ctx, up: make(chan mem.BufferSlice, 1), down: make(chan mem.BufferSlice)}
	s.codec, s.most = portOptions(opts)
	var err error
	s.call, err = o.begin(ctx, func(c *portCall) error {
		if do := c.line.plugin.served.streams[method]; do != nil {
			return do(&pluginStream{call: c, up: s.up, down: s.down})
		}
		return c.line.plugin.unserved(c.ctx, method)
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// portStream is the caller's end of a stream with one request and many answers.
type portStream struct {
	call     *portCall
	caller   context.Context
	codec    encoding.CodecV2
	most     int
	up, down chan mem.BufferSlice
}

func (s *portStream) Header() (headers.MD, error) { return nil, nil }
func (s *portStream) Trailer() headers.MD         { return nil }
func (s *portStream) Context() context.Context    { return s.caller }
func (s *portStream) CloseSend() error            { close(s.up); return nil }

func (s *portStream) SendMsg(m any) error {
	b, err := s.codec.Marshal(m)
	if err != nil {
		return status.Convert(err).Err()
	}
	select {
	case s.up <- b:
		return nil
	case <-s.call.done:
		return io.EOF
	case <-s.call.ctx.Done():
		return io.EOF
	}
}

func (s *portStream) RecvMsg(m any) error {
	select {
	case b := <-s.down:
		return receive(s.codec, b, s.most, m)
	case <-s.call.done:
	case <-s.caller.Done():
	case <-s.call.line.up.Done():
	}
	if err := s.call.wait(s.caller); err != nil {
		return err
	}
	return io.EOF
}

// pluginStream is the plugin's end of a stream.
type pluginStream struct {
	call     *portCall
	up, down chan mem.BufferSlice
}

func (s *pluginStream) SetHeader(headers.MD) error  { return nil }
func (s *pluginStream) SendHeader(headers.MD) error { return nil }
func (s *pluginStream) SetTrailer(headers.MD)       {}
func (s *pluginStream) Context() context.Context    { return s.call.ctx }

func (s *pluginStream) SendMsg(m any) error {
	b, err := garbling{}.Marshal(m)
	if err != nil {
		return err
	}
	select {
	case s.down <- b:
		return nil
	case <-s.call.ctx.Done():
		return s.call.ctx.Err()
	}
}

func (s *pluginStream) RecvMsg(m any) error {
	select {
	case b, more := <-s.up:
		if !more {
			return io.EOF
		}
		return garbling{}.Unmarshal(b, m)
	case <-s.call.ctx.Done():
		return s.call.ctx.Err()
	}
}
