package launch

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"holdfast/internal/durable"
	"holdfast/registry"
)

const (
	storedMode        = 0o500
	unfinishedPattern = ".add-*" // names of unfinished copies
)

// Store keeps shim binaries in files that are named after their SHA-256. One process owns the directory. Start may be
// called at any time, while one goroutine at a time adds and prunes binaries.
type Store struct {
	dir string

	mu       sync.Mutex           // guards what follows; held only to read or change it
	keep     []string             // SHA-256 of binaries that Prune leaves
	verified map[string]fileState // by SHA-256: the stored file when its content was verified
}

// OpenStore opens the store in dir. It creates dir (0700) if it does not exist, and removes unfinished copies.
func OpenStore(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open the store of shims: %w", err)
	}
	if err := checkPrivate(dir); err != nil {
		return nil, err
	}
	unfinished, err := filepath.Glob(filepath.Join(dir, unfinishedPattern))
	if err != nil {
		return nil, fmt.Errorf("open the store of shims: %w", err)
	}
	for _, path := range unfinished {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("open the store of shims: %w", err)
		}
	}
	return &Store{dir: dir, verified: map[string]fileState{}}, nil
}

// checkPrivate returns an error unless only this user or root can write to dir.
func checkPrivate(dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return &os.PathError{Op: "stat", Path: dir, Err: err}
	}
	if st.Mode&0o022 != 0 || (st.Uid != 0 && int(st.Uid) != os.Geteuid()) {
		return registry.Errorf(registry.ErrDenied, "others can write to %s: make it yours, and chmod 0700 it", dir)
	}
	return nil
}

// Add stores the binary at path. want is its SHA-256 in hexadecimal. If want is empty, Add reads it from the file
// path.sha256. Without such a file, Add computes the digest and trusts it. If the digest differs, Add returns
// ErrInvalid and changes nothing.
//
// A binary that is stored already is only verified. A full disk therefore prevents only the adding of a new one, with
// ErrExhausted. If nothing is at path, Add uses the stored copy of the wanted digest, or of known, the digest of the
// last binary at the path.
func (s *Store) Add(ctx context.Context, path, want, known string) (Digest, error) {
	want, err := expectedDigest(path, want)
	if err != nil {
		return Digest{}, err
	}
	src, err := openBinary(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s.useStored(ctx, cmp.Or(want, known), err)
	}
	if err != nil {
		return Digest{}, err
	}
	defer src.Close()
	sum, err := hashInto(ctx, io.Discard, src)
	if err != nil {
		return Digest{}, fmt.Errorf("read the shim %s: %w", path, err)
	}
	if want != "" && sum != want {
		return Digest{}, registry.Invalid("the shim %s is not the wanted binary: its SHA-256 is %s, wanted is %s; "+
			"install the right binary, or correct the digest", path, sum, want)
	}
	_, err = s.Stored(ctx, sum)
	switch {
	case ctx.Err() != nil:
		return Digest{}, context.Cause(ctx)
	case err != nil: // the copy is missing or damaged
		if err := s.copyIn(ctx, src, sum); err != nil {
			return Digest{}, fmt.Errorf("copy the shim %s: %w", path, s.explainFull(err))
		}
	}
	return Digest{SHA256: sum, FirstUse: want == ""}, nil
}

// useStored uses the stored copy in place of a binary that is gone.
func (s *Store) useStored(ctx context.Context, sum string, gone error) (Digest, error) {
	if sum == "" {
		return Digest{}, registry.Errorf(registry.ErrNotFound,
			"%w; no copy of it is known in %s: install the binary at that path, "+
				"or give the path of another", gone, s.dir)
	}
	_, err := s.Stored(ctx, sum)
	if ctx.Err() != nil {
		return Digest{}, context.Cause(ctx)
	}
	if err != nil {
		return Digest{}, registry.Errorf(registry.ErrNotFound,
			"%w; install the binary at that path: its stored copy cannot be used "+
				"instead (%w)", gone, err)
	}
	return Digest{SHA256: sum, SourceGone: true}, nil
}

// Stored verifies a stored binary. It returns ErrNotFound if there is none with that SHA-256, and ErrDamaged if its
// file was changed.
func (s *Store) Stored(ctx context.Context, sum string) (Digest, error) {
	sum, err := parseSum(sum)
	if err != nil {
		return Digest{}, err
	}
	f, err := s.open(ctx, sum)
	if err != nil {
		return Digest{}, err
	}
	return Digest{SHA256: sum}, f.Close()
}

// open opens a stored binary and verifies the content of the descriptor itself, as the name may lead to another file
// by then. It does not hash a file again that has not changed since: calls are held while a crashed shim is started
// again. The caller closes the file.
func (s *Store) open(ctx context.Context, sum string) (*os.File, error) {
	f, err := os.Open(s.path(sum))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, registry.Errorf(registry.ErrNotFound, "no shim with SHA-256 %s is in %s: add its binary first",
			sum, s.dir)
	}
	if err != nil {
		return nil, fmt.Errorf("open the stored shim: %w", err)
	}
	if err := s.verify(ctx, f, sum); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// fileState differs whenever content or mode of a file may have changed, because a ctime cannot be set back.
