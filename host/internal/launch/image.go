package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// image is the verified content of one binary, held open. The store's mu guards users and used; state is changed with
// both locks held.
type image struct {
	sum   string
	file  *os.File
	state fileState // when it was verified
	users int       // processes that run it
	used  time.Time
}

// fileState differs whenever the content of a file may have changed, because a ctime cannot be set back.
type fileState struct {
	ino          uint64
	size         int64
	mtime, ctime unix.Timespec
}

func stateOf(f *os.File) (fileState, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fileState{}, &os.PathError{Op: "fstat", Path: f.Name(), Err: err}
	}
	return fileState{ino: st.Ino, size: st.Size, mtime: st.Mtim, ctime: st.Ctim}, nil
}

func (i *image) unchanged() bool {
	now, err := stateOf(i.file)
	return err == nil && now == i.state
}

// acquire returns a descriptor of the verified content of the digest, and counts its user. The caller closes it. Calls
// are held until a crashed shim is started again, so acquire does not wait for another binary that is being read.
func (s *Store) acquire(ctx context.Context, sum string) (*os.File, error) {
	if f, err := s.ready(sum); f != nil || err != nil {
		return f, err
	}
	s.reading.Lock()
	defer s.reading.Unlock()
	img, err := s.verified(ctx, sum)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return img.open()
}

// ready returns a descriptor of an image that this process has verified and that has not changed since, else nil.
func (s *Store) ready(sum string) (*os.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if img := s.images[sum]; img != nil && img.unchanged() {
		return img.open()
	}
	return nil, nil
}

// open returns a descriptor of the image and counts its user. The caller holds the store's mu.
func (i *image) open() (*os.File, error) {
	f, err := duplicate(i.file)
	if err != nil {
		return nil, err
	}
	i.users++
	i.used = time.Now()
	return f, nil
}

// Stored verifies a stored binary. It returns ErrNotFound if there is none with that SHA-256.
func (s *Store) Stored(ctx context.Context, sum string) (Digest, error) {
	sum, err := parseSum(sum)
	if err != nil {
		return Digest{}, err
	}
	s.reading.Lock()
	defer s.reading.Unlock()
	img, err := s.verified(ctx, sum)
	if err != nil {
		return Digest{}, err
	}
	s.use(img)
	return Digest{SHA256: sum}, nil
}

// verified returns the image of the digest. It hashes only an image that this process has not verified yet, or that was
// touched since. The caller holds reading.
func (s *Store) verified(ctx context.Context, sum string) (*image, error) {
	img := s.images[sum]
	if img == nil {
		return s.load(ctx, sum)
	}
	if img.unchanged() {
		return img, nil
	}
	state, err := verify(ctx, img.file, sum)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	img.state = state
	return img, nil
}

func duplicate(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("dup", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// release undoes one acquire.
func (s *Store) release(sum string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if img := s.images[sum]; img != nil {
		img.users--
		img.used = time.Now()
	}
}

// load opens and verifies a binary that an earlier process has stored.
func (s *Store) load(ctx context.Context, sum string) (*image, error) {
	f, err := os.Open(s.path(sum))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, registry.Errorf(registry.ErrNotFound, "no shim with SHA-256 %s is in %s: add its binary first",
			sum, s.dir)
	}
	if err != nil {
		return nil, fmt.Errorf("open the stored shim: %w", err)
	}
	state, err := verify(ctx, f, sum)
	if err != nil {
		f.Close()
		return nil, err
	}
	return s.hold(f, sum, state), nil
}

// verify hashes the descriptor itself, as its name may lead to another file by now. It returns the file's state.
func verify(ctx context.Context, f *os.File, sum string) (fileState, error) {
	state, err := stateOf(f)
	if err != nil {
		return fileState{}, err
	}
	is, err := hashInto(ctx, io.Discard, io.NewSectionReader(f, 0, state.size))
	if err != nil {
		return fileState{}, fmt.Errorf("verify the stored shim: %w", err)
	}
	if is != sum {
		return fileState{}, registry.Errorf(registry.ErrDamaged,
			"the stored shim %s was changed, its SHA-256 is now %s: add its binary again", sum, is)
	}
	return state, nil
}
