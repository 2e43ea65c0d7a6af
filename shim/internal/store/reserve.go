package store

import (
	"errors"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

const (
	// reserveSize is what stays allocated beyond the pages in use, for what winds down on a full disk.
	reserveSize = 2 << 20
	// reserveStep keeps allocations rare: each costs a sync.
	reserveStep = 1 << 20
)

// reserve makes sure that the disk has room for the pages in use, used bytes, and for the reserve. It is asked before anything
// that takes on something new, so that a full disk refuses that before a byte is written. On file systems that cannot
// allocate ahead the refusal comes from the write itself: see judge.
func (s *Store) reserve(used int64) error {
	if used+reserveSize <= s.reserved {
		return nil
	}
	want := (used + reserveSize + reserveStep - 1) / reserveStep * reserveStep
	err := unix.Fallocate(int(s.file.Fd()), 0, 0, want)
	for errors.Is(err, unix.EINTR) {
		err = unix.Fallocate(int(s.file.Fd()), 0, 0, want)
	}
	switch {
	case outOfSpace(err):
		return registry.Errorf(registry.ErrExhausted, "no room for anything new in %s: %w; releasing still works", s.path, err)
	case errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS):
	case err != nil:
		return registry.Errorf(registry.ErrExhausted, "make room in %s: %w", s.path, err)
	default:
		if err := s.file.Sync(); err != nil {
			return registry.Errorf(registry.ErrUnavailable, "sync %s: %w", s.path, err)
		}
	}
	s.reserved = want
	return nil
}
