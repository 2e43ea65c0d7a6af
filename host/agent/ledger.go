package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
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
)

// ledger is the agent's memory: one record per job and alloc, each replaced as a whole in one transaction.
type ledger struct {
	db       *bolt.DB
	reserved int64        // bytes from the file's start that are known to be allocated
	before   func() error // of tests: called before each transaction
}

// reserveSize is what stays allocated beyond the pages in use, so that what runs can be stopped and released on a full disk. reserveAlloc is
// what the record of one alloc may need for that.
const (
	reserveSize  = 1 << 20
	reserveAlloc = 8 << 10
)

// reserve allocates room for the pages in use and for what so many allocs may still have to record. It is asked before anything new.
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
		return fmt.Errorf("reserve room: %w", err)
	}
	defer f.Close()
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Fallocate(int(f.Fd()), 0, 0, want)
	}
	switch {
	case errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS): // the write itself will say
	case err != nil:
		return full(fmt.Errorf("reserve room in %s: %w", l.db.Path(), err))
	}
	l.reserved = want
	return nil
}

// full makes the error of a disk without room registry.ErrExhausted.
func full(err error) error {
	if taskdriver.OutOfSpace(err) && !errors.Is(err, registry.ErrExhausted) {
		return registry.Errorf(registry.ErrExhausted, "%w", err)
	}
	return err
}

// openLedger makes the file if there is none. A second agent of the same state directory is refused.
func openLedger(path string) (*ledger, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("make the agent's directory: %w", err)
	}
	db, err := openFile(path)
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return nil, registry.Errorf(registry.ErrConflict, "another agent uses this state directory: %s is locked; end it, or choose another --state-dir", path)
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrVersionMismatch),
		errors.Is(err, berrors.ErrChecksum):
		return nil, registry.Errorf(registry.ErrDamaged, "%w", err)
	case errors.Is(err, registry.ErrDamaged):
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	if err := prepare(db); err != nil {
		return nil, errors.Join(fmt.Errorf("prepare %s: %w", path, err), db.Close())
	}
	return &ledger{db: db}, nil
}

// openFile opens a file that is not truncated. It opens it for reading first: there bbolt touches nothing but its first pages.
func openFile(path string) (db *bolt.DB, err error) {
	options := &bolt.Options{Timeout: 200 * time.Millisecond}
	if info, err := os.Stat(path); err == nil && info.Size() > 0 {
		look := *options
		look.ReadOnly = true
		db, err := bolt.Open(path, 0o600, &look)
		if err == nil {
			err = errors.Join(db.View(func(tx *bolt.Tx) error { return whole(path, tx.Size()) }), db.Close())
		}
		if err != nil {
			return nil, err
		}
	}
	err = reading(func() (err error) {
		db, err = bolt.Open(path, 0o600, options)
		return err
	})
	return db, err
}

// prepare makes the buckets if they are missing.
func prepare(db *bolt.DB) error {
	buckets, missing := [][]byte{metaBucket, jobsBucket, allocsBucket}, false
	err := reading(func() error {
		return db.View(func(tx *bolt.Tx) error {
			for _, name := range buckets {
				missing = missing || tx.Bucket(name) == nil
			}
			return nil
		})
	})
	if err != nil || !missing {
		return err
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

// whole refuses a file that is shorter than its own pages say: to read past its end would kill the process.
func whole(path string, size int64) error {
	info, err := os.Stat(path)
	if err == nil && info.Size() < size {
		err = registry.Errorf(registry.ErrDamaged, "it has %d bytes, %d are needed: it was truncated", info.Size(), size)
	}
	return err
}

// reading turns what bbolt does on a damaged file, a panic or a fault of the mapped file, into an error.
func reading(do func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = registry.Errorf(registry.ErrDamaged, "%v", r)
		}
	}()
	return do()
}

