package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

var (
	metaBucket   = []byte("meta")
	jobsBucket   = []byte("jobs")
	allocsBucket = []byte("allocs")
	engineBucket = []byte("engine_mounts")
)

// nodeKey is the key of the node ID in metaBucket.
const nodeKey = "node"

// ledger is agent.db. It has one record for each job and alloc.
type ledger struct {
	db       *bolt.DB
	reserved int64        // allocated bytes from the start of the file
	before   func() error // for tests: called before each transaction
}

// reserveSize bytes stay allocated beyond the pages in use, so that allocs can be stopped and released on a full disk.
// The stop and release of one alloc writes up to reserveAlloc bytes.
const (
	reserveSize  = 1 << 20
	reserveAlloc = 8 << 10
)

// reserve allocates space for the pages in use and for the records of allocs. It is called before anything new is
// started.
func (l *ledger) reserve(allocs int) error {
	var used int64
	if err := l.db.View(func(tx *bolt.Tx) error { used = tx.Size(); return nil }); err != nil {
		return fmt.Errorf("read %s: %w", l.db.Path(), err)
	}
	want := (used + int64(allocs)*reserveAlloc + 2*reserveSize - 1) / reserveSize * reserveSize
	if want <= l.reserved {
		return nil
	}
	f, err := os.OpenFile(l.db.Path(), os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("reserve space: %w", err)
	}
	defer f.Close()
	err = unix.Fallocate(int(f.Fd()), 0, 0, want)
	for errors.Is(err, unix.EINTR) {
		err = unix.Fallocate(int(f.Fd()), 0, 0, want)
	}
	unsupported := errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) // a later write may fail instead
	if err != nil && !unsupported {
		return taskdriver.Exhausted(fmt.Errorf("reserve space in %s: %w", l.db.Path(), err))
	}
	l.reserved = want
	return nil
}

// openLedger opens or creates the file. It fails if another agent has it open.
func openLedger(path string) (*ledger, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("make the agent's directory: %w", err)
	}
	db, err := openFile(path)
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return nil, registry.Errorf(registry.ErrConflict,
			"another agent uses this state directory: %s is locked; stop that agent, or use another --state-dir", path)
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrVersionMismatch),
		errors.Is(err, berrors.ErrChecksum):
		return nil, registry.Errorf(registry.ErrDamaged, "%w", err)
	case errors.Is(err, registry.ErrDamaged):
		return nil, err
	case err != nil:
		if _, named := errors.AsType[*os.PathError](err); named {
			return nil, err
		}
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	if err := createBuckets(db); err != nil {
		return nil, errors.Join(fmt.Errorf("prepare %s: %w", path, err), db.Close())
	}
	return &ledger{db: db}, nil
}

// openFile opens or creates the file. It refuses a truncated file. To find that out, it first opens the file read-only,
// because bbolt then reads only the first pages.
func openFile(path string) (db *bolt.DB, err error) {
	if info, err := os.Stat(path); err == nil && info.Size() > 0 {
		if err := readOnly(path, func(*ledger) error { return nil }); err != nil {
			return nil, err
		}
	}
	err = recoverDamage(func() (err error) {
		db, err = bolt.Open(path, 0o600, &bolt.Options{Timeout: lockTimeout})
		return err
	})
	return db, err
}

// lockTimeout bounds the wait for another process that has the file open.
const lockTimeout = 200 * time.Millisecond

// readOnly opens the file read-only, and calls fn unless the file is truncated.
func readOnly(path string, fn func(*ledger) error) error {
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true, Timeout: lockTimeout})
	if err != nil {
		return err
	}
	err = db.View(func(tx *bolt.Tx) error { return checkLength(path, tx.Size()) })
	if err == nil {
		err = fn(&ledger{db: db})
	}
	return errors.Join(err, db.Close())
}

