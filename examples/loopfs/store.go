package main

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"

	"github.com/gofrs/flock"
	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/mount"
)

// store keeps volumes, snapshots and groups in a data directory:
//
//	lock                     ranges of it are locked by calls that change a volume
//	space.lock               is locked by calls that count space
//	volumes/ID/meta.json     the record: size, how it is staged and published
//	volumes/ID/image         bytes of the loop backend: a sparse image, of an ext4 file system or of raw data
//	volumes/ID/files/        bytes of the dir backend
//	volumes/GROUP/ID/        a snapshot of a group
//	volumes/ID.*.tmp/        is being made or removed, or a kill interrupted that
//
// A directory gets its name when it is complete, and loses it before anything in it is removed. So a volume, and a
// group with its snapshots, exists in full or not at all. What is incomplete is removed by the next call for that ID,
// or the next start.
type store struct {
	path string // absolute, without symbolic links
}

// openStore opens or makes a data directory.
func openStore(dir string) (store, error) {
	err := os.MkdirAll(filepath.Join(dir, "volumes"), 0o700)
	if err == nil {
		dir, err = filepath.Abs(dir)
	}
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return store{}, fmt.Errorf("data directory: %w", err)
	}
	return store{path: dir}, nil
}

// check returns an error if the data directory is gone.
func (s store) check() error {
	if _, err := os.Stat(filepath.Join(s.path, "volumes")); err != nil {
		return status.Errorf(codes.FailedPrecondition, "data directory: %v", err)
	}
	return nil
}

// dirOf returns the directory of a volume, snapshot or group.
func (s store) dirOf(id volumeID) string {
	return filepath.Join(s.path, "volumes", string(id.group()), string(id))
}

// load reads a record.
func (s store) load(id volumeID) (r record, err error) {
	text, err := os.ReadFile(filepath.Join(s.dirOf(id), "meta.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, status.Errorf(codes.NotFound, "%s does not exist", id)
	}
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err == nil && (r.ID != id || r.Bytes < 0) {
		err = errors.New("it is inconsistent")
	}
	if err != nil {
		return record{}, status.Errorf(codes.DataLoss, "record of %s: %v", id, err)
	}
	return r, nil
}

// get reads the record of an ID from a request.
func (s store) get(k kind, id string) (record, error) {
	parsed, err := parseID(k, id)
	if err != nil {
		return record{}, err
	}
	return s.load(parsed)
}

// save replaces a record; on return it is durable.
func (s store) save(r record) error { return writeRecord(s.dirOf(r.ID), r) }

// saveUnmounted replaces a record after an unmount. On a full disk the old record stays, so that unmounts go on: the
// mount that it still has counts only if the kernel has it too.
func (s store) saveUnmounted(r record) error {
	if err := s.save(r); !errors.Is(err, unix.ENOSPC) {
		return err
	}
	return nil
}

// writeRecord writes a record as a whole and durably.
func writeRecord(dir string, r record) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = renameio.WriteFile(filepath.Join(dir, "meta.json"), append(text, '\n'), 0o600)
	}
	if err != nil {
		return fmt.Errorf("write the record of %s: %w", r.ID, err)
	}
	return syncDir(dir)
}

// rename moves a complete file or directory, durably.
func rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return errors.Join(syncDir(filepath.Dir(to)), syncDir(filepath.Dir(from)))
}

func syncDir(dir string) error { return onFile(dir, (*os.File).Sync) }

// temporaryDir returns the name of a temporary directory that no other one ever had.
func (s store) temporaryDir(id volumeID) string {
	return fmt.Sprintf("%s.%s.tmp", s.dirOf(id), rand.Text())
}

// temporary calls do with a new directory, which is removed afterwards if it still has its name.
func (s store) temporary(id volumeID, do func(dir string) error) error {
	part := s.temporaryDir(id)
	err := os.Mkdir(part, 0o700)
	if err == nil {
		err = do(part)
	}
	return errors.Join(err, discard(part))
}

