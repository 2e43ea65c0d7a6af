package csifake

import (
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// peerListener returns connections that know the process at the other end.
type peerListener struct {
	*net.UnixListener
	path string

	mu    sync.Mutex
	conns map[*net.UnixConn]bool
	last  uint64
	ended bool // closed or abandoned
}

// listen makes the socket. Like real plugins, it removes the socket file of a killed plugin first.
func listen(path string) (*peerListener, error) {
	if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSocket != 0 {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("csifake: stale socket: %w", err)
		}
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("csifake: %w", err)
	}
	l.SetUnlinkOnClose(false) // Close removes the socket file, except after a kill
	return &peerListener{UnixListener: l, path: path, conns: map[*net.UnixConn]bool{}}, nil
}

// Accept implements net.Listener.
func (l *peerListener) Accept() (net.Conn, error) {
	conn, err := l.AcceptUnix()
	if err != nil {
		return nil, err
	}
	c := &peerConn{UnixConn: conn, from: l}
	c.peer = peerAddr{conn: l.keep(conn), pid: peerPID(conn), via: c}
	return c, nil
}

// keep keeps a connection and gives it a number.
func (l *peerListener) keep(conn *net.UnixConn) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		_ = conn.Close() // the connection arrived when the plugin ended
	}
	l.last++
	l.conns[conn] = true
	return l.last
}

func (l *peerListener) forget(conn *net.UnixConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, conn)
}

// end ends the listener. It reports whether this call is the first to do so.
func (l *peerListener) end() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	first := !l.ended
	l.ended = true
	return first
}

// Close ends the listener. It removes the socket file before another plugin can have made a new one.
func (l *peerListener) Close() error {
	if l.end() {
		_ = os.Remove(l.path)
	}
	l.refuse()
	return l.UnixListener.Close()
}

// refuse ends the acceptance of connections, even if a process that is being forked holds the socket open.
func (l *peerListener) refuse() {
	if raw, err := l.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) }) // it may be closed already
	}
}

// abandon cuts all connections and leaves the socket file.
func (l *peerListener) abandon() {
	l.end()
	l.refuse()
	_ = l.UnixListener.Close() // it may be closed already
	l.cutAll()
}

func (l *peerListener) cutAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.conns {
		_ = c.Close()
	}
}
