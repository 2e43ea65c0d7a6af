package csi

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"holdfast/registry"
)

// Limits of one connection.
const (
	maxAnswer  = 4 << 20 // bytes of one message
	window     = 1 << 20 // bytes of an answer before it is read; less than maxAnswer, which invoke relies on
	maxHeaders = 1 << 20 // bytes of headers and trailers: the plugin's error texts
	dialLimit  = time.Second
	dialPause  = 10 * time.Millisecond // between two tries within dialLimit
)

// Conn connects to one task's socket. It makes a new link when a caller needs one and the last link is lost.
type Conn struct {
	plugin  registry.PluginID
	path    string
	dial    Dial
	secrets *sentSecrets // to the plugin
	metrics *CallMetrics
	spans   *spans // nil: none are made

	ctx    context.Context // ends when the Conn is closed
	cancel context.CancelFunc

	linking singleflight.Group // concurrent callers share one try

	mu   sync.Mutex // guards link; held for no longer than a look-up
	link *link

	running   atomic.Int64  // calls of instances
	changes   atomic.Uint64 // counts events that may change the plugin's description: new links and some answers
	described atomic.Uint64 // value of changes at the last good Describe
}

var errClosed = errors.New("the connection is closed")

func newConn(id registry.PluginID, path string, d Dial, s *sentSecrets, m *CallMetrics) *Conn {
	c := &Conn{plugin: id, path: path, dial: d, secrets: s, metrics: m}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.changes.Store(1) // the plugin has not been described yet
	return c
}

func dial(ctx context.Context, path string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", path)
}

// close closes the connection for good. Calls under way end with CANCELLED.
func (c *Conn) close() {
	if l := c.stopLinks(); l != nil {
		_ = l.cc.Close()
	}
}

// stopLinks prevents new links, and returns the current one.
func (c *Conn) stopLinks() *link {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cancel()
	return c.link
}

// sever prevents new links. If a call on the current link was cut off, sever also shuts the socket down, so that the
// plugin learns of that before sever returns. It does not wait for goroutines. The caller calls close afterwards.
func (c *Conn) sever() {
	if l := c.stopLinks(); l != nil && l.cut.Load() {
		hangUp(l.socket)
	}
}

// hangUp shuts down both directions of a connection at once.
func hangUp(conn net.Conn) {
	if sc, is := conn.(syscall.Conn); is {
		shutdown := func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) }
		if raw, err := sc.SyscallConn(); err == nil && raw.Control(shutdown) == nil {
			return
		}
	}
	_ = conn.Close()
}

