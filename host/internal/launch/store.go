package launch

import (
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

	"holdfast/registry"
)

// kept is how many binaries stay in a store: those in use and those of Keep, all of them, then those that were used last.
const kept = 3

const (
	storedMode = 0o500
	temporary  = ".add-*" // names of what is not whole yet
)

// Store keeps shim binaries under their SHA-256. One process owns its directory. It is safe for concurrent use.
type Store struct {
	dir string

	reading sync.Mutex        // held while a binary is copied or hashed, so that none is hashed twice at once; locked before mu
	mu      sync.Mutex        // guards keeps; held for no longer than a look into the directory
	keeps   []string          // by their SHA-256
	images  map[string]*image // changed with both held
}

// OpenStore uses dir, which it makes (0700) if it does not exist, and removes what an interrupted Add has left in it.
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

// Close lets go of all descriptors. Processes that run are not touched.
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

// Add sees to it that the binary at path is in the store. want is its SHA-256 in hexadecimal; empty means the content of the
// file path.sha256, and without such a file the digest is computed and trusted on first use. The Digest says which it was. A
// digest that differs is ErrInvalid and leaves the store as it was.
//
// What is stored already is verified, not written again: a full disk hinders only a binary that is new, with ErrExhausted.
// Where nothing is at path, the stored copy of the wanted digest is used, or of the one that Add saw there last.
func (s *Store) Add(ctx context.Context, path, want string) (Digest, error) {
	from, err := filepath.Abs(path)
	if err != nil {
		return Digest{}, fmt.Errorf("add a shim: %w", err)
	}
	want, trust, err := wantedDigest(path, want)
	if err != nil {
		return Digest{}, err
	}
	s.reading.Lock()
	defer s.reading.Unlock()
	src, err := openBinary(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s.recall(ctx, from, Digest{SHA256: want, Trust: trust}, err)
	}
	if err != nil {
		return Digest{}, err
	}
	defer src.Close()
	img, copied, err := s.bring(ctx, src, want)
	if err != nil {
		return Digest{}, err
	}
	digest := Digest{SHA256: img.sum, Trust: trust}
	digest.Replaces, digest.Unrecorded = s.record(from, digest)
	if copied {
		err = s.prune(img.sum)
	}
	return digest, err
}

// recall stands in for the binary at path, which is gone, with its stored copy.
func (s *Store) recall(ctx context.Context, path string, d Digest, gone error) (Digest, error) {
	if d.SHA256 == "" {
		d = Digest{SHA256: s.origins()[path].SHA256, Trust: TrustRecorded}
	}
	if d.SHA256 == "" {
		return Digest{}, registry.Errorf(registry.ErrNotFound, "%w; no copy of it is known in %s: install the binary at that path, "+
			"or give the path of another", gone, s.dir)
	}
	img, err := s.verified(ctx, d.SHA256)
	if ctx.Err() != nil {
		return Digest{}, context.Cause(ctx)
	}
	if err != nil {
		return Digest{}, registry.Errorf(registry.ErrNotFound, "%w; install the binary at that path: its stored copy cannot stand in "+
			"for it (%w)", gone, err)
	}
	s.use(img)
	d.SourceGone = true
	return d, nil
}

// bring returns the stored image of what src holds, and whether that had to be copied.
func (s *Store) bring(ctx context.Context, src *os.File, want string) (img *image, copied bool, err error) {
	if img, err = s.present(ctx, src, want); img != nil || err != nil {
		return img, false, err
	}
	if _, err = src.Seek(0, io.SeekStart); err == nil {
		img, err = s.copyIn(ctx, src, want)
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		err = registry.Errorf(registry.ErrExhausted, "%w: a shim that is new here needs room for its copy: free some on the file "+
			"system of %s", err, s.dir)
	}
	return img, err == nil, err
}

// present returns the stored image with the content of src, without a write. It is nil if none is there, or none that is
// intact: a copy mends that.
func (s *Store) present(ctx context.Context, src *os.File, want string) (*image, error) {
	if likely, err := s.hasSizeOf(src); !likely {
		return nil, err
	}
	sum, err := hashInto(ctx, io.Discard, src)
	if err != nil {
		return nil, fmt.Errorf("read the shim %s: %w", src.Name(), err)
	}
	if err := checkSum(src, sum, want); err != nil {
		return nil, err
	}
	img, err := s.verified(ctx, sum)
	if err != nil {
		return nil, context.Cause(ctx) // nil where it was not the context
	}
	if !s.inPlace(img) {
		return nil, nil
	}
	s.use(img)
	return img, nil
}

// use has the image count as used now.
func (s *Store) use(img *image) {
	s.mu.Lock()
	defer s.mu.Unlock()
	img.used = time.Now()
}