// createBuckets creates missing buckets.
func createBuckets(db *bolt.DB) error {
	buckets := [][]byte{metaBucket, jobsBucket, allocsBucket, engineBucket}
	missing := false
	err := recoverDamage(func() error {
		return db.View(func(tx *bolt.Tx) error {
			missing = slices.ContainsFunc(buckets, func(name []byte) bool { return tx.Bucket(name) == nil })
			return nil
		})
	})
	if err != nil || !missing {
		return err // without a write, an agent also starts on a full disk
	}
	return db.Update(func(tx *bolt.Tx) error {
		for _, name := range buckets {
			if _, err := tx.CreateBucketIfNotExists(name); err != nil {
				return err
			}
		}
		return nil
	})
}

// checkLength fails if the file is shorter than its pages say. Reading past the end would kill the process.
func checkLength(path string, size int64) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Size() < size {
		return registry.Errorf(registry.ErrDamaged, "the file was truncated: it has %d of %d bytes", info.Size(), size)
	}
	return nil
}

// recoverDamage turns panics and memory faults that a damaged file causes in bbolt into errors.
func recoverDamage(do func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = registry.Errorf(registry.ErrDamaged, "%v", r)
		}
	}()
	return do()
}

// loadLedger opens and reads the agent's ledger. If Recover is set, it moves a damaged ledger away and creates a new
// one.
func (c *Config) loadLedger() (*ledger, ledgerContent, error) {
	path := ledgerPath(c.StateDir)
	l, err := openLedger(path)
	if err == nil {
		var content ledgerContent
		if content, err = l.load(); err == nil {
			return l, content, nil
		}
		err = errors.Join(err, l.close())
	}
	if !errors.Is(err, registry.ErrDamaged) {
		return nil, ledgerContent{}, err
	}
	if c.Recover == RecoverNone {
		return nil, ledgerContent{}, fmt.Errorf("%s is damaged: %w. Nothing was changed. "+
			"Its tasks may still run and use volumes. "+
			"Restore the file from a backup. Or rebuild the records from %s with holdfast agent --recover=adopt, "+
			"which adopts running tasks, or --recover=stop, which stops them in order. "+
			"Both keep the damaged file as agent.db.damaged-*",
			path, err, allocsDir(c.StateDir))
	}
	away := fmt.Sprintf("%s.damaged-%d", path, time.Now().UnixNano())
	c.Logger.Warn("moving a damaged file away", "path", path, "to", away, "error", err)
	if err := os.Rename(path, away); err != nil {
		return nil, ledgerContent{}, fmt.Errorf("move the damaged file away: %w", err)
	}
	return c.loadLedger()
}

func (l *ledger) close() error { return l.db.Close() }

// entry is a record to write. A nil value removes it.
type entry struct {
	bucket []byte
	key    string
	value  any
}

func (e entry) write(tx *bolt.Tx) error {
	if e.value == nil {
		return tx.Bucket(e.bucket).Delete([]byte(e.key))
	}
	text, err := json.Marshal(e.value)
	if err != nil {
		return err
	}
	return tx.Bucket(e.bucket).Put([]byte(e.key), text)
}

// write writes all entries in one transaction.
func (l *ledger) write(entries ...entry) error {
	err := l.db.Update(func(tx *bolt.Tx) error {
		if l.before != nil {
			if err := l.before(); err != nil {
				return err
			}
		}
		for _, e := range entries {
			if err := e.write(tx); err != nil {
				return fmt.Errorf("record %s: %w", e.key, err)
			}
		}
		return nil
	})
	if err != nil {
		return taskdriver.Exhausted(fmt.Errorf("write %s: %w", l.db.Path(), err))
	}
	return nil
}

// ledgerContent is all that a ledger has.
type ledgerContent struct {
	node   string // ID of the node; empty in a new ledger
	jobs   map[string]*JobRecord
	allocs map[host.AllocID]*AllocRecord
	mounts map[host.VolumeID]*EngineMount
}