type fileState struct {
	dev, ino uint64
	ctime    unix.Timespec
}

// verify returns ErrDamaged if a stored binary does not have the digest sum, or not the mode of stored binaries.
func (s *Store) verify(ctx context.Context, f *os.File, sum string) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return &os.PathError{Op: "fstat", Path: f.Name(), Err: err}
	}
	state := fileState{st.Dev, st.Ino, st.Ctim}
	s.mu.Lock()
	unchanged := s.verified[sum] == state
	s.mu.Unlock()
	if unchanged {
		return nil
	}
	actual, err := hashInto(ctx, io.Discard, f)
	switch {
	case err != nil:
		return fmt.Errorf("verify the stored shim: %w", err)
	case actual != sum:
		return registry.Errorf(registry.ErrDamaged,
			"the stored shim %s was changed, its SHA-256 is now %s: add its binary again", sum, actual)
	case st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o7777 != storedMode:
		return registry.Errorf(registry.ErrDamaged, "the stored shim %s has mode %#o: add its binary again", sum,
			st.Mode)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.verified[sum] = state
	return nil
}

// openBinary opens a file and checks it with checkBinary.
func openBinary(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO must not block us
	if errors.Is(err, unix.ENXIO) {
		return nil, notAFile(path) // a socket, or a device without a driver
	}
	if err != nil {
		return nil, fmt.Errorf("open the shim: %w", err)
	}
	if err := checkBinary(f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func notAFile(path string) error {
	return registry.Invalid("the shim %s is not a regular file: %s", path, giveShim)
}

// checkBinary returns an error unless f is a regular executable file of this user or root, and not writable for all.
func checkBinary(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return &os.PathError{Op: "fstat", Path: f.Name(), Err: err}
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return notAFile(f.Name())
	case st.Mode&0o002 != 0:
		return registry.Errorf(registry.ErrDenied, "everybody can write to the shim %s: chmod o-w it", f.Name())
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return registry.Errorf(registry.ErrDenied,
			"the shim %s belongs to uid %d: it must be yours or root's", f.Name(), st.Uid)
	case st.Mode&0o111 == 0:
		return registry.Invalid("the shim %s is not executable: chmod +x it", f.Name())
	case st.Size == 0:
		return registry.Invalid("the shim %s is empty: install the whole binary, and give that", f.Name())
	}
	return nil
}

// copyIn stores a copy of src under its digest, which it verifies, and makes the copy durable.
func (s *Store) copyIn(ctx context.Context, src *os.File, sum string) error {
	tmp, err := os.CreateTemp(s.dir, unfinishedPattern)
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) // gone after the rename
	defer tmp.Close()
	if _, err := src.Seek(0, io.SeekStart); err != nil {
		return err
	}
	copied, err := hashInto(ctx, tmp, src)
	if err == nil && copied != sum {
		err = registry.Errorf(registry.ErrConflict, "it was changed meanwhile; try again")
	}
	if err != nil {
		return err
	}
	if err := errors.Join(tmp.Chmod(storedMode), tmp.Sync(), os.Rename(tmp.Name(), s.path(sum))); err != nil {
		return err
	}
	return durable.SyncDir(s.dir)
}

// explainFull adds to an error of a full disk what to do.
func (s *Store) explainFull(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return registry.Errorf(registry.ErrExhausted,
			"%w: a new shim needs room for its copy: free some on the file system of %s", err, s.dir)
	}
	return err
}

// hashInto copies from src to dst and returns the SHA-256 of what it copied.
func hashInto(ctx context.Context, dst io.Writer, src io.Reader) (string, error) {
	hash := sha256.New()
	buf := make([]byte, 256<<10)
	for {
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		n, err := src.Read(buf)
		hash.Write(buf[:n])
		if _, werr := dst.Write(buf[:n]); werr != nil {
			return "", werr
		}
		if err == io.EOF {
			return hex.EncodeToString(hash.Sum(nil)), nil
		}
		if err != nil {
			return "", err
		}
	}
}

func (s *Store) path(sum string) string { return filepath.Join(s.dir, sum) }

// Keep sets which binaries the next Prune leaves.
func (s *Store) Keep(sums ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep = sums
}

// Prune removes all binaries that the last Keep does not name.
func (s *Store) Prune() error {
	s.mu.Lock()
	keep := s.keep
	s.mu.Unlock()
	stored, err := os.ReadDir(s.dir)
	for _, e := range stored {
		if sum, parseErr := parseSum(e.Name()); parseErr == nil && sum == e.Name() && !slices.Contains(keep, sum) {
			err = errors.Join(err, os.Remove(s.path(sum)))
		}
	}
	return err
}
