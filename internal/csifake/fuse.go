package csifake

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// fuses are the FUSE mounts that a plugin serves, by path. They are dead as soon as the plugin is: who comes to one
// finds ENOTCONN.
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

// mount an empty file system at a path, and answer for it until it is closed.
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

// cleanPath is one name for a path that has several.
func cleanPath(path string) string {
	if dir, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
		return filepath.Join(dir, filepath.Base(path))
	}
	return path
}

// close ends the service for a path that is mounted no more.
func (s *fuses) close(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.by[cleanPath(path)]; m != nil {
		_ = m.dev.Close() // nothing is lost
		delete(s.by, cleanPath(path))
	}
}

// closeAll is the death of the plugin. The mounts stay, dead.
func (s *fuses) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for path, m := range s.by {
		_ = m.dev.Close() // nothing is lost
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
			return // unmounted, or closed
		}
		q, ok := parseFuse(buf[:n])
		if !ok {
			return
		}
		reply := q.answer()
		switch err := m.act(); {
		case m.plugin.over():
			return // the dead do not answer, however long they were asked
		case reply == nil:
			continue
		case err != nil:
			reply = q.reply(unix.EIO, nil)
		}
		_, _ = m.dev.Write(reply) // who asked may have gone
	}
}

// act is what the script has for the volume: it may be slow, hang or be an error.
func (m *fuseMount) act() error {
	found, err := m.plugin.script.match(Fuse, m.volume)
	if err != nil || found.before == nil {
		return err
	}
	if err := m.plugin.waitBefore(context.Background(), found.before); err != nil {
		return err
	}
	return found.before.failure()
}