// openLedger opens the agent's ledger. A damaged one is left as it is, or moved away if its records are to be recovered.
func (c *Config) openLedger() (*ledger, error) {
	path := filepath.Join(c.StateDir, "agent", "agent.db")
	l, err := openLedger(path)
	if err == nil {
		if _, _, err = l.load(); err == nil {
			return l, nil
		}
		err = errors.Join(err, l.close())
	}
	if !errors.Is(err, registry.ErrDamaged) {
		return nil, err
	}
	if c.Recover == RecoverNone {
		return nil, fmt.Errorf("%s is damaged: %w. Nothing was changed in it. "+
			"Tasks that it knows may still run and use their volumes. Put a good copy in its place. "+
			"Or have the records made again from %s, which keeps the damaged file as agent.db.damaged-*: "+
			"holdfast agent --recover=adopt goes on with what runs, --recover=stop stops it in order",
			path, err, filepath.Join(c.StateDir, "agent", "allocs"))
	}
	away := fmt.Sprintf("%s.damaged-%d", path, time.Now().UnixNano())
	c.Logger.Warn("a damaged file is moved away", "path", path, "to", away, "error", err)
	if err := os.Rename(path, away); err != nil {
		return nil, fmt.Errorf("move the damaged file away: %w", err)
	}
	return openLedger(path)
}

func (l *ledger) close() error { return l.db.Close() }

// entry is a record to be written; one without a value is removed.
type entry struct {
	bucket []byte
	key    string
	value  any
}

// write writes all entries in one transaction.
func (l *ledger) write(entries ...entry) error {
	texts := make([][]byte, len(entries))
	for i, e := range entries {
		var err error
		if e.value == nil {
			continue
		}
		if texts[i], err = encode(e.value); err != nil {
			return fmt.Errorf("record %s: %w", e.key, err)
		}
	}
	err := l.db.Update(func(tx *bolt.Tx) error {
		if l.before != nil {
			if err := l.before(); err != nil {
				return err
			}
		}
		for i, e := range entries {
			b, err := tx.Bucket(e.bucket), error(nil)
			if texts[i] == nil {
				err = b.Delete([]byte(e.key))
			} else {
				err = b.Put([]byte(e.key), texts[i])
			}
			if err != nil {
				return fmt.Errorf("record %s: %w", e.key, err)
			}
		}
		return nil
	})
	if err != nil {
		return full(fmt.Errorf("write %s: %w", l.db.Path(), err))
	}
	return nil
}

// load reads all. A record that cannot be read is an error: to forget an alloc would be to leave its tasks behind.
func (l *ledger) load() (map[string]*JobRecord, map[host.AllocID]*AllocRecord, error) {
	jobs, allocs := map[string]*JobRecord{}, map[host.AllocID]*AllocRecord{}
	err := reading(func() error {
		return l.db.View(func(tx *bolt.Tx) error {
			err := tx.Bucket(jobsBucket).ForEach(func(k, v []byte) error {
				r := &JobRecord{}
				jobs[string(k)] = r
				return decode(k, v, r)
			})
			if err != nil {
				return err
			}
			return tx.Bucket(allocsBucket).ForEach(func(k, v []byte) error {
				r := &AllocRecord{}
				allocs[host.AllocID(k)] = r
				return decode(k, v, r)
			})
		})
	})
	return jobs, allocs, err
}

func decode(k, v []byte, into any) error {
	if err := json.Unmarshal(v, into); err != nil {
		return registry.Errorf(registry.ErrDamaged, "record %s of %s: %w", k, "agent.db", err)
	}
	return nil
}

// text reads or, if there is none, makes a value that lives as long as the state directory.
func (l *ledger) text(name string, mint func() string) (string, error) {
	var value string
	err := l.db.View(func(tx *bolt.Tx) error {
		value = string(tx.Bucket(metaBucket).Get([]byte(name)))
		return nil
	})
	if err == nil && value != "" {
		return value, nil
	}
	err = l.db.Update(func(tx *bolt.Tx) error {
		value = mint()
		return tx.Bucket(metaBucket).Put([]byte(name), []byte(value))
	})
	if err != nil {
		return "", fmt.Errorf("read %s: %w", name, err)
	}
	return value, nil
}

// putText replaces such a value.
func (l *ledger) putText(name, value string) error {
	err := l.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(metaBucket).Put([]byte(name), []byte(value)) })
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}
