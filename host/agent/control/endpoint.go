package control

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"sync"

	"holdfast/host"
	"holdfast/registry"
)

// upgradeCSI is the protocol to which a connection to the control socket is upgraded (RFC 9110 section 7.8): gRPC with
// the CSI services of one plugin.
const upgradeCSI = "csi"

// serveCSI turns the request's connection into the connection of a CSI client.
func (s *Server) serveCSI(w http.ResponseWriter, r *http.Request) {
	plugin, err := registry.ParsePluginID(r.PathValue("id"))
	if err == nil && r.Header.Get("Upgrade") != upgradeCSI {
		err = registry.Invalid("the request lacks the header \"Upgrade: %s\"; use holdfast csi-endpoint", upgradeCSI)
	}
	if err != nil {
		writeError(w, err)
		return
	}
	s.upgraded.Add(1)
	defer s.upgraded.Done()
	conn, err := switchTo(upgradeCSI, w)
	if err != nil {
		return
	}
	l := newSingleListener(conn)
	if err := s.host.ServeCSI(r.Context(), plugin, l); err != nil && !errors.Is(err, net.ErrClosed) {
		s.log.Warn("a CSI client's connection ended", "plugin", plugin, "error", err)
	}
}

// switchTo upgrades the connection of a request to another protocol. If it fails, it has answered the request or closed
// the connection.
func switchTo(protocol string, w http.ResponseWriter) (net.Conn, error) {
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		writeError(w, err)
		return nil, err
	}
	_, err = fmt.Fprintf(conn,
		"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", protocol)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return &bufferedConn{conn, buffered.Reader}, nil
}

// DialCSI returns a connection that serves the CSI services of the plugin with gRPC.
func (c *Client) DialCSI(ctx context.Context, plugin host.PluginID) (io.ReadWriteCloser, error) {
	return c.dialUpgraded(ctx, upgradeCSI, "/plugin/"+segment(string(plugin))+"/csi")
}

// dialUpgraded sends a request and returns its connection after the upgrade to another protocol.
func (c *Client) dialUpgraded(ctx context.Context, protocol, path string) (io.ReadWriteCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, baseURL+path, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", protocol)
	body, err := c.send(req)
	if err != nil {
		return nil, err
	}
	conn, upgraded := body.(io.ReadWriteCloser) // see http.Response.Body
	if !upgraded {
		return nil, errors.Join(registry.Errorf(registry.ErrInternal, "the agent did not switch to %s", protocol),
			body.Close())
	}
	return conn, nil
}

// bufferedConn is a connection from which some bytes were already read.
type bufferedConn struct {
	net.Conn
	reader *bufio.Reader
}

func (c *bufferedConn) Read(b []byte) (int, error) { return c.reader.Read(b) }

// singleListener is a listener that accepts one connection. It is closed when that connection is closed.
type singleListener struct {
	conn   net.Conn
	accept chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newSingleListener(conn net.Conn) *singleListener {
	l := &singleListener{accept: make(chan net.Conn, 1), closed: make(chan struct{})}
	l.conn = &notifyingConn{conn, l.end}
	l.accept <- l.conn
	return l
}

func (l *singleListener) end() { l.once.Do(func() { close(l.closed) }) }

func (l *singleListener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.accept:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close also closes the connection, even if it was never accepted.
func (l *singleListener) Close() error { return l.conn.Close() }

func (l *singleListener) Addr() net.Addr { return l.conn.LocalAddr() }

// notifyingConn calls closed when the connection is closed.
type notifyingConn struct {
	net.Conn
	closed func()
}

func (c *notifyingConn) Close() error {
	defer c.closed()
	return c.Conn.Close()
}

func (s *Server) getEndpointUses(r *http.Request) (any, error) {
	uses, _, err := s.host.EndpointUses(r.Context(), host.EndpointQuery{Plugin: pluginID(r)})
	return append([]host.EndpointUse{}, uses...), err
}

// deleteEndpointUses removes the records of the uses of one volume. The query has the volume's external ID.
func (s *Server) deleteEndpointUses(r *http.Request) (any, error) {
	return nil, s.host.ForgetEndpointUses(r.Context(), pluginID(r),
		host.ExternalID(query(r, "volume")), forceOf(r))
}

// EndpointUses lists how clients of CSI endpoints use volumes of a plugin.
func (c *Client) EndpointUses(ctx context.Context, plugin string) ([]host.EndpointUse, error) {
	return get[[]host.EndpointUse](ctx, c, "/plugin/"+segment(plugin)+"/uses")
}

// ForgetEndpointUses removes the records of the uses of one volume. The agent sets the operator.
func (c *Client) ForgetEndpointUses(ctx context.Context, plugin, volume, confirm string) error {
	q := url.Values{"volume": {volume}, "confirm": {confirm}}
	return c.remove(ctx, "/plugin/"+segment(plugin)+"/uses?"+q.Encode())
}
