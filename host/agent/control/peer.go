package control

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/hashicorp/go-hclog"

	"holdfast/internal/mount"
	"holdfast/registry"
)

// Socket is where the agent of a run directory listens.
func Socket(runDir string) string { return filepath.Join(runDir, "agent.sock") }

// Listen makes the socket, and makes it again, with its directory, whenever it is removed. One that a dead agent left behind is
// replaced; one that answers is a conflict.
func Listen(path string, log hclog.Logger) (net.Listener, error) {
	s := &socket{path: path, log: log, closed: make(chan struct{})}
	if err := s.open(); err != nil {
		return nil, err
	}
	s.watching.Go(s.watch)
	allowed := func(uid uint32) bool { return uid == 0 || uid == uint32(os.Geteuid()) }
	return &peers{Listener: s, log: log, allowed: allowed}, nil
}

// listen makes the socket once.
func listen(path string) (*net.UnixListener, error) {
	answers, err := mount.RemoveStaleSocket(path)
	if err != nil {
		return nil, err
	}
	if answers {
		return nil, registry.Errorf(registry.ErrConflict, "another agent is listening on %s", path)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil { // its directory is closed to others already
		return nil, errors.Join(fmt.Errorf("control socket: %w", err), l.Close())
	}
	return l.(*net.UnixListener), nil
}

// peers lets in only connections whose other end may control the agent.
type peers struct {
	net.Listener
	log     hclog.Logger
	allowed func(uid uint32) bool
}

func (p *peers) Accept() (net.Conn, error) {
	for {
		conn, err := p.Listener.Accept()
		if err != nil {
			return nil, err
		}
		cred, err := credentials(conn)
		if err == nil && p.allowed(cred.Uid) {
			return conn, nil
		}
		if err == nil {
			err = fmt.Errorf("process %d of user %d has no permission to control this agent", cred.Pid, cred.Uid)
		}
		p.log.Warn("connection to the control socket refused", "error", err)
		_ = conn.Close()
	}
}

func credentials(conn net.Conn) (cred *unix.Ucred, err error) {
	u, is := conn.(*net.UnixConn)
	if !is {
		return nil, errors.New("not a unix socket")
	}
	raw, err := u.SyscallConn()
	if err != nil {
		return nil, err
	}
	var got error
	err = raw.Control(func(fd uintptr) { cred, got = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return cred, errors.Join(err, got)
}
