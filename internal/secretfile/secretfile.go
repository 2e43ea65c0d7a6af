// Package secretfile reads small files, such as those with a secret, that may be on a file system that hangs.
package secretfile

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
	"holdfast/registry"
)

const (
	// Max bounds the size of a file, in bytes.
	Max = 64 << 10
	// limit bounds how long a caller waits for a file.
	limit = 10 * time.Second
)

// Read is ReadAll without the line end at the end of the file, which does not count towards Max.
func Read(ctx context.Context, path string) ([]byte, error) {
	value, err := process.read(ctx, path)
	return bounded(bytes.TrimSuffix(value, []byte("\n")), path, err)
}

// ReadAll reads a regular file of at most Max bytes. It returns when ctx ends, and after 10 s at the latest. ErrInvalid
// means that the path is not absolute, is no regular file, or that the file is too large. ErrUnavailable means that the
// file cannot be read, or not in time.
func ReadAll(ctx context.Context, path string) ([]byte, error) {
	value, err := process.read(ctx, path)
	return bounded(value, path, err)
}

func bounded(value []byte, path string, err error) ([]byte, error) {
	if err == nil && len(value) > Max {
		return nil, registry.Invalid("%s has more than %d bytes", path, Max)
	}
	return value, err
}

// process has the reads of this process.
var process reads

// reads holds the reads of files that have not ended. A read that hangs in the kernel cannot be ended and keeps a
// thread. Therefore each path has at most one read at a time, which later callers join. While a read on a network file
// system hangs, no read of another path on it is started. The zero value is ready to use.
type reads struct {
	mu     sync.Mutex       // guards byPath, and the mounts in it
	byPath map[string]*read // reads that have not ended
}

// read is one read. value and err are set once done is closed.
type read struct {
	done  chan struct{}
	value []byte
	err   error
	mount string // the mount point, set once a caller has timed out
}

// read returns the file's content, unless ctx ends first.
func (s *reads) read(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	r, err := s.join(path)
	if err != nil {
		return nil, err
	}
	select {
	case <-r.done:
		return r.value, r.err
	case <-ctx.Done():
		mount := mountOf(path)
		s.mu.Lock()
		r.mount = mount
		s.mu.Unlock()
		return nil, registry.Errorf(registry.ErrUnavailable, "file %s cannot be read in time: %w", path,
			context.Cause(ctx))
	}
}

// join returns the running read of the path, or starts one.
func (s *reads) join(path string) (*read, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.byPath[path]; r != nil {
		return r, nil
	}
	var hung []string
	for _, r := range s.byPath {
		if r.mount != "" {
			hung = append(hung, r.mount)
		}
	}
	if len(hung) > 0 {
		if mount := mountOf(path); slices.Contains(hung, mount) {
			return nil, registry.Errorf(registry.ErrUnavailable,
				"file %s cannot be read: an earlier read on its file system, mounted at %s, still hangs", path, mount)
		}
	}
	r := &read{done: make(chan struct{})}
	if s.byPath == nil {
		s.byPath = map[string]*read{}
	}
	s.byPath[path] = r
	go func() { // no shutdown waits for it, because it may hang in the kernel for ever
		defer close(r.done)
		r.value, r.err = readNow(path)
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.byPath, path)
	}()
	return r, nil
}

// networked matches types of file systems that hang as a whole if their server hangs.
var networked = regexp.MustCompile(`^(nfs|cifs|smb|ceph|fuse|9p|glusterfs|lustre|afs|gfs2|ocfs2|beegfs)`)

// mountOf returns the mount point of the network file system that holds the path, without following links. For any
// other path it returns the path itself. If a read of a local path hangs, the path is probably a link to another file
// system, which says nothing about other local paths.
func mountOf(path string) string {
	table, err := mount.Table(0)
	if m, found := table.Holding(path); err == nil && found && networked.MatchString(m.FSType) {
		return m.Point
	}
	return path
}

func readNow(path string) ([]byte, error) {
	if !filepath.IsAbs(path) {
		return nil, registry.Invalid("%s is not an absolute path", path)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO must not block this process
	if err != nil {
		return nil, registry.Errorf(registry.ErrUnavailable, "%w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, registry.Errorf(registry.ErrUnavailable, "%w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, registry.Invalid("%s is not a regular file", path)
	}
	value, err := io.ReadAll(io.LimitReader(f, Max+2))
	if err != nil {
		return nil, registry.Errorf(registry.ErrUnavailable, "%w", err)
	}
	return value, nil
}
