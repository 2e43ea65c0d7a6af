package launch

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// kept is how many binaries stay in a store beside those in use: the running one, its predecessor and one to come.
const kept = 3

// Trust is why a digest is believed.
type Trust string

const (
	TrustGiven    Trust = "given"     // the caller knew the digest
	TrustFile     Trust = "file"      // it was read from the .sha256 file beside the binary
	TrustFirstUse Trust = "first use" // nobody knew it: it was computed from the binary, and recorded
)

// Digest names a binary by its content.
type Digest struct {
	SHA256 string // 64 lower-case hexadecimal digits
	Trust  Trust
}

func (d Digest) String() string { return d.SHA256 }

// Store keeps shim binaries under their SHA-256. One process owns its directory. It is safe for concurrent use.
type Store struct {
	dir string

	mu     sync.Mutex // guards images; held while hashing, so that one binary is never hashed twice at once
	images map[string]*image
}

// OpenStore uses dir, which it makes (0700) if it does not exist, and removes what an interrupted Add has left in it.
func OpenStore(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open the store of shims: %w", err)
	}
	if err := checkPrivate(dir); err != nil {
		return nil, err
	}
	partial, err := filepath.Glob(filepath.Join(dir, ".add-*"))
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
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for sum, img := range s.images {
		errs = append(errs, img.file.Close())
		delete(s.images, sum)
	}
	return errors.Join(errs...)
}

// Add copies the binary at path into the store. want is its SHA-256 in hexadecimal; empty means the content of the file
// path.sha256, and without such a file the digest is computed and trusted on first use. The Digest says which it was.
// A digest that differs is ErrInvalid and leaves the store as it was.
func (s *Store) Add(ctx context.Context, path, want string) (Digest, error) {
	src, err := openBinary(path)
	if err != nil {
		return Digest{}, err
	}
	defer src.Close()
	want, trust, err := wantedDigest(path, want)
	if err != nil {
		return Digest{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	img, err := s.copyIn(ctx, src, path, want)
	if err != nil {
		return Digest{}, err
	}
	digest := Digest{SHA256: img.sum, Trust: trust}
	if err := s.record(digest, path); err != nil {
		return Digest{}, err
	}
	return digest, s.prune(img.sum)
}

// openBinary opens what may be executed and what nobody else can change.
func openBinary(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO must not block us
	if err != nil {
		return nil, fmt.Errorf("open the shim: %w", err)
	}
	if err := checkBinary(f); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func checkBinary(f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return &os.PathError{Op: "fstat", Path: f.Name(), Err: err}
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return registry.Invalid("the shim %s is not a regular file", f.Name())
	case st.Mode&0o002 != 0:
		return registry.Errorf(registry.ErrDenied, "everybody can write to the shim %s: chmod o-w it", f.Name())
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return registry.Errorf(registry.ErrDenied, "the shim %s belongs to uid %d, who can change it: it must be yours or root's",
			f.Name(), st.Uid)
	case st.Mode&0o111 == 0:
		return registry.Invalid("the shim %s is not executable: chmod +x it", f.Name())
	case st.Size == 0:
		return registry.Invalid("the shim %s is empty", f.Name())
	}
	return nil
}

// wantedDigest finds out what the digest of path should be. Empty with TrustFirstUse: nobody knows.
func wantedDigest(path, want string) (string, Trust, error) {
	if want != "" {
		sum, err := parseSum(want)
		return sum, TrustGiven, err
	}
	beside := path + ".sha256"
	text, err := readShort(beside)
	if errors.Is(err, fs.ErrNotExist) {
		return "", TrustFirstUse, nil
	}
	if err != nil {
		return "", "", fmt.Errorf("read the shim's digest: %w", err)
	}
	sum, err := parseSum(text)
	if err != nil {
		return "", "", fmt.Errorf("read %s: %w", beside, err)
	}
	return sum, TrustFile, nil
}

func readShort(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, 4096))
	return string(text), err
}

// parseSum takes a bare digest, or a line as sha256sum prints it.
func parseSum(text string) (string, error) {
	first, _, _ := strings.Cut(strings.TrimSpace(text), " ")
	sum := strings.ToLower(strings.TrimPrefix(first, "sha256:"))
	if raw, err := hex.DecodeString(sum); err != nil || len(raw) != sha256.Size {
		return "", registry.Invalid("%q is not a SHA-256 in 64 hexadecimal digits", first)
	}
	return sum, nil
}

// copyIn copies src while it hashes, and puts the copy under its digest if that is the wanted one.
func (s *Store) copyIn(ctx context.Context, src *os.File, path, want string) (*image, error) {
	tmp, err := os.CreateTemp(s.dir, ".add-*")
	if err != nil {
		return nil, fmt.Errorf("copy the shim: %w", err)
	}
	defer os.Remove(tmp.Name()) // gone after the rename
	defer tmp.Close()
	sum, err := hashInto(ctx, tmp, src)
	if err != nil {
		return nil, fmt.Errorf("copy the shim %s: %w", path, err)
	}
	if want != "" && sum != want {
		return nil, registry.Invalid("the shim %s is not the wanted binary: its SHA-256 is %s, wanted is %s; install the right "+
			"binary, or correct the digest", path, sum, want)
	}
	if old := s.images[sum]; old != nil && old.unchanged() {
		old.used = time.Now()
		return old, nil
	}
	img, err := s.install(tmp, sum)
	if err != nil {
		return nil, fmt.Errorf("copy the shim %s: %w", path, err)
	}
	return img, nil
}

// hashInto copies from src to dst and returns the SHA-256 of what it copied.
func hashInto(ctx context.Context, dst io.Writer, src io.Reader) (string, error) {
	hash := sha256.New()
	buf := make([]byte, 1<<20)
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
	if err := errors.Join(tmp.Chmod(0o500), tmp.Sync()); err != nil {
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
	return s.hold(f, sum)
}

// hold keeps f as the verified content of sum, in place of what was held before.
func (s *Store) hold(f *os.File, sum string) (*image, error) {
	state, err := stateOf(f)
	if err != nil {
		return nil, err
	}
	img := &image{sum: sum, file: f, state: state, used: time.Now()}
	if old := s.images[sum]; old != nil {
		img.users = old.users
		old.file.Close()
	}
	s.images[sum] = img
	return img, nil
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

// record notes beside the binary where it came from and why it is trusted: for people.
func (s *Store) record(d Digest, path string) error {
	from, err := filepath.Abs(path)
	if err != nil {
		return fmt.Errorf("record the shim: %w", err)
	}
	added := time.Now().UTC().Format(time.RFC3339)
	text, err := json.Marshal(map[string]string{"path": from, "trust": string(d.Trust), "added": added})
	if err != nil {
		return fmt.Errorf("record the shim: %w", err)
	}
	if err := os.WriteFile(s.path(d.SHA256)+".origin", append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("record the shim: %w", err)
	}
	return nil
}

// prune removes the binaries that were not used for longest, but never one in use.
func (s *Store) prune(added string) error {
	stored, err := s.stored()
	if err != nil {
		return fmt.Errorf("prune the store of shims: %w", err)
	}
	for i, entry := range stored {
		img := s.images[entry.sum]
		if i < kept || entry.sum == added || (img != nil && img.users > 0) {
			continue
		}
		if img != nil {
			img.file.Close()
			delete(s.images, entry.sum)
		}
		err = errors.Join(err, os.Remove(s.path(entry.sum)), removeIfThere(s.path(entry.sum)+".origin"))
	}
	return err
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

type entry struct {
	sum  string
	used time.Time
}

// stored lists what is in the store, most recently used first.
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
