package csi

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"holdfast/registry"
)

// Limits of one connection.
const (
	maxAnswer   = 4 << 20 // bytes of one message
	window      = 1 << 20 // bytes of an answer that may come before it is read; less than maxAnswer: readAnswer relies on it
	maxHeaders  = 1 << 20 // bytes of headers and trailers: the plugin's error texts
	redialFirst = 10 * time.Millisecond
	redialMost  = time.Second
	dialLimit   = time.Second
	idleLimit   = 5 * time.Minute // a connection that nobody uses closes by itself, and comes back with the next call
)

// Conn is the connection to one task's socket. It is made anew by whoever needs it after it was lost.
type Conn struct {
	Task  registry.TaskKey
	path  string
	dial  Dial
	cc    *grpc.ClientConn
	sent  *memory       // to the plugin
	news  atomic.Uint64 // counts what may change what the plugin says of itself: connections made, and some answers (send)
	known atomic.Uint64 // news at the last good Describe
	made  atomic.Uint64 // connections
	cut   atomic.Int64  // when a call was last cut off that the plugin may have heard of, Unix time in ns

	supervised bool // guarded by the fleet's lock: a supervisor uses it, so only Close or the end of the fleet closes it

	mu  sync.Mutex               // guards met; held for no longer than a look-up
	met map[registry.Role]uint64 // connections made when the plugin last said what it is in the role

	sockets sockets
}

func newConn(t registry.TaskKey, path string, d Dial, sent *memory) (*Conn, error) {
	c := &Conn{Task: t, path: path, dial: d, sent: sent}
	c.news.Store(1) // what it says of itself has not been asked yet
	cc, err := grpc.NewClient("passthrough:///"+path,
		grpc.WithTransportCredentials(numbered(c)),
		grpc.WithPerRPCCredentials(sameLine{}),
		grpc.WithContextDialer(c.dialSocket),
		grpc.WithAuthority("localhost"),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithIdleTimeout(idleLimit),
		grpc.WithInitialWindowSize(window),
		grpc.WithUnaryInterceptor(readAnswer),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithStatsHandler(ear{c}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: redialFirst, Multiplier: 1.6, Jitter: 0.2, MaxDelay: redialMost},
			MinConnectTimeout: dialLimit,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer), grpc.ForceCodecV2(exact{})),
	)
	if err != nil {
		return nil, registry.Errorf(registry.ErrInternal, "connect to %s: %w", path, err)
	}
	c.cc = cc
	return c, nil
}

func dial(ctx context.Context, path string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", path)
}

// cutHeard is after how long a plugin has surely heard that a call was cut off.
const cutHeard = 2 * time.Second

func (c *Conn) cutLately() bool { return time.Now().UnixNano()-c.cut.Load() < int64(cutHeard) }

func (c *Conn) close() { _ = c.cc.Close() } // closed before is as good

// ready returns once calls can be sent, or why not. It dials at once, whatever the back-off of earlier dials is, and waits for no
// longer than one dial may take.
func (c *Conn) ready(ctx context.Context) error {
	if c.cc.GetState() == connectivity.Ready {
		return nil
	}
	if err := c.knock(ctx); err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	return c.settle(ctx)
}

// knock dials the socket and hangs up. It fails if nobody listens there. A full queue of callers is somebody who is slow.
func (c *Conn) knock(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	conn, err := c.dial(ctx, c.path)
	if err == nil {
		return conn.Close()
	}
	if ctx.Err() != nil || errors.Is(err, syscall.EAGAIN) {
		return nil
	}
	return err
}

// settle connects now, and waits for the end of that, at most one dial long.
func (c *Conn) settle(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	for limited.Err() == nil {
		wait := dialLimit
		state := c.cc.GetState()
		switch state {
		case connectivity.Ready:
			return nil
		case connectivity.Shutdown:
			return status.Error(codes.Unavailable, "the connection is closed")
		case connectivity.Idle:
			c.cc.Connect()
		case connectivity.TransientFailure:
			// A process that dies may have taken the knock and not the call: its listener is the last to go.
			if err := c.knock(limited); err != nil {
				return status.Error(codes.Unavailable, err.Error())
			}
			c.cc.ResetConnectBackoff()
			wait = 2 * redialFirst
		}
		c.changes(limited, state, wait)
	}
	switch {
	case c.cc.GetState() == connectivity.Ready: // in the last moment
		return nil
	case ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	}
	return status.Errorf(codes.Unavailable, "somebody listens at %s, but does not speak gRPC", c.path)
}

// changes waits until the state is another one, at most for limit.
func (c *Conn) changes(ctx context.Context, state connectivity.State, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	c.cc.WaitForStateChange(ctx, state)
}

// Lost returns once the connection is lost and nobody answers a new one, with the reason, or nil when ctx ends.
func (c *Conn) Lost(ctx context.Context) error {
	for ctx.Err() == nil {
		state := c.cc.GetState()
		if state == connectivity.Ready || state == connectivity.Shutdown {
			c.cc.WaitForStateChange(ctx, state)
			continue
		}
		if err := c.knock(ctx); err != nil && ctx.Err() == nil {
			return err
		}
		_ = c.settle(ctx) // who answers the knock but not the call is seen by its heartbeat
	}
	return nil
}

// Outdated says whether something has happened since the last good Describe after which what it told may not hold any more: another
// connection, which may lead to another process, or an answer RESOURCE_EXHAUSTED or UNIMPLEMENTED.
func (c *Conn) Outdated() bool { return c.news.Load() != c.known.Load() }
