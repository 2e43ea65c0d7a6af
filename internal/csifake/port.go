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

// Port is a socket without a socket: a connection to whichever plugin was last made with it (Config.Port), for model
// tests and for tests within a synctest bubble. A call goes straight to the plugin's own services, through the same
// journal, script and codec; request and answer are written and read again, so that nothing is shared. With
// Config.Blind and without Config.Mounts there is no system call in it, all waiting is for channels and timers, and all
// time is time.Now.
//
//	var port csifake.Port
//	fake := csifake.Start(t, csifake.Config{Port: &port, Blind: true})
//	csi.NewNodeClient(&port).NodeStageVolume(ctx, ...)
//
// As over a socket, a caller whose context ends has its answer at once, and the plugin may go on. A plugin that stops,
// dies or drops the connection fails the calls with UNAVAILABLE, and so does a Port with no plugin; the next plugin at
// the same Port is found by itself, as one at the same path would be. Garbage is UNAVAILABLE, and silence lasts as long
// as the caller's patience. There are no headers.
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

// take is the plugin's part: from now on the calls are its.
func (o *Port) take(p *Plugin) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.plugin, o.line = p, nil
}

// leave cuts the connection to the plugin, and makes no new one.
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

// leavePort is how a plugin ends at its port: no call begins, and those that run are waited for.
func (p *Plugin) leavePort() {
	p.mu.Lock()
	p.closing = true
	p.mu.Unlock()
	p.cfg.Port.leave(p)
	p.direct.Wait()
}

// connect finds the connection, or makes one.
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

// portCall is one call at a port, with what both its sides share.
type portCall struct {
	line *portLine
	ctx  context.Context    // the plugin's: it ends with the caller's, and with the connection
	end  context.CancelFunc // of the caller's side
	done chan struct{}      // closed as the plugin is through
	err  error              // what it said, once done
	late bool               // its caller, or the connection, had gone by then: nobody hears it
}

// begin lets the plugin work on a call in a goroutine of its own.
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
		c.late = c.ctx.Err() != nil || line.up.Err() != nil // the one follows the other, but later
	})
	return c, nil
}

// wait for the answer, for the end of the caller's patience or for that of the connection. An answer that is there
// counts, unless the plugin knew that its caller had gone.
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

// answer is the plugin's error as gRPC would tell it.
func (c *portCall) answer() error {
	if c.err == nil {
		return nil
	}
	if s, ok := status.FromError(c.err); ok {
		return s.Err()
	}
	return status.FromContextError(c.err).Err()
}

// Invoke is that of grpc.ClientConnInterface. Of the options it knows MaxCallRecvMsgSize and ForceCodecV2.
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