// connect returns a link that is up. It fails at once if no process listens, and after dialLimit if the listener does
// not answer. Its error is a gRPC status.
func (c *Conn) connect(ctx context.Context) (*link, error) {
	l, err := c.tryConnect(ctx)
	switch {
	case err == nil:
		return l, nil
	case ctx.Err() != nil:
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	return nil, status.Error(codes.Unavailable, err.Error())
}

func (c *Conn) tryConnect(ctx context.Context) (*link, error) {
	if l := c.current(); l != nil || ctx.Err() != nil {
		return l, ctx.Err()
	}
	linked := c.linking.DoChan("", func() (any, error) { return c.newLink() })
	select {
	case r := <-linked:
		l, _ := r.Val.(*link)
		return l, r.Err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// current returns the link if it is up, else nil.
func (c *Conn) current() *link {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() == nil && c.link != nil && c.link.up() {
		return c.link
	}
	return nil
}

// errSilent means that a process listens, but that no gRPC connection to it was made: it does not speak gRPC, or it did
// not accept the connection within dialLimit.
var errSilent = errors.New("the listener does not speak gRPC")

// newLink makes a link. Until dialLimit it tries again if the queue of the listener is full (a slow plugin), or if a
// connection is accepted and then reset (perhaps a dying process, whose listener is closed last).
func (c *Conn) newLink() (*link, error) {
	if l := c.current(); l != nil { // another caller has made it
		return l, nil
	}
	ctx, cancel := context.WithTimeout(c.ctx, dialLimit)
	defer cancel()
	for ctx.Err() == nil {
		socket, err := c.dial(ctx, c.path)
		if err == nil {
			if l, err := newLink(ctx, c, socket); err == nil {
				return l, c.setLink(l)
			}
		} else if ctx.Err() == nil && !errors.Is(err, syscall.EAGAIN) {
			return nil, err
		}
		select {
		case <-time.After(dialPause):
		case <-ctx.Done():
		}
	}
	if c.ctx.Err() != nil {
		return nil, errClosed
	}
	return nil, fmt.Errorf("connect to %s within %v: %w", c.path, dialLimit, errSilent)
}

// setLink makes l the current link. If the Conn is closed, it closes l and returns errClosed.
func (c *Conn) setLink(l *link) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		_ = l.cc.Close()
		return errClosed
	}
	c.link = l // the previous link closes itself when its socket closes
	c.changes.Add(1)
	return nil
}

// Lost returns the reason once the connection is lost and no process accepts a new one. It returns nil when ctx ends.
// If a process accepts a connection but does not speak gRPC, Lost leaves it to the heartbeat.
func (c *Conn) Lost(ctx context.Context) error {
	for ctx.Err() == nil {
		l, err := c.tryConnect(ctx)
		switch {
		case ctx.Err() != nil:
		case err == nil:
			l.cc.WaitForStateChange(ctx, connectivity.Ready)
		case errors.Is(err, errClosed):
			<-ctx.Done()
		case !errors.Is(err, errSilent):
			return err
		}
	}
	return nil
}

// Outdated reports whether the last good Describe may be outdated. A new link may lead to another process, and an
// answer RESOURCE_EXHAUSTED or UNIMPLEMENTED may contradict the description.
func (c *Conn) Outdated() bool { return c.changes.Load() != c.described.Load() }

// link is one connection to one process. A grpc.ClientConn reconnects by itself, perhaps to another process than the
// one that was described. Each link therefore has its own ClientConn, which dials only once.
type link struct {
	cc     *grpc.ClientConn
	socket net.Conn
	cut    atomic.Bool            // a call that the plugin may have read was cut off
	driver atomic.Pointer[string] // the name that the plugin reports; nil: not known yet

	mu        sync.Mutex                             // guards described
	described map[registry.Role]registry.Fingerprint // as the plugin described itself over this link
}

// newLink speaks gRPC over the socket, which the link owns from now on. It returns once the plugin has answered.
func newLink(ctx context.Context, c *Conn, socket net.Conn) (*link, error) {
	l := &link{socket: socket, described: map[registry.Role]registry.Fingerprint{}}
	var dialled atomic.Bool
	cc, err := grpc.NewClient("passthrough:///"+c.path,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			if dialled.Swap(true) {
				return nil, errors.New("the connection to the plugin was lost")
			}
			return &ownSocket{socket, sync.OnceFunc(func() { go func() { _ = l.cc.Close() }() })}, nil
		}),
		grpc.WithAuthority("localhost"),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithIdleTimeout(0),
		grpc.WithInitialWindowSize(window),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithStatsHandler(statsHandler{c, l}),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: dialLimit}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer), grpc.ForceCodecV2(codec{})),
	)
	if err != nil {
		_ = socket.Close()
		return nil, err
	}
	l.cc = cc
	cc.Connect()
	for state := cc.GetState(); state != connectivity.Ready; state = cc.GetState() {
		failed := state == connectivity.TransientFailure || state == connectivity.Shutdown
		if failed || !cc.WaitForStateChange(ctx, state) {
			_, _ = cc.Close(), socket.Close()
			return nil, errSilent
		}
	}
	return l, nil
}

// ownSocket is the socket of a link. gRPC closes it when the connection is lost, or when the plugin has closed the
// connection and the last call is over.
type ownSocket struct {
	net.Conn
	closed func()
}

func (s *ownSocket) Close() error { defer s.closed(); return s.Conn.Close() }

func (l *link) up() bool { return l.cc.GetState() == connectivity.Ready }

// describedAs reports whether the plugin has described itself over this link as the registered instance: with the same
// name, node ID and capabilities.
func (l *link) describedAs(in registry.Instance) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now, known := l.described[in.Role]
	return known && now.Provider == in.Fingerprint.Provider && now.NodeID == in.Fingerprint.NodeID &&
		slices.Equal(now.Capabilities, in.Fingerprint.Capabilities)
}

func (l *link) setDescription(found map[registry.Role]registry.Fingerprint) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for role, f := range found {
		l.described[role] = f
	}
}
