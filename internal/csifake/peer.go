package csifake

import (
	"fmt"
	"net"

	"holdfast/internal/proc"
)

// peerConn is a connection whose remote address names the calling process.
type peerConn struct {
	*net.UnixConn
	from *peerListener
	peer peerAddr
}

// peerAddr has the number of a connection within the run, and the process at its other end.
type peerAddr struct {
	conn uint64
	pid  int
	via  cutter
}

// cutter is a connection that can be cut, as when its plugin dies.
type cutter interface{ cut() }

func (peerAddr) Network() string  { return "unix" }
func (a peerAddr) String() string { return fmt.Sprintf("connection %d of process %d", a.conn, a.pid) }

func (c *peerConn) RemoteAddr() net.Addr { return c.peer }

func (c *peerConn) cut() { _ = c.UnixConn.Close() } // it may be closed already

func (c *peerConn) Close() error {
	c.from.forget(c.UnixConn)
	return c.UnixConn.Close()
}

// peerPID returns the process that has connected, or 0 if the kernel does not report it.
func peerPID(conn *net.UnixConn) int {
	cred, err := proc.Peer(conn)
	if err != nil {
		return 0
	}
	return int(cred.Pid)
}
