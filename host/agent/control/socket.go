package control

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/internal/mount"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// socketInterval is the interval at which watch checks the socket's file.
const socketInterval = time.Second

// socket is a listener that survives the removal of its file, for example by a cleaner of temporary files.
type socket struct {
	path     string
	log      hclog.Logger
	watching sync.WaitGroup
	closed   chan struct{}
	once     sync.Once

	file os.FileInfo // file of the current listener; Close uses it after watch has ended

	mu      sync.Mutex // guards current
	current *net.UnixListener
}

// open creates the socket's file and its directory. The earlier listener is closed without removing the new file.
func (s *socket) open() error {
	if err := os.MkdirAll(filepath.Dir(s.path), 0o700); err != nil {
		return fmt.Errorf("directory of socket %s: %w", s.path, err)
	}
	l, err := listen(s.path)
	if err != nil {
		return err
	}
	file, err := os.Lstat(s.path)
	if err != nil {
		_ = l.Close()
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.current
	s.current, s.file = l, file
	if old != nil {
		old.SetUnlinkOnClose(false)
		_ = old.Close()
	}
	return nil
}

// watch creates the file again when it is missing or was replaced.
func (s *socket) watch() {
	tick := time.NewTicker(socketInterval)
	defer tick.Stop()
	reported := ""
	for {
		select {
		case <-s.closed:
			return
		case <-tick.C:
		}
		now, err := os.Lstat(s.path)
		if err == nil && os.SameFile(now, s.file) {
			continue
		}
		if err = s.open(); err == nil {
			s.log.Warn("the socket was removed; created again", "path", s.path)
			reported = ""
		} else if err.Error() != reported {
			s.log.Error("the socket was removed and cannot be created; retrying", "path", s.path, "error", err)
			reported = err.Error()
		}
	}
}

func (s *socket) listener() *net.UnixListener {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

func (s *socket) Accept() (net.Conn, error) {
	for {
		l := s.listener()
		conn, err := l.Accept()
		if err == nil || s.listener() == l { // else open has closed l; continue at the new listener
			return conn, err
		}
	}
}

// Close removes the file unless it was replaced.
func (s *socket) Close() error {
	s.once.Do(func() { close(s.closed) })
	s.watching.Wait()
	l := s.listener()
	now, err := os.Lstat(s.path)
	l.SetUnlinkOnClose(err == nil && os.SameFile(now, s.file))
	return l.Close()
}

func (s *socket) Addr() net.Addr { return s.listener().Addr() }

// Socket returns the control socket of a run directory.
func Socket(runDir string) string { return filepath.Join(runDir, "agent.sock") }

// Listen creates the socket. Whenever the socket is removed, it is created again with its directory. Listen replaces
// the socket of a dead agent. If another agent answers at the socket, it returns ErrConflict.
func Listen(path string, log hclog.Logger) (net.Listener, error) {
	s := &socket{path: path, log: log, closed: make(chan struct{})}
	if err := s.open(); err != nil {
		return nil, err
	}
	s.watching.Go(s.watch)
	return newPeerListener(s, log), nil
}

func newPeerListener(l net.Listener, log hclog.Logger) *peerListener {
	allowed := func(uid uint32) bool { return uid == 0 || uid == uint32(os.Geteuid()) }
	return &peerListener{Listener: l, log: log, allowed: allowed}
}

// listen creates the socket once.
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
		return nil, err // the error names the path
	}
	if err := os.Chmod(path, 0o600); err != nil { // its directory keeps other users out already
		return nil, errors.Join(err, l.Close())
	}
	return l.(*net.UnixListener), nil
}

// peerListener accepts only connections of users that may control the agent.
type peerListener struct {
	net.Listener
	log     hclog.Logger
	allowed func(uid uint32) bool
}

func (p *peerListener) Accept() (net.Conn, error) {
	for {
		conn, err := p.Listener.Accept()
		if err != nil {
			return nil, err
		}
		cred, err := proc.Peer(conn)
		if err == nil && p.allowed(cred.Uid) {
			return conn, nil
		}
		if err == nil {
			err = fmt.Errorf("process %d of user %d may not use this socket", cred.Pid, cred.Uid)
		}
		p.log.Warn("connection to the socket refused", "error", err)
		_ = conn.Close()
	}
}
