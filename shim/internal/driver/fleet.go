package driver

import (
	"context"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"

	"holdfast/registry"
	"holdfast/shim/internal/supervise"
)

// Limits of one connection.
const (
	maxAnswer   = 4 << 20 // bytes of one message
	redialFirst = 10 * time.Millisecond
	redialMost  = time.Second
	dialLimit   = time.Second
)

// Instances finds the record of an instance, for its endpoint.
type Instances interface {
	Get(registry.InstanceKey) (registry.Instance, bool)
}

// Fleet holds the connections to plugins: one per task, whatever roles it serves.
type Fleet struct {
	mu        sync.Mutex // guards conns; held for no longer than a look-up
	conns     map[registry.TaskKey]*Conn
	instances Instances
}

// New is a fleet without connections. instances may be nil where only Open is used.
func New(instances Instances) *Fleet {
	return &Fleet{conns: map[registry.TaskKey]*Conn{}, instances: instances}
}

// Conn is the connection to one task's socket.
type Conn struct {
	Task registry.TaskKey
	path string
	cc   *grpc.ClientConn
}

// Open is the connection to the task's socket; it is made if there is none. Nothing is dialled before the first call.
func (f *Fleet) Open(t registry.TaskKey, at registry.Endpoint) (*Conn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.conns[t]; c != nil && c.path == at.Host {
		return c, nil
	}
	c, err := dial(t, at.Host)
	if err != nil {
		return nil, err
	}
	if old := f.conns[t]; old != nil {
		_ = old.cc.Close()
	}
	f.conns[t] = c
	return c, nil
}

// Close ends the task's connection, if there is one. Calls under way end uncertain.
func (f *Fleet) Close(t registry.TaskKey) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.conns[t]; c != nil {
		_ = c.cc.Close()
		delete(f.conns, t)
	}
}

// CloseAll ends every connection.
func (f *Fleet) CloseAll() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for t, c := range f.conns {
		_ = c.cc.Close()
		delete(f.conns, t)
	}
}

// of is the connection to the instance's task.
func (f *Fleet) of(k registry.InstanceKey) (*Conn, error) {
	in, known := f.instances.Get(k)
	if !known {
		return nil, registry.Errorf(registry.ErrUnavailable, "%s is not registered any more", k)
	}
	return f.Open(k.TaskKey(), in.Endpoint)
}

func dial(t registry.TaskKey, path string) (*Conn, error) {
	cc, err := grpc.NewClient("passthrough:///"+path,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, path string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}),
		grpc.WithAuthority("localhost"),
		grpc.WithDisableServiceConfig(),
		grpc.WithIdleTimeout(0),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: redialFirst, Multiplier: 1.6, Jitter: 0.2, MaxDelay: redialMost},
			MinConnectTimeout: dialLimit,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer), grpc.MaxCallSendMsgSize(maxAnswer)),
	)
	if err != nil {
		return nil, registry.Errorf(registry.ErrInternal, "connect to %s: %w", path, err)
	}
	return &Conn{Task: t, path: path, cc: cc}, nil
}

// Lost returns once the connection is lost and nobody answers a new one, with the reason, or nil when ctx ends.
func (c *Conn) Lost(ctx context.Context) error {
	for ctx.Err() == nil {
		state := c.cc.GetState()
		if state == connectivity.Ready || state == connectivity.Shutdown {
			if !c.cc.WaitForStateChange(ctx, state) {
				return nil
			}
			continue
		}
		if err := c.knock(ctx); err != nil && ctx.Err() == nil {
			return err
		}
		c.cc.Connect()
		c.settle(ctx, state)
	}
	return nil
}

// knock dials the socket and hangs up.
func (c *Conn) knock(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", c.path)
	if err != nil {
		return err
	}
	return conn.Close()
}

// settle waits until the state is no longer was, at most one dial long.
func (c *Conn) settle(ctx context.Context, was connectivity.State) {
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	c.cc.WaitForStateChange(ctx, was)
}

var _ supervise.Fleet = (*Fleet)(nil)

// Connect is Open, for the supervisor.
func (f *Fleet) Connect(t registry.TaskKey, at registry.Endpoint) (supervise.Plugin, error) {
	return f.Open(t, at)
}
