package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"holdfast/host"
	"holdfast/registry"
)

var (
	metaBucket   = []byte("meta")
	jobsBucket   = []byte("jobs")
	allocsBucket = []byte("allocs")
)

// ledger is the agent's memory: one record per job and alloc, each replaced as a whole in one transaction.
type ledger struct{ db *bolt.DB }

// openLedger makes the file if there is none. A second agent of the same state directory is refused.
func openLedger(path string) (*ledger, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("make the agent's directory: %w", err)
	}
	db, err := bolt.Open(path, 0o600, &bolt.Options{Timeout: 200 * time.Millisecond})
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return nil, registry.Errorf(registry.ErrConflict, "another agent uses this state directory: %s is locked; end it, or choose another --state-dir", path)
	case err != nil:
		return nil, registry.Errorf(registry.ErrDamaged, "open %s: %w; move it away to begin without what it knew", path, err)
	}
	err = db.Update(func(tx *bolt.Tx) error {
		for _, name := range [][]byte{metaBucket, jobsBucket, allocsBucket} {
			if _, err := tx.CreateBucketIfNotExists(name); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("prepare %s: %w", path, err), db.Close())
	}
	return &ledger{db}, nil
}

func (l *ledger) close() error { return l.db.Close() }

func (l *ledger) put(bucket []byte, key string, v any) error {
	b, err := encode(v)
	if err != nil {
		return fmt.Errorf("record %s: %w", key, err)
	}
	err = l.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(bucket).Put([]byte(key), b) })
	if err != nil {
		return fmt.Errorf("write record %s: %w", key, err)
	}
	return nil
}

func (l *ledger) remove(bucket []byte, key string) error {
	err := l.db.Update(func(tx *bolt.Tx) error { return tx.Bucket(bucket).Delete([]byte(key)) })
	if err != nil {
		return fmt.Errorf("remove record %s: %w", key, err)
	}
	return nil
}

// load reads all. A record that cannot be read is an error: to forget an alloc would be to leave its tasks behind.
func (l *ledger) load() (map[string]*JobRecord, map[host.AllocID]*AllocRecord, error) {
	jobs, allocs := map[string]*JobRecord{}, map[host.AllocID]*AllocRecord{}
	err := l.db.View(func(tx *bolt.Tx) error {
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
	err := l.db.Update(func(tx *bolt.Tx) error {
		b := tx.Bucket(metaBucket)
		if value = string(b.Get([]byte(name))); value != "" {
			return nil
		}
		value = mint()
		return b.Put([]byte(name), []byte(value))
	})
	if err != nil {
		return "", fmt.Errorf("read %s: %w", name, err)
	}
	return value, nil
}
