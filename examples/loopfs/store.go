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

	"github.com/google/renameio/v2"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	mounttable "holdfast/internal/mount"
)

// store keeps volumes, snapshots and groups in a data directory:
//
//	lock                     ranges of it are locked by calls that change a volume or count space
//	volumes/ID/meta.json     the record: size, how it is staged and published
//	volumes/ID/image         bytes of the loop backend: a sparse image, of an ext4 file system or of raw data
//	volumes/ID/files/        bytes of the dir backend
//	volumes/GROUP/ID/        a snapshot of a group
//	volumes/ID.*.tmp/        is being made or removed, or a kill interrupted that
//
// A directory gets its name when it is complete, and loses it before anything in it is removed. So a volume, and a
// group with its snapshots, exists in full or not at all. What is incomplete is removed by the next call for that ID, or
// the next start.
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

// temporary calls do with a new directory, which is removed afterwards if it still has its name. No other directory ever
// had that name. It also removes what a kill left of earlier ones.
func (s store) temporary(id volumeID, do func(dir string) error) error {
	if err := s.discardIncomplete(string(id)); err != nil {
		return err
	}
	part := fmt.Sprintf("%s.%s.tmp", s.dirOf(id), rand.Text())
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

// remove removes a volume, a snapshot or a group with its snapshots.
func (s store) remove(id volumeID) error {
	err := nothingMounted(s.dirOf(id))
	if err == nil {
		err = s.temporary(id, func(dir string) error { return rename(s.dirOf(id), filepath.Join(dir, "removed")) })
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
	at, err := mounttable.Below(dir)
	if err == nil && len(at) > 0 {
		err = status.Errorf(codes.FailedPrecondition, "something is mounted inside the volume, at %s", at[0].Point)
	}
	return err
}

// discardIncomplete removes the temporary directories of an ID.
func (s store) discardIncomplete(id string) error {
	parts, err := fs.Glob(os.DirFS(s.path), "volumes/"+id+".*.tmp")
	for _, part := range parts {
		err = errors.Join(err, discard(filepath.Join(s.path, part)))
	}
	return err
}

// records lists the files of records, also incomplete ones.
func (s store) records() ([]string, error) {
	tree := os.DirFS(s.path)
	single, err := fs.Glob(tree, "volumes/*/meta.json")
	if err != nil {
		return nil, err
	}
	members, err := fs.Glob(tree, "volumes/*/*/meta.json")
	return append(single, members...), err
}

// ids lists the IDs of some kind in order.
func (s store) ids(k kind) (ids []volumeID, err error) {
	files, err := s.records()
	for _, file := range files {
		dir := path.Dir(file)
		id := volumeID(path.Base(dir))
		if id.valid() && id.kind() == k && s.dirOf(id) == filepath.Join(s.path, dir) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids, err
}

// all reads the records of some kind, in the order of IDs. It omits damaged ones, which health reports.
func (s store) all(k kind) (all []record, err error) {
	ids, err := s.ids(k)
	for _, id := range ids {
		if r, err := s.load(id); err == nil {
			all = append(all, r)
		}
	}
	return all, err
}

// used returns the bytes of all volumes and snapshots, also of those that are being made.
func (s store) used() (sum int64, err error) {
	files, err := s.records()
	for _, file := range files {
		var r record
		if text, err := os.ReadFile(filepath.Join(s.path, file)); err == nil && json.Unmarshal(text, &r) == nil {
			sum += r.Bytes
		}
	}
	return sum, err
}

// Locks are ranges of one byte of the file "lock" (F_OFD_SETLK in fcntl(2)), so no files come and go with volumes. They
// exclude other processes and other calls of this one alike, as each has the file open for itself.

// accountAt is the range of the account. The ranges of IDs are below it.
const accountAt = 1 << 62

// lock locks a volume, snapshot or group. It never waits: ABORTED means that another call holds the lock.
func (s store) lock(id volumeID) (unlock func(), err error) {
	sum := sha256.Sum256([]byte(id))
	unlock, err = s.lockAt(unix.F_OFD_SETLK, int64(binary.BigEndian.Uint64(sum[:])%accountAt))
	if errors.Is(err, unix.EAGAIN) {
		return nil, status.Errorf(codes.Aborted, "another call for %s is running; try again when it has ended", id)
	}
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", id, err)
	}
	return unlock, nil
}

func (s store) lockAt(how int, at int64) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(s.path, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.FcntlFlock(f.Fd(), how, &unix.Flock_t{Type: unix.F_WRLCK, Start: at, Len: 1})
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			f.Close()
			return nil, err
		}
	}
	return func() {
		// A child process that is being started may have the file open for a moment longer, so a close is not enough.
		_ = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_UNLCK}) // to the end of the file
		_ = f.Close()
	}, nil
}

// accounting runs do while no other call or process counts space.
func (s store) accounting(do func() error) error {
	unlock, err := s.lockAt(unix.F_OFD_SETLKW, accountAt)
	if err != nil {
		return fmt.Errorf("lock the account: %w", err)
	}
	defer unlock()
	return do()
}
