package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Hold is the right to change one volume or snapshot. It ends with Release, or with the process.
type Hold struct {
	store *Store
	id    ID
	file  *os.File
	gone  bool // there is no record, so the lock file goes too
}

// Lock takes the right to change a volume or snapshot. It never waits: somebody else's is ErrBusy.
func (s *Store) Lock(id ID) (*Hold, error) {
	if !s.enter(id) {
		return nil, busy(id)
	}
	f, err := s.lockFile(id)
	if err != nil {
		s.leave(id)
		return nil, err
	}
	return &Hold{store: s, id: id, file: f}, nil
}

func busy(id ID) error {
	return Errorf(ErrBusy, "another call for %s is running; try again when it has ended", id)
}

func (s *Store) enter(id ID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[id] {
		return false
	}
	s.held[id] = true
	return true
}

func (s *Store) leave(id ID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.held, id)
}

func lockName(id ID) string { return "locks/" + string(id) + ".lock" }

// lockFile locks the file that has the name now: one that its holder removed meanwhile guards nothing any more.
func (s *Store) lockFile(id ID) (*os.File, error) {
	for {
		f, err := s.root.OpenFile(lockName(id), os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", id, err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, busy(id)
			}
			return nil, fmt.Errorf("lock %s: %w", id, err)
		}
		same, err := s.isNamed(f, lockName(id))
		if same {
			return f, nil
		}
		unlock(f)
		if err != nil {
			return nil, fmt.Errorf("lock %s: %w", id, err)
		}
	}
}

func (s *Store) isNamed(f *os.File, name string) (bool, error) {
	mine, err := f.Stat()
	if err != nil {
		return false, err
	}
	named, err := s.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(mine, named), err
}

// unlock says so explicitly: a child process that is being started may share the open file for a moment longer.
func unlock(f *os.File) {
	_ = unix.Flock(int(f.Fd()), unix.LOCK_UN)
	_ = f.Close()
}

// Release gives the right back.
func (h *Hold) Release() {
	if h.gone {
		_ = h.store.root.Remove(lockName(h.id)) // still locked: whoever waits for it notices and takes a new one
	}
	unlock(h.file)
	h.store.leave(h.id)
}

// Load reads the volume's record, in whatever state it is.
func (h *Hold) Load() (Record, error) {
	r, err := h.store.Load(h.id)
	h.gone = errors.Is(err, ErrNotFound)
	return r, err
}

// Find reads the record if the volume is ready for use.
func (h *Hold) Find() (Record, error) {
	if _, err := h.Load(); err != nil {
		return Record{}, err
	}
	return h.store.Find(h.id)
}

// Save replaces the record; on return it is durable.
func (h *Hold) Save(r Record) error {
	h.gone = false
	return h.store.replace(recordFile(h.id), r)
}

// Drop removes the record, and what a kill left of its writing.
func (h *Hold) Drop() error {
	if err := h.store.erase(recordFile(h.id)+".tmp", recordFile(h.id)); err != nil {
		return err
	}
	h.gone = true
	return nil
}

// accounting runs do while nobody else, in whichever process, counts space, attachments or nodes.
func (s *Store) accounting(do func() error) error {
	s.account.Lock()
	defer s.account.Unlock()
	f, err := s.root.OpenFile("locks/account", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("lock the account: %w", err)
	}
	defer unlock(f)
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if err == nil {
			return do()
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock the account: %w", err)
		}
	}
}
