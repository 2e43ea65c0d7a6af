package disk

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Store has the records of a data directory. Any number of processes may have it open.
type Store struct {
	path string // absolute, without symbolic links
	root *os.Root
}

// openStore opens or makes a data directory.
func openStore(dir string) (*Store, error) {
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		dir, err = filepath.Abs(dir)
	}
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	for _, name := range []string{"volumes", "nodes", "images", "dirs"} {
		if err := root.Mkdir(name, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, errors.Join(fmt.Errorf("data directory: %w", err), root.Close())
		}
	}
	return &Store{path: dir, root: root}, nil
}

// Close closes the data directory.
func (s *Store) Close() error { return s.root.Close() }

// Path returns the data directory, absolute and without symbolic links.
func (s *Store) Path() string { return s.path }

// Check returns an error if the data directory is gone.
func (s *Store) Check() error {
	if _, err := s.root.Stat("volumes"); err != nil {
		return status.Errorf(codes.FailedPrecondition, "data directory: %v", err)
	}
	return nil
}

func recordFile(id ID) string { return "volumes/" + string(id) + ".json" }

// load reads a record in any state.
func (s *Store) load(id ID) (Record, error) {
	text, err := s.root.ReadFile(recordFile(id))
	if errors.Is(err, fs.ErrNotExist) {
		return Record{}, status.Errorf(codes.NotFound, "%s does not exist", id)
	}
	if err != nil {
		return Record{}, fmt.Errorf("read the record of %s: %w", id, err)
	}
	return decode(id, text)
}

// find reads the record of a volume or snapshot that is ready.
func (s *Store) find(id ID) (Record, error) {
	r, err := s.load(id)
	if err == nil && r.State != Ready {
		err = status.Errorf(codes.NotFound, "%s does not exist: it is incomplete", id)
	}
	return r, err
}

// IDs lists the IDs of the records of some kinds in order.
func (s *Store) IDs(kinds ...Kind) (ids []ID, err error) {
	entries, err := fs.ReadDir(s.root.FS(), "volumes")
	for _, e := range entries {
		name, isRecord := strings.CutSuffix(e.Name(), ".json")
		if id := ID(name); isRecord && madeHere.MatchString(name) && slices.Contains(kinds, id.Kind()) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids, err
}

// All reads the records of some kinds, in the order of IDs. It omits damaged ones, which Health reports.
func (s *Store) All(kinds ...Kind) (all []Record, err error) {
	ids, err := s.IDs(kinds...)
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		r, err := s.load(id)
		switch status.Code(err) {
		case codes.OK:
			all = append(all, r)
		case codes.NotFound, codes.DataLoss:
		default:
			return nil, err
		}
	}
	return all, nil
}

// Node is a node that works with this directory.
type Node struct {
	ID       string            `json:"node"`
	Topology map[string]string `json:"topology"`
}

// AddNode records that a node works with this directory.
func (s *Store) AddNode(n Node) error {
	return s.accounting(func() error { return s.replace("nodes/"+digest(n.ID)+".json", n) })
}

// Nodes lists the nodes that ever worked with this directory.
func (s *Store) Nodes() (nodes []Node, err error) {
	files, err := fs.Glob(s.root.FS(), "nodes/*.json")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		var n Node
		text, err := s.root.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(text, &n)
		}
		if err != nil {
			return nil, status.Errorf(codes.DataLoss, "record of a node, %s: %v", file, err)
		}
		nodes = append(nodes, n)
	}
	return nodes, nil
}

// replace writes a file as a whole and durably. The caller holds the lock that guards it.
func (s *Store) replace(name string, value any) error {
	text, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return fmt.Errorf("encode %s: %w", name, err)
	}
	f, err := s.root.OpenFile(name+".tmp", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	_, err = f.Write(append(text, '\n'))
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return s.rename(name+".tmp", name)
}

// rename gives a complete file or directory its name, durably.
func (s *Store) rename(from, to string) error {
	if err := s.root.Rename(from, to); err != nil {
		return fmt.Errorf("name %s: %w", to, err)
	}
	return s.syncDir(filepath.Dir(to))
}

// erase removes files durably. Missing files are no error.
func (s *Store) erase(names ...string) error {
	for _, name := range names {
		if err := s.root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove %s: %w", name, err)
		}
	}
	return s.syncDir(filepath.Dir(names[0]))
}

func (s *Store) syncDir(name string) error {
	d, err := s.root.Open(name)
	if err == nil {
		err = errors.Join(d.Sync(), d.Close())
	}
	if err != nil {
		return fmt.Errorf("sync %s: %w", name, err)
	}
	return nil
}

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

// Lock locks a volume or snapshot. It never waits: ABORTED means that another call holds the lock.
func (s *Store) Lock(id ID) (*Hold, error) {
	sum := sha256.Sum256([]byte(id))
	f, err := s.lockAt(unix.F_OFD_SETLK, int64(binary.BigEndian.Uint64(sum[:])%accountAt))
	if errors.Is(err, unix.EAGAIN) {
		return nil, status.Errorf(codes.Aborted, "another call for %s is running; try again when it has ended", id)
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
func (h *Hold) Load() (Record, error) { return h.store.load(h.id) }

// Save replaces the record; on return it is durable.
func (h *Hold) Save(r Record) error { return h.store.replace(recordFile(h.id), r) }

// drop removes the record.
func (h *Hold) drop() error { return h.store.erase(recordFile(h.id)) }

// removeTemporary removes what kills left of records, except where a lock is held.
func (s *Store) removeTemporary() {
	files, _ := fs.Glob(s.root.FS(), "volumes/*.tmp")
	for _, file := range files {
		if h, err := s.Lock(ID(strings.TrimSuffix(filepath.Base(file), ".json.tmp"))); err == nil {
			_ = s.erase(file)
			h.Release()
		}
	}
}

// accounting runs do while no other call or process counts space, attachments or nodes.
func (s *Store) accounting(do func() error) error {
	f, err := s.lockAt(unix.F_OFD_SETLKW, accountAt)
	if err != nil {
		return fmt.Errorf("lock the account: %w", err)
	}
	defer unlock(f)
	return do()
}
