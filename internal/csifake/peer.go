package csifake

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// peerConn is a connection whose remote address says which process it is from.
type peerConn struct {
	*net.UnixConn
	from *peerListener
	peer peerAddr
}

// peerAddr is the number of a connection within the run, and the process at its other end.
type peerAddr struct {
	conn uint64
	pid  int
}

func (peerAddr) Network() string  { return "unix" }
func (a peerAddr) String() string { return fmt.Sprintf("connection %d of process %d", a.conn, a.pid) }

// Accept is that of net.Listener.
func (l *peerListener) Accept() (net.Conn, error) {
	conn, err := l.AcceptUnix()
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last++
	c := &peerConn{UnixConn: conn, from: l, peer: peerAddr{conn: l.last, pid: peerPID(conn)}}
	l.conns[c] = true
	return c, nil
}

func (c *peerConn) RemoteAddr() net.Addr { return c.peer }

func (c *peerConn) Close() error {
	c.from.mu.Lock()
	delete(c.from.conns, c)
	c.from.mu.Unlock()
	return c.UnixConn.Close()
}

// peerPID is the process that connected; 0 if the kernel does not tell.
func peerPID(conn *net.UnixConn) (pid int) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(cred.Pid)
		}
	})
	return pid
}
