package csifake

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// fuses has the FUSE mounts that a plugin serves, by path. They are dead as soon as the plugin is: a process that uses
// one gets ENOTCONN.
type fuses struct {
	mu     sync.Mutex
	by     map[string]*fuseMount
	ended  bool
	served sync.WaitGroup
}

// fuseMount is an empty file system. A process that uses it waits until the plugin answers.
type fuseMount struct {
	plugin *Plugin
	volume string
	dev    *os.File // /dev/fuse
}

// mount mounts an empty file system at a path, and serves it until it is closed.
func (s *fuses) mount(p *Plugin, volume, path string) error {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return failed("open", "/dev/fuse", err)
	}
	data := fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d", fd, os.Getuid(), os.Getgid())
	if err := unix.Mount("csifake", path, "fuse.csifake", unix.MS_NOSUID|unix.MS_NODEV, data); err != nil {
		_ = unix.Close(fd)
		return failed("mount fuse", path, err)
	}
	m := &fuseMount{plugin: p, volume: volume, dev: os.NewFile(uintptr(fd), "/dev/fuse")}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return m.dev.Close()
	}
	if s.by == nil {
		s.by = map[string]*fuseMount{}
	}
	s.by[cleanPath(path)] = m
	s.served.Go(m.serve)
	return nil
}

// cleanPath returns the same name for all names of a path.
func cleanPath(path string) string {
	if dir, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
		return filepath.Join(dir, filepath.Base(path))
	}
	return path
}

// close ends the service of a path that is no longer mounted.
func (s *fuses) close(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.by[cleanPath(path)]; m != nil {
		_ = m.dev.Close() // the device holds no data
		delete(s.by, cleanPath(path))
	}
}

// closeAll ends the service of all mounts, as the death of the plugin does. The mounts stay, but are dead.
func (s *fuses) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for path, m := range s.by {
		_ = m.dev.Close() // the device holds no data
		delete(s.by, path)
	}
}

// serve answers the kernel until the device is closed.
func (m *fuseMount) serve() {
	defer m.dev.Close()
	buf := make([]byte, 128<<10)
	for {
		n, err := m.dev.Read(buf)
		if err != nil {
			return // unmounted or closed
		}
		q, ok := parseFuse(buf[:n])
		if !ok {
			return
		}
		reply := q.answer()
		switch err := m.act(); {
		case m.plugin.over():
			return // a dead plugin does not answer, even to earlier requests
		case reply == nil:
			continue
		case err != nil:
			reply = q.reply(unix.EIO, nil)
		}
		_, _ = m.dev.Write(reply) // the requesting process may be gone
	}
}

// act applies the script's rules for the volume: the request may be slow, hang or fail.
func (m *fuseMount) act() error {
	found, err := m.plugin.script.match(Fuse, m.volume)
	if err != nil || found[Before] == nil {
		return err
	}
	if err := m.plugin.runDelays(context.Background(), found[Before]); err != nil {
		return err
	}
	return found[Before].failure()
}