// load reads all records. An unreadable record is an error, because otherwise the agent would forget its tasks.
func (l *ledger) load() (c ledgerContent, err error) {
	c.jobs, c.allocs = map[string]*JobRecord{}, map[host.AllocID]*AllocRecord{}
	c.mounts = map[host.VolumeID]*EngineMount{}
	err = recoverDamage(func() error {
		return l.db.View(func(tx *bolt.Tx) error {
			var err error
			if text := tx.Bucket(metaBucket).Get([]byte(nodeKey)); text != nil {
				err = decode([]byte(nodeKey), text, &c.node)
			}
			return errors.Join(err, loadBucket(tx, jobsBucket, c.jobs), loadBucket(tx, allocsBucket, c.allocs),
				loadBucket(tx, engineBucket, c.mounts))
		})
	})
	for _, r := range c.jobs {
		for ; r != nil; r = r.Next {
			r.digests = &sync.Map{}
		}
	}
	return c, err
}

// loadBucket adds the records of a bucket to a map.
func loadBucket[K ~string, R any](tx *bolt.Tx, name []byte, records map[K]*R) error {
	b := tx.Bucket(name)
	if b == nil {
		return nil // an older version has written the ledger, which is opened read-only here
	}
	return b.ForEach(func(k, v []byte) error {
		r := new(R)
		records[K(k)] = r
		return decode(k, v, r)
	})
}

func decode(k, v []byte, into any) error {
	if err := json.Unmarshal(v, into); err != nil {
		return registry.Errorf(registry.ErrDamaged, "record %s of agent.db: %w", k, err)
	}
	return nil
}

// ExamineLedger checks the ledger below a state directory while no agent runs. It changes nothing. A missing ledger is
// fine, because an agent may never have used the directory.
func ExamineLedger(state string) (found host.Finding, wrong bool) {
	found = host.Finding{
		Kind: registry.FoundDamage, Path: ledgerPath(state),
		Advice: "restore the file from a backup, or start the agent with --recover=adopt, " +
			"which rebuilds the records from " + allocsDir(state),
	}
	err := examineLedger(state)
	switch {
	case err == nil:
		return host.Finding{}, false
	case errors.Is(err, berrors.ErrTimeout):
		found.Kind, found.Advice = registry.FoundUnseen, "find out why the agent does not answer, then examine again"
		found.Detail = "the agent's records are locked: an agent runs but does not answer"
	case errors.Is(err, fs.ErrPermission):
		found.Kind, found.Advice = registry.FoundUnseen, "examine as the user who runs the agent"
		found.Detail = fmt.Sprintf("the agent's records cannot be read: %v", err)
	default:
		found.Detail = fmt.Sprintf("the agent's records are unusable, and no agent starts: %v", err)
	}
	return found, true
}

func examineLedger(state string) error {
	path := ledgerPath(state)
	info, err := os.Stat(path)
	missing := errors.Is(err, fs.ErrNotExist)
	if err != nil && !missing {
		return err
	}
	if missing || info.Size() == 0 {
		if allocs, _ := os.ReadDir(allocsDir(state)); len(allocs) > 0 {
			return fmt.Errorf("the file is gone or empty, but there are %d alloc directories", len(allocs))
		}
		return unknownTasks(state, nil)
	}
	return readOnly(path, func(l *ledger) error {
		content, err := l.load()
		if err != nil {
			return err
		}
		return unknownTasks(state, content.allocs)
	})
}

// unknownTasks returns an error that names running tasks of this state directory whose allocs have no record.
func unknownTasks(state string, allocs map[host.AllocID]*AllocRecord) error {
	parents, err := taskdriver.Parents(state)
	if err != nil {
		return fmt.Errorf("list running tasks: %w", err)
	}
	var unknown []string
	for _, p := range parents {
		if id, ours := allocOf(state, p); ours && allocs[id] == nil {
			unknown = append(unknown, fmt.Sprintf("%s (pid %d)", p.ID, p.PID))
		}
	}
	if len(unknown) > 0 {
		return fmt.Errorf("running tasks without a record: %s", strings.Join(unknown, ", "))
	}
	return nil
}
