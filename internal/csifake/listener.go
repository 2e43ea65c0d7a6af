package csifake

import (
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"holdfast/internal/proc"
)

// listener accepts connections that can be cut, and that know the process at the other end.
type listener struct {
	net.Listener
	path string // of the socket; empty: none

	mu    sync.Mutex // guards the fields below
	conns map[net.Conn]bool
	last  uint64
	ended bool // closed or abandoned
}

// listen makes the socket, unless the configuration has a listener. Like real plugins, it removes the socket file of a
// killed plugin first.
func listen(cfg Config) (*listener, error) {
	if cfg.Listener != nil {
		return &listener{Listener: cfg.Listener, conns: map[net.Conn]bool{}}, nil
	}
	if st, err := os.Lstat(cfg.Socket); err == nil && st.Mode()&os.ModeSocket != 0 {
		if err := os.Remove(cfg.Socket); err != nil {
			return nil, fmt.Errorf("csifake: stale socket: %w", err)
		}
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: cfg.Socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("csifake: %w", err)
	}
	l.SetUnlinkOnClose(false) // (*listener).Close removes the file itself; abandon leaves it
	return &listener{Listener: l, path: cfg.Socket, conns: map[net.Conn]bool{}}, nil
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		_ = conn.Close() // the connection arrived when the plugin ended
	}
	l.last++
	l.conns[conn] = true
	return &peerConn{Conn: conn, from: l, peer: peerAddr{conn: l.last, pid: peerPID(conn), cut: func() {
		_ = conn.Close() // it may be closed already
	}}}, nil
}

// end ends the listener. It reports whether this call is the first to do so.
func (l *listener) end() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	first := !l.ended
	l.ended = true
	return first
}

// Close ends the listener. It removes the socket file before another plugin can have made a new one.
func (l *listener) Close() error {
	if l.end() && l.path != "" {
		_ = os.Remove(l.path)
	}
	l.refuse()
	return l.Listener.Close()
}

// refuse ends the acceptance of connections, even if a process that is being forked holds the socket open.
func (l *listener) refuse() {
	socket, is := l.Listener.(syscall.Conn)
	if !is {
		return
	}
	if raw, err := socket.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) }) // it may be closed already
	}
}

// abandon cuts all connections and leaves the socket file.
func (l *listener) abandon() {
	l.end()
	l.refuse()
	_ = l.Listener.Close() // it may be closed already
	l.cutAll()
}

func (l *listener) cutAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.conns {
		_ = c.Close()
	}
}

// peerConn is a connection whose remote address names the calling process.
type peerConn struct {
	net.Conn
	from *listener
	peer peerAddr
}

func (c *peerConn) RemoteAddr() net.Addr { return c.peer }

func (c *peerConn) Close() error {
	c.from.mu.Lock()
	delete(c.from.conns, c.Conn)
	c.from.mu.Unlock()
	return c.Conn.Close()
}

// peerAddr has the number of a connection within the run, and the process at its other end.
type peerAddr struct {
	conn uint64
	pid  int    // 0: not known
	cut  func() // cuts the connection, as when its plugin dies
}

func (peerAddr) Network() string  { return "unix" }
func (a peerAddr) String() string { return fmt.Sprintf("connection %d of process %d", a.conn, a.pid) }

func peerPID(conn net.Conn) int {
	socket, is := conn.(*net.UnixConn)
	if !is {
		return 0
	}
	cred, err := proc.Peer(socket)
	if err != nil {
		return 0
	}
	return int(cred.Pid)
}
