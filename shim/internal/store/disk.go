package store

import (
	"errors"
	"io/fs"
	"os"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
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

// errReadOnly is why nothing is written to a file that was opened for reading.
var errReadOnly = registry.Errorf(registry.ErrExhausted, "the state is on a read-only file system: nothing is written until that is mounted for writing")

// writableAgain is an error once the file could be opened for writing: a shim that starts over does.
func (s *Store) writableAgain() error {
	file, err := os.OpenFile(s.path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	_ = file.Close()
	return registry.Errorf(registry.ErrUnavailable, "%s can be written to again; start over", s.path)
}

// sane compares what has to be as it was: the file's name, its length, and the generation that owns it.
func (s *Store) sane(tx *bolt.Tx) error {
	same, err := sameFile(s.path, s.file)
	switch {
	case err != nil:
		return registry.Errorf(registry.ErrUnavailable, "state file: %w", err)
	case !same:
		return registry.Errorf(registry.ErrDamaged, "%s was removed or replaced while it was in use", s.path)
	}
	info, err := s.file.Stat()
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "state file: %w", err)
	}
	if info.Size() < tx.Size() {
		return registry.Errorf(registry.ErrDamaged, "%s was cut off while it was in use: %d bytes of %d", s.path, info.Size(), tx.Size())
	}
	var owner registry.Generation
	if getMeta(tx, metaGeneration, &owner); owner != s.generation {
		return registry.Errorf(registry.ErrFenced, "generation %d may not write %s: generation %d owns it", s.generation, s.path, owner)
	}
	return nil
}

// metas is both meta pages as the kernel has them. bbolt's transaction has happened once one of them is written.
func (s *Store) metas() (both [2][headerSize + metaSize]byte, err error) {
	pageSize := int64(s.db.Info().PageSize)
	for i := range both {
		if _, err := s.file.ReadAt(both[i][:], int64(i)*pageSize); err != nil {
			return both, err
		}
	}
	return both, nil
}

// judge says what a failed commit means. That nothing was written is claimed only of a write that the disk refused for want of
// room, before any meta page was touched. After a failed sync the kernel may have dropped what it calls written, so that a
// second try proves nothing.
func (s *Store) judge(before [2][headerSize + metaSize]byte, err error) error {
	after, unreadable := s.metas()
	if unreadable == nil && after == before && cleanRefusal(err) {
		s.options.Logger.Warn("commit refused", "error", err)
		return registry.Errorf(registry.ErrExhausted, "nothing was written to %s: %w; make room there", s.path, err)
	}
	return registry.Errorf(registry.ErrUncertain, "commit to %s: %w", s.path, err)
}

// cleanRefusal holds for errors of write(2) and of bbolt's limit. Those of fdatasync(2) come without a path.
func cleanRefusal(err error) bool {
	if errors.Is(err, berrors.ErrMaxSizeReached) {
		return true
	}
	wrote, ok := errors.AsType[*fs.PathError](err)
	return ok && wrote.Op == "write" && outOfSpace(err)
}

func outOfSpace(err error) bool {
	for _, reason := range []error{unix.ENOSPC, unix.EDQUOT, unix.EROFS, unix.EFBIG} {
		if errors.Is(err, reason) {
			return true
		}
	}
	return false
}