// make has fill write a directory, and then gives it its name. After an error nothing is left.
func (s store) make(id volumeID, fill func(dir string) error) error {
	err := s.temporary(id, func(dir string) error {
		if err := fill(dir); err != nil {
			return err
		}
		// used must not miss the record between its two names
		return s.accounting(func() error { return rename(dir, s.dirOf(id)) })
	})
	if err != nil {
		return fmt.Errorf("make %s: %w", id, err)
	}
	return nil
}

// remove removes a volume, a snapshot or a group with its snapshots. It makes no file, because the disk may be full.
func (s store) remove(id volumeID) error {
	part := s.temporaryDir(id)
	err := nothingMounted(s.dirOf(id))
	if err == nil {
		err = rename(s.dirOf(id), part)
	}
	if err == nil {
		err = discard(part)
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", id, err)
	}
	return nil
}

// discard removes a temporary directory.
func discard(part string) error {
	if err := nothingMounted(part); err != nil {
		return err
	}
	return os.RemoveAll(part)
}

func nothingMounted(dir string) error {
	at, err := mount.Below(dir)
	if err == nil && len(at) > 0 {
		err = status.Errorf(codes.FailedPrecondition, "something is mounted inside the volume, at %s", at[0].Point)
	}
	return err
}

// records lists the files of records, also incomplete ones.
func (s store) records() []string {
	single, _ := fs.Glob(os.DirFS(s.path), "volumes/*/meta.json") // its only error is a bad pattern
	members, _ := fs.Glob(os.DirFS(s.path), "volumes/*/*/meta.json")
	return append(single, members...)
}

// ids lists the IDs of some kind in order.
func (s store) ids(k kind) (ids []volumeID) {
	for _, file := range s.records() {
		dir := path.Dir(file)
		id := volumeID(path.Base(dir))
		if id.valid() && id.kind() == k && s.dirOf(id) == filepath.Join(s.path, dir) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// all reads the records of some kind, in the order of IDs. It omits damaged ones, which health reports.
func (s store) all(k kind) (all []record) {
	for _, id := range s.ids(k) {
		if r, err := s.load(id); err == nil {
			all = append(all, r)
		}
	}
	return all
}

// used returns the bytes of all volumes and snapshots, also of those that are being made.
func (s store) used() (sum int64) {
	for _, file := range s.records() {
		var r record
		if text, err := os.ReadFile(filepath.Join(s.path, file)); err == nil && json.Unmarshal(text, &r) == nil {
			sum += r.Bytes
		}
	}
	return sum
}

// The lock of an ID is a range of one byte of the file "lock" (F_OFD_SETLK in fcntl(2)), so no files come and go with
// volumes. Locks exclude other processes and other calls of this one alike, as each has the file open for itself.

// lock locks a volume, snapshot or group. It never waits: ABORTED means that another call holds the lock. It removes
// the temporary directories that a kill left of that ID.
func (s store) lock(id volumeID) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(s.path, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(id))
	at := unix.Flock_t{Type: unix.F_WRLCK, Start: int64(binary.BigEndian.Uint64(sum[:]) & (1<<62 - 1)), Len: 1}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &at); err != nil {
		f.Close()
		if errors.Is(err, unix.EAGAIN) {
			return nil, status.Errorf(codes.Aborted, "another call for %s is running; try again when it has ended", id)
		}
		return nil, fmt.Errorf("lock %s: %w", id, err)
	}
	unlock = func() {
		// A child process that is being started may have the file open for a moment longer, so a close is not enough.
		_ = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK}) // to the end of the file
		_ = f.Close()
	}
	parts, _ := fs.Glob(os.DirFS(s.path), "volumes/"+string(id)+".*.tmp")
	for _, part := range parts {
		err = errors.Join(err, discard(filepath.Join(s.path, part)))
	}
	if err != nil {
		unlock()
		return nil, fmt.Errorf("remove what a killed process left of %s: %w", id, err)
	}
	return unlock, nil
}

// accounting runs do while no other call or process counts space.
func (s store) accounting(do func() error) error {
	l := flock.New(filepath.Join(s.path, "space.lock"))
	if err := l.Lock(); err != nil {
		return fmt.Errorf("lock the account: %w", err)
	}
	return errors.Join(do(), l.Close())
}
