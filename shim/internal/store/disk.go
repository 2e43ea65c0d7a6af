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
	// reserveSize is the space in bytes that is allocated beyond the pages in use. On a full disk, commits that end
	// something use it.
	reserveSize = 2 << 20
	// reserveStep is the step of allocations in bytes. It keeps them rare, because each costs a sync.
	reserveStep = 1 << 20
)

// reserve allocates disk space for the pages in use (used, in bytes) and for the reserve. It is called before a commit
// that adds something, so that a full disk refuses the commit before a byte is written. On a file system that cannot
// allocate in advance, reserve does nothing, and the write itself fails: see commitError.
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
		return registry.Errorf(registry.ErrExhausted,
			"%s: the disk is full: %w; volumes can still be released; free some space to add anything", s.path, err)
	case errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS):
	case err != nil:
		return registry.Errorf(registry.ErrExhausted, "allocate space for %s: %w", s.path, err)
	default:
		if err := s.file.Sync(); err != nil {
			return registry.Errorf(registry.ErrUnavailable, "sync %s: %w", s.path, err)
		}
	}
	s.reserved = want
	return nil
}

// reserveAtStart allocates the reserve before the first commit that adds something, so that releases succeed even if
// the disk fills up before that commit. Usually an earlier shim has allocated the reserve. An error is ignored here,
// because that commit will report it.
func (s *Store) reserveAtStart() {
	if s.readOnly {
		return
	}
	s.writing.Lock()
	defer s.writing.Unlock()
	var used int64
	if err := s.db.View(func(tx *bolt.Tx) error { used = tx.Size(); return nil }); err != nil {
		return
	}
	var stat unix.Stat_t
	if err := unix.Fstat(int(s.file.Fd()), &stat); err == nil && stat.Blocks*512 >= used+reserveSize {
		s.reserved = used + reserveSize
		return
	}
	_ = s.reserve(used)
}

// errReadOnly is the error of commits to a file that was opened for reading.
var errReadOnly = registry.Errorf(registry.ErrExhausted,
	"the state is on a read-only file system; nothing is written until it is mounted for writing")

// checkStillReadOnly returns nil while the file cannot be opened for writing. Its error makes the shim start over.
func (s *Store) checkStillReadOnly() error {
	file, err := os.OpenFile(s.path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	_ = file.Close()
	return registry.Errorf(registry.ErrUnavailable, "%s can be written to again; start over", s.path)
}

// checkOwnership checks that the path still names the file, that the file is not cut off, and that this generation owns
// it.
func (s *Store) checkOwnership(tx *bolt.Tx) error {
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
		return registry.Errorf(registry.ErrDamaged,
			"%s was cut off while it was in use: %d bytes of %d", s.path, info.Size(), tx.Size())
	}
	var owner registry.Generation
	if getMeta(tx, metaGeneration, &owner); owner != s.generation {
		return registry.Errorf(registry.ErrFenced,
			"generation %d may not write %s: generation %d owns it", s.generation, s.path, owner)
	}
	return nil
}

// metas reads both meta pages. A transaction of bbolt takes effect when one of them is written.
func (s *Store) metas() (both [2][headerSize + metaSize]byte, err error) {
	pageSize := int64(s.db.Info().PageSize)
	for i := range both {
		if _, err := s.file.ReadAt(both[i][:], int64(i)*pageSize); err != nil {
			return both, err
		}
	}
	return both, nil
}

// commitError returns the error of a failed transaction. It is ErrExhausted if nothing was written: a write failed for
// lack of space, and no meta page has changed. Any other error is ErrUncertain. After a failed sync the kernel may have
// dropped pages that it reports as written, so a second try would prove nothing.
func (s *Store) commitError(before [2][headerSize + metaSize]byte, err error) error {
	after, unreadable := s.metas()
	if unreadable == nil && after == before && wroteNothing(err) {
		s.options.Logger.Warn("commit refused", "error", err)
		return registry.Errorf(registry.ErrExhausted, "nothing was written to %s: %w; make room there", s.path, err)
	}
	return registry.Errorf(registry.ErrUncertain, "commit to %s: %w", s.path, err)
}

// wroteNothing reports whether the error comes from write(2) or from bbolt's size limit. An error of fdatasync(2) is
// not a PathError.
func wroteNothing(err error) bool {
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