// hasSizeOf spares a binary that cannot be stored yet a reading of its own.
func (s *Store) hasSizeOf(src *os.File) (bool, error) {
	info, err := src.Stat()
	if err != nil {
		return false, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	stored, err := s.stored()
	if err != nil {
		return false, fmt.Errorf("look into the store of shims: %w", err)
	}
	return slices.ContainsFunc(stored, func(e entry) bool { return e.size == info.Size() }), nil
}

// inPlace tells whether a later process will find under the image's name what this one holds.
func (s *Store) inPlace(img *image) bool {
	named, err := os.Lstat(s.path(img.sum))
	if err != nil {
		return false
	}
	held, err := img.file.Stat()
	return err == nil && os.SameFile(named, held) && named.Mode() == storedMode
}

// openBinary opens what may be executed and what nobody else can change.
func openBinary(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO must not block us
	if errors.Is(err, unix.ENXIO) {
		return nil, notAFile(path) // a socket, or a device that nothing is behind
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
		return registry.Errorf(registry.ErrDenied, "the shim %s belongs to uid %d, who can change it: it must be yours or root's",
			f.Name(), st.Uid)
	case st.Mode&0o111 == 0:
		return registry.Invalid("the shim %s is not executable: chmod +x it", f.Name())
	case st.Size == 0:
		return registry.Invalid("the shim %s is empty: install the whole binary, and give that", f.Name())
	}
	return nil
}

// copyIn copies src while it hashes, and puts the copy under its digest if that is the wanted one.
func (s *Store) copyIn(ctx context.Context, src *os.File, want string) (*image, error) {
	tmp, err := os.CreateTemp(s.dir, temporary)
	if err != nil {
		return nil, fmt.Errorf("copy the shim: %w", err)
	}
	defer os.Remove(tmp.Name()) // gone after the rename
	defer tmp.Close()
	sum, err := hashInto(ctx, tmp, src)
	if err != nil {
		return nil, fmt.Errorf("copy the shim %s: %w", src.Name(), err)
	}
	if err := checkSum(src, sum, want); err != nil {
		return nil, err
	}
	img, err := s.install(tmp, sum)
	if err != nil {
		return nil, fmt.Errorf("copy the shim %s: %w", src.Name(), err)
	}
	return img, nil
}

func checkSum(src *os.File, sum, want string) error {
	if want == "" || sum == want {
		return nil
	}
	return registry.Invalid("the shim %s is not the wanted binary: its SHA-256 is %s, wanted is %s; install the right binary, or "+
		"correct the digest", src.Name(), sum, want)
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

// install makes tmp durable under its digest. The descriptor that is kept was opened before the file got its name.
func (s *Store) install(tmp *os.File, sum string) (*image, error) {
	if err := errors.Join(tmp.Chmod(storedMode), tmp.Sync()); err != nil {
		return nil, err
	}
	f, err := os.Open(tmp.Name())
	if err != nil {
		return nil, err
	}
	img, err := s.publish(f, tmp.Name(), sum)
	if err != nil {
		f.Close()
		return nil, err
	}
	return img, nil
}

func (s *Store) publish(f *os.File, from, sum string) (*image, error) {
	if err := os.Rename(from, s.path(sum)); err != nil {
		return nil, err
	}
	if err := syncDir(s.dir); err != nil {
		return nil, err
	}
	state, err := stateOf(f)
	if err != nil {
		return nil, err
	}
	return s.hold(f, sum, state), nil
}

// hold keeps f as the content of sum, verified in that state, in place of what was held before.
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

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

func (s *Store) path(sum string) string { return filepath.Join(s.dir, sum) }

// Keep has the store keep these binaries, by their SHA-256, and not those that it was told before.
func (s *Store) Keep(sums ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keeps = sums
}

// Prune removes the binaries that were not used for longest: three stay, or more where more are in use or to be kept.
func (s *Store) Prune() error { return s.prune("") }

// prune is Prune that spares the one that was just added: nothing is known of it yet.
func (s *Store) prune(added string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	stored, err := s.stored()
	if err != nil {
		return fmt.Errorf("prune the store of shims: %w", err)
	}
	needed := func(e entry) bool {
		img := s.images[e.sum]
		return e.sum == added || slices.Contains(s.keeps, e.sum) || img != nil && img.users > 0
	}
	slices.SortStableFunc(stored, func(a, b entry) int { return rank(needed(a)) - rank(needed(b)) })
	for i, entry := range stored {
		if i < kept || needed(entry) {
			continue
		}
		img := s.images[entry.sum]
		if img != nil {
			img.file.Close()
			delete(s.images, entry.sum)
		}
		err = errors.Join(err, os.Remove(s.path(entry.sum)))
	}
	return err
}

// rank puts what is needed first.
func rank(needed bool) int {
	if needed {
		return 0
	}
	return 1
}

type entry struct {
	sum  string
	size int64
	used time.Time
}

// stored lists what is in the store, most recently used first. Its caller holds mu.
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
		found = append(found, entry{sum: sum, size: info.Size(), used: used})
	}
	slices.SortFunc(found, func(a, b entry) int { return b.used.Compare(a.used) })
	return found, nil
}
