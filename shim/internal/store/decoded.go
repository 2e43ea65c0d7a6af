package store

import (
	"bytes"
	"errors"
	"reflect"
	"sync"

	"holdfast/registry"
)

// Decoded is what the records of a state decode to, so that a record is decoded once and not by each who reads it. A stored value is compared
// with the one that was decoded: no reader, of whatever transaction or copy of the file, is given what is not in it. What is given is shared:
// nobody may change it in place (registry.View). One Decoded may serve stores that follow each other.
type Decoded struct {
	mu      sync.RWMutex // guards what follows
	of      map[registry.Bucket]map[string]decoded
	deleted registry.Seq // index of the last change that deleted something: who reads an older state adds nothing
	// What migrations have made of stored values: the rehearsal on a copy does the work for the state itself.
	rewritten map[place]rewritten
}

// place is where a migration, by its name, rewrites something.
type place struct{ migration, bucket, key string }

// rewritten is a stored value, and the text that a migration has made of it.
type rewritten struct{ value, text []byte }

// decoded is a stored value, whose checksum was found right, and its record.
type decoded struct {
	value  []byte
	record any
}

// NewDecoded knows nothing yet.
func NewDecoded() *Decoded {
	return &Decoded{of: map[registry.Bucket]map[string]decoded{}, rewritten: map[place]rewritten{}}
}

// find is the record of a value, if it was decoded before.
func (d *Decoded) find(bucket registry.Bucket, path, value []byte) (record any, found bool) {
	d.mu.RLock()
	known, found := d.of[bucket][string(path)]
	d.mu.RUnlock()
	return known.record, found && bytes.Equal(known.value, value)
}

// add keeps a record that the state at an index has.
func (d *Decoded) add(at registry.Seq, bucket registry.Bucket, path, value []byte, record any) {
	value = bytes.Clone(value)
	d.mu.Lock()
	defer d.mu.Unlock()
	if at < d.deleted {
		return
	}
	if d.of[bucket] == nil {
		d.of[bucket] = map[string]decoded{}
	}
	d.of[bucket][string(path)] = decoded{value, record}
}

// forget drops what the changes up to an index have deleted.
func (d *Decoded) forget(at registry.Seq, deleted []registry.Key) {
	if len(deleted) == 0 {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.deleted = at
	for _, k := range deleted {
		delete(d.of[k.Bucket], k.Path)
	}
}

// rewrite is what a migration makes of a stored value: what it made of it before, or what change makes of it now.
func (d *Decoded) rewrite(at place, value []byte, change func() ([]byte, error)) ([]byte, error) {
	if d == nil {
		return change()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if known, found := d.rewritten[at]; found && bytes.Equal(known.value, value) {
		return known.text, nil
	}
	text, err := change()
	if err == nil {
		d.rewritten[at] = rewritten{bytes.Clone(value), text}
	}
	return text, err
}

// Migrated drops what only migrations need.
func (d *Decoded) Migrated() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.rewritten = map[place]rewritten{}
}

// Changed says which records were changed in place by somebody who was given them. For tests.
func (d *Decoded) Changed() error {
	d.mu.RLock()
	defer d.mu.RUnlock()
	var errs []error
	for bucket, records := range d.of {
		for path, known := range records {
			again := reflect.New(reflect.TypeOf(known.record))
			err := (view{forms: released.forms}).decode(registry.Key{Bucket: bucket, Path: path}, known.value[sumSize:], again.Interface())
			if err != nil || !reflect.DeepEqual(again.Elem().Interface(), known.record) {
				errs = append(errs, registry.Errorf(registry.ErrInternal, "record %s %q was changed in place: %+v", bucket, path, known.record))
			}
		}
	}
	return errors.Join(errs...)
}
