package disk

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Locks are ranges of one byte of the file "lock" (F_OFD_SETLK in fcntl(2)), so no files come and go with volumes. They
// exclude other processes and other calls of this one alike, as each has the file open for itself.

// accountAt is the range of the account. The ranges of ids are below it.
const accountAt = 1 << 62

// Hold is the right to change one volume or snapshot. It ends with Release, or with the process.
type Hold struct {
	store *Store
	id    ID
	file  *os.File
}

// Lock locks a volume or snapshot. It never waits: ErrBusy means that another call holds the lock.
func (s *Store) Lock(id ID) (*Hold, error) {
	sum := sha256.Sum256([]byte(id))
	f, err := s.lockAt(unix.F_OFD_SETLK, int64(binary.BigEndian.Uint64(sum[:])%accountAt))
	if errors.Is(err, unix.EAGAIN) {
		return nil, Errorf(ErrBusy, "another call for %s is running; try again when it has ended", id)
	}
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", id, err)
	}
	return &Hold{store: s, id: id, file: f}, nil
}

func (s *Store) lockAt(how int, at int64) (*os.File, error) {
	f, err := s.root.OpenFile("lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.FcntlFlock(f.Fd(), how, &unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1})
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, err
		}
	}
}

// unlock does not rely on the close: a child process that is being started may have the file open for a moment longer.
func unlock(f *os.File) {
	_ = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK}) // to the end of the file
	_ = f.Close()
}

// Release unlocks the volume or snapshot.
func (h *Hold) Release() { unlock(h.file) }

// Load reads the record in any state.
func (h *Hold) Load() (Record, error) { return h.store.Load(h.id) }

// Save replaces the record; on return it is durable.
func (h *Hold) Save(r Record) error { return h.store.replace(recordFile(h.id), r) }

// Drop removes the record and its temporary file.
func (h *Hold) Drop() error { return h.store.erase(recordFile(h.id)+".tmp", recordFile(h.id)) }

// accounting runs do while no other call or process counts space, attachments or nodes.
func (s *Store) accounting(do func() error) error {
	f, err := s.lockAt(unix.F_OFD_SETLKW, accountAt)
	if err != nil {
		return fmt.Errorf("lock the account: %w", err)
	}
	defer unlock(f)
	return do()
}
