package csifake

import (
	"fmt"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// peerListener hands out connections that know the process at the other end.
type peerListener struct {
	*net.UnixListener
	path string

	mu    sync.Mutex
	conns map[*net.UnixConn]bool
	last  uint64
	ended bool // closed or abandoned, whichever came first
}

// listen makes the socket; a file left over by a killed plugin makes way, as it does for real plugins.
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
	l.SetUnlinkOnClose(false) // Close does it, unless it comes after a kill
	return &peerListener{UnixListener: l, path: path, conns: map[*net.UnixConn]bool{}}, nil
}

// Accept is that of net.Listener.
func (l *peerListener) Accept() (net.Conn, error) {
	conn, err := l.AcceptUnix()
	if err != nil {
		return nil, err
	}
	c := &peerConn{UnixConn: conn, from: l}
	c.peer = peerAddr{conn: l.keep(conn), pid: peerPID(conn), via: c}
	return c, nil
}

// keep a connection, and number it.
func (l *peerListener) keep(conn *net.UnixConn) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		_ = conn.Close() // it came as the plugin ended
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

// end reports whether this call is the first that ends the listener.
func (l *peerListener) end() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	first := !l.ended
	l.ended = true
	return first
}

// Close ends the listener and removes the socket file, before another plugin can have made a new one.
func (l *peerListener) Close() error {
	if l.end() {
		_ = os.Remove(l.path)
	}
	l.refuse()
	return l.UnixListener.Close()
}

// refuse ends new connections, also if a process that is just being forked holds the socket open.
func (l *peerListener) refuse() {
	if raw, err := l.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) }) // closed before is as good
	}
}

// abandon cuts everything and leaves the socket file behind.
func (l *peerListener) abandon() {
	l.end()
	l.refuse()
	_ = l.UnixListener.Close() // closed before is as good
	l.cutAll()
}

func (l *peerListener) cutAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.conns {
		_ = c.Close()
	}
}
