package csifake

import (
	"context"
	"os"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// Port connects to the last plugin that was made with it (Config.Port), without a socket. It is for model tests and for
// tests within a synctest bubble. A call goes directly to the plugin's services, through the same journal, script and
// codec. Request and answer are encoded and decoded again, so that nothing is shared. With Config.Blind and without
// Config.Mounts, a call makes no system call, waits only for channels and timers, and takes all times from time.Now.
//
//	var port csifake.Port
//	fake := csifake.Start(t, csifake.Config{Port: &port, Blind: true})
//	csi.NewNodeClient(&port).NodeStageVolume(ctx, ...)
//
// As over a socket, a caller whose context ends returns at once, and the plugin may continue. If the plugin stops, dies
// or drops the connection, calls fail with UNAVAILABLE, as at a Port without a plugin. The next plugin at the same Port
// is found automatically, as at the same path. Garbage is UNAVAILABLE. A call without an answer lasts until its context
// ends. There are no headers.
type Port struct {
	mu     sync.Mutex
	plugin *Plugin
	line   *portLine // the connection; nil: the next call makes one
	last   uint64
}

// portLine is one connection.
type portLine struct {
	number uint64
	plugin *Plugin
	up     context.Context // until it is cut
	cutIt  context.CancelFunc
}

func (l *portLine) cut() { l.cutIt() }

// take makes p the plugin that gets the calls from now on.
func (o *Port) take(p *Plugin) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.plugin, o.line = p, nil
}

// leave cuts the connection to the plugin, and prevents new ones.
func (o *Port) leave(p *Plugin) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.plugin != p {
		return
	}
	if o.line != nil {
		o.line.cut()
	}
	o.plugin, o.line = nil, nil
}

// leavePort ends the plugin's service at its port: it prevents new calls and waits for running ones.
func (p *Plugin) leavePort() {
	p.mu.Lock()
	p.closing = true
	p.mu.Unlock()
	p.cfg.Port.leave(p)
	p.direct.Wait()
}

// connect returns the connection, or makes one.
func (o *Port) connect(ctx context.Context) (*portLine, error) {
	o.mu.Lock()
	p, line := o.plugin, o.line
	o.mu.Unlock()
	if p == nil {
		return nil, status.Error(codes.Unavailable, "csifake: no plugin is at this port")
	}
	if line != nil && line.up.Err() == nil {
		return line, nil
	}
	return o.connected(p)
}

func (o *Port) connected(p *Plugin) (*portLine, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.plugin == p && (o.line == nil || o.line.up.Err() != nil) {
		o.last++
		o.line = &portLine{number: o.last, plugin: p}
		o.line.up, o.line.cutIt = context.WithCancel(context.Background())
	}
	if o.line == nil {
		return nil, errGone
	}
	return o.line, nil
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// portCall is one call at a port, with the state that both ends share.
type portCall struct {
	line *portLine
	ctx  context.Context    // the plugin's context: it ends with the caller's context and with the connection
	end  context.CancelFunc // ends the caller's side
	done chan struct{}      // closed when the plugin has handled the call
	err  error              // the plugin's error, valid after done
	late bool               // the caller or the connection was gone by then, so the answer is lost
}

// begin lets the plugin handle a call in a new goroutine.
func (o *Port) begin(ctx context.Context, work func(*portCall) error) (*portCall, error) {
	if ctx.Err() != nil {
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	line, err := o.connect(ctx)
	if err != nil {
		return nil, err
	}
	p := line.plugin
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closing {
		return nil, errGone
	}
	c := &portCall{line: line, done: make(chan struct{})}
	ctx, cancel := context.WithCancel(peer.NewContext(ctx, &peer.Peer{Addr: peerAddr{line.number, os.Getpid(), line}}))
	stop := context.AfterFunc(line.up, cancel)
	c.ctx, c.end = ctx, func() { stop(); cancel() }
	p.direct.Go(func() {
		defer close(c.done)
		c.err = work(c)
		c.late = c.ctx.Err() != nil || line.up.Err() != nil // c.ctx ends after line.up, with a delay
	})
	return c, nil
}

// wait waits for the answer, for the end of ctx or for the end of the connection. An available answer counts, unless
// the plugin knew that its caller was gone.
func (c *portCall) wait(ctx context.Context) error {
	defer c.end()
	select {
	case <-c.done:
	case <-ctx.Done():
	case <-c.line.up.Done():
	}
	switch {
	case closed(c.done) && !c.late:
		return c.answer()
	case ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	}
	return errGone
}

// answer returns the plugin's error as gRPC would report it.
func (c *portCall) answer() error {
	if c.err == nil {
		return nil
	}
	if s, ok := status.FromError(c.err); ok {
		return s.Err()
	}
	return status.FromContextError(c.err).Err()
}

// Invoke implements grpc.ClientConnInterface. It supports the options MaxCallRecvMsgSize and ForceCodecV2.
func (o *Port) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	codec, most := portOptions(opts)
	sent, err := codec.Marshal(args)
	if err != nil {
		return status.Errorf(codes.Internal, "csifake: write the request: %v", err)
	}
	var got mem.BufferSlice
	c, err := o.begin(ctx, func(c *portCall) (err error) {
		got, err = c.line.plugin.served.call(c, method, sent)
		return err
	})
	if err != nil {
		return err
	}
	if err := c.wait(ctx); err != nil {
		return err
	}
	return receive(codec, got, most, reply)
}

func portOptions(opts []grpc.CallOption) (codec encoding.CodecV2, most int) {
	codec, most = encoding.GetCodecV2(grpcproto.Name), maxAnswer
	for _, o := range opts {
		switch o := o.(type) {
		case grpc.MaxRecvMsgSizeCallOption:
			most = o.MaxRecvMsgSize
		case grpc.ForceCodecV2CallOption:
			codec = o.CodecV2
		}
	}
	return codec, most
}

func receive(codec encoding.CodecV2, got mem.BufferSlice, most int, reply any) error {
	if got.Len() > most {
		return status.Errorf(codes.ResourceExhausted, "csifake: the answer has %d bytes, more than %d", got.Len(), most)
	}
	if err := codec.Unmarshal(got, reply); err != nil {
		return status.Errorf(codes.Internal, "csifake: read the answer: %v", err)
	}
	return nil
}
