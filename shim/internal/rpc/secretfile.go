package rpc

import (
	"context"
	"regexp"
	"slices"
	"sync"

	"holdfast/internal/durable"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// secretFiles reads secrets from files. A read that hangs in the kernel cannot be ended and keeps a thread. So there is
// one read at a time of each path, which later callers join, and none of other paths on a network file system where a
// read hangs. The zero value is ready to use.
type secretFiles struct {
	mu    sync.Mutex             // guards reads, and the mounts in them
	reads map[string]*secretRead // by path: those that have not ended
}

// secretRead is one read. value and err are set once done is closed.
type secretRead struct {
	done  chan struct{}
	value []byte
	err   error
	mount string // the mount point, once a caller has waited in vain
}

// read returns the file's content, unless ctx ends first.
func (s *secretFiles) read(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, callbackLimit)
	defer cancel()
	r, err := s.join(path)
	if err != nil {
		return nil, err
	}
	select {
	case <-r.done:
		return r.value, r.err
	case <-ctx.Done():
		s.hangs(r, mountOf(path))
		return nil, registry.Errorf(registry.ErrUnavailable, "file %s cannot be read in time: %w", path,
			context.Cause(ctx))
	}
}

// join returns the read of the path that is under way, or starts one.
func (s *secretFiles) join(path string) (*secretRead, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.reads[path]; r != nil {
		return r, nil
	}
	var hung []string
	for _, r := range s.reads {
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
	r := &secretRead{done: make(chan struct{})}
	if s.reads == nil {
		s.reads = map[string]*secretRead{}
	}
	s.reads[path] = r
	go func() { // not waited for at shutdown: it may hang in the kernel for ever
		defer close(r.done)
		r.value, r.err = durable.ReadSecret(path)
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.reads, path)
	}()
	return r, nil
}

// hangs notes that a caller has waited for r in vain.
func (s *secretFiles) hangs(r *secretRead, mount string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r.mount = mount
}

// networked matches the types of file systems that hang as a whole when their server does.
var networked = regexp.MustCompile(`^(nfs|cifs|smb|ceph|fuse|9p|glusterfs|lustre|afs|gfs2|ocfs2|beegfs)`)

// mountOf returns the mount point of the network file system that the path is on, judged by its name. For any other
// path it returns the path itself: a read on a local disk hangs because the path is a link to elsewhere, which says
// nothing about other paths.
func mountOf(path string) string {
	table, err := mount.Table(0)
	if m, found := table.Holding(path); err == nil && found && networked.MatchString(m.FSType) {
		return m.Point
	}
	return path
}
