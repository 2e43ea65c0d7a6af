package control

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
)

// socketInterval is how often it is looked whether the socket is there.
const socketInterval = time.Second

// socket is a listener that survives the removal of its file: a run directory may be swept by what cleans up temporary files.
type socket struct {
	path     string
	log      hclog.Logger
	watching sync.WaitGroup
	closed   chan struct{}
	once     sync.Once

	mu      sync.Mutex // guards both
	current *net.UnixListener
	file    os.FileInfo // of current
}

// open makes the file and its directory. The listener before it ends without touching the new file.
func (s *socket) open() error {
	if err := os.MkdirAll(filepath.Dir(s.path), 0o700); err != nil {
		return fmt.Errorf("directory of the control socket: %w", err)
	}
	l, err := listen(s.path)
	if err != nil {
		return err
	}
	file, err := os.Lstat(s.path)
	if err != nil {
		_ = l.Close()
		return fmt.Errorf("control socket: %w", err)
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

// watch makes the file again when it is missing or another one.
func (s *socket) watch() {
	tick := time.NewTicker(socketInterval)
	defer tick.Stop()
	said := ""
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
			s.log.Warn("the control socket was removed; created again", "path", s.path)
			said = ""
		} else if err.Error() != said {
			s.log.Error("the control socket was removed and cannot be created; retrying", "path", s.path, "error", err)
			said = err.Error()
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
		if err == nil || s.listener() == l {
			return conn, err
		}
	}
}

// Close removes the file, unless it is another one by now.
func (s *socket) Close() error {
	s.once.Do(func() { close(s.closed) })
	s.watching.Wait()
	l := s.listener()
	now, err := os.Lstat(s.path)
	l.SetUnlinkOnClose(err == nil && os.SameFile(now, s.file))
	return l.Close()
}

func (s *socket) Addr() net.Addr { return s.listener().Addr() }
