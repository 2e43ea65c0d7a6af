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
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/durable"
	"holdfast/registry"
)

const (
	kept       = 3 // binaries that stay in a store: first those in use or of Keep, then the last used
	storedMode = 0o500
	temporary  = ".add-*" // names of unfinished copies
)

// Store keeps shim binaries under their SHA-256. One process owns the directory. It is safe for concurrent use.
type Store struct {
	dir string

	reading sync.Mutex        // held while a binary is copied or hashed; locked before mu
	mu      sync.Mutex        // guards keeps; held for no longer than a listing of the directory
	keeps   []string          // SHA-256 of binaries that are not pruned
	images  map[string]*image // changed with both locked
}

// OpenStore opens the store in dir. It creates dir (0700) if it does not exist, and removes unfinished copies.
func OpenStore(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open the store of shims: %w", err)
	}
	if err := checkPrivate(dir); err != nil {
		return nil, err
	}
	partial, err := filepath.Glob(filepath.Join(dir, temporary))
	if err != nil {
		return nil, fmt.Errorf("open the store of shims: %w", err)
	}
	for _, path := range partial {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("open the store of shims: %w", err)
		}
	}
	return &Store{dir: dir, images: make(map[string]*image)}, nil
}

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

// Close closes all descriptors. Running processes are not affected.
func (s *Store) Close() error {
	s.reading.Lock()
	defer s.reading.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for sum, img := range s.images {
		errs = append(errs, img.file.Close())
		delete(s.images, sum)
	}
	return errors.Join(errs...)
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
	s.reading.Lock()
	defer s.reading.Unlock()
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
	img, err := s.verified(ctx, sum)
	switch {
	case ctx.Err() != nil:
		return Digest{}, context.Cause(ctx)
	case err == nil && s.inPlace(img):
		s.use(img)
	default: // it is missing or damaged
		if err := s.copyIn(ctx, src, sum); err != nil {
			return Digest{}, fmt.Errorf("copy the shim %s: %w", path, s.explainFull(err))
		}
		if err := s.prune(sum); err != nil {
			return Digest{}, err
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
	img, err := s.verified(ctx, sum)
	if ctx.Err() != nil {
		return Digest{}, context.Cause(ctx)
	}
	if err != nil {
		return Digest{}, registry.Errorf(registry.ErrNotFound,
			"%w; install the binary at that path: its stored copy cannot be used "+
				"instead (%w)", gone, err)
	}
	s.use(img)
	return Digest{SHA256: sum, SourceGone: true}, nil
}

// use marks the image as used now.
func (s *Store) use(img *image) {
	s.mu.Lock()
	defer s.mu.Unlock()
	img.used = time.Now()
}

// inPlace reports whether the image's name still leads to the held file.
func (s *Store) inPlace(img *image) bool {
	named, err := os.Lstat(s.path(img.sum))
	if err != nil {
		return false
	}
	held, err := img.file.Stat()
	return err == nil && os.SameFile(named, held) && named.Mode() == storedMode
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

// copyIn stores a copy of src under its digest, which it verifies. It opens the descriptor to keep before the file gets
// that name.
func (s *Store) copyIn(ctx context.Context, src *os.File, sum string) error {
	tmp, err := os.CreateTemp(s.dir, temporary)
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
	if err := errors.Join(tmp.Chmod(storedMode), tmp.Sync()); err != nil {
		return err
	}
	f, err := os.Open(tmp.Name())
	if err != nil {
		return err
	}
	state, err := s.publish(f, sum)
	if err != nil {
		f.Close()
		return err
	}
	s.hold(f, sum, state)
	return nil
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

// publish makes the file durable under its digest, and returns its state after that.
func (s *Store) publish(f *os.File, sum string) (fileState, error) {
	if err := os.Rename(f.Name(), s.path(sum)); err != nil {
		return fileState{}, err
	}
	if err := durable.SyncDir(s.dir); err != nil {
		return fileState{}, err
	}
	return stateOf(f)
}

// hold keeps f as the verified content of sum, in place of the file held before.
func (s *Store) hold(f *os.File, sum string, state fileState) *image {
	s.mu.Lock()
	defer s.mu.Unlock()
	img := &image{sum: sum, file: f, state: state, used: time.Now()}
	if old := s.images[sum]; old != nil {
		img.users = old.users
		old.file.Close()
	}
	s.images[sum] = img
	return img
}

func (s *Store) path(sum string) string { return filepath.Join(s.dir, sum) }

// Keep exempts the binaries with these SHA-256 from pruning. It replaces the list of the last call.
func (s *Store) Keep(sums ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keeps = sums
}

// Prune removes the least recently used binaries. Three stay, or more if more are in use or were passed to Keep.
func (s *Store) Prune() error { return s.prune("") }

// prune is Prune, but keeps a binary that was just added.
func (s *Store) prune(added string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	stored, err := s.stored()
	if err != nil {
		return fmt.Errorf("prune the store of shims: %w", err)
	}
	needed := func(sum string) bool {
		img := s.images[sum]
		return sum == added || slices.Contains(s.keeps, sum) || img != nil && img.users > 0
	}
	room := kept
	for _, e := range stored {
		if needed(e.sum) {
			room--
		}
	}
	for _, e := range stored {
		if needed(e.sum) {
			continue
		}
		if room > 0 {
			room--
			continue
		}
		if img := s.images[e.sum]; img != nil {
			img.file.Close()
			delete(s.images, e.sum)
		}
		err = errors.Join(err, os.Remove(s.path(e.sum)))
	}
	return err
}

// entry is one stored binary.
type entry struct {
	sum  string
	used time.Time
}

// stored lists the store, most recently used first. The caller holds mu.
func (s *Store) stored() ([]entry, error) {
	names, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, err
	}
	var found []entry
	for _, name := range names {
		sum, err := parseSum(name.Name())
		if err != nil || sum != name.Name() {
			continue
		}
		info, err := name.Info()
		if err != nil {
			return nil, err
		}
		used := info.ModTime()
		if img := s.images[sum]; img != nil {
			used = img.used
		}
		found = append(found, entry{sum: sum, used: used})
	}
	slices.SortFunc(found, func(a, b entry) int { return b.used.Compare(a.used) })
	return found, nil
}
