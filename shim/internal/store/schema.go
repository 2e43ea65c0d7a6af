package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"holdfast/registry"
)

// Oldest is the oldest schema that this build opens. Newest is the one that it writes. The build also opens a newer
// file if the file's window allows that.
const Oldest = 1

const application = "holdfast"

const (
	bucketMeta   = "meta"
	bucketEvents = "events"
)

const (
	metaApplication = "application"
	metaSchema      = "schema"
	metaGeneration  = "generation"
	metaBoot        = "boot"
	metaSeq         = "seq"
	metaFloor       = "floor"
	metaTally       = "tally:"
)

// buckets returns the names of all buckets but bucketMeta, which has a tally of each.
func buckets() []string {
	names := []string{bucketEvents}
	for _, x := range registry.Indexes {
		names = append(names, string(x.Bucket))
	}
	for _, b := range registry.Buckets {
		names = append(names, string(b))
	}
	return names
}

// window is the schema entry of a file. A build with an older schema can open the file if that schema is at least
// Readable, so that a swap can be rolled back. That build sets Number to its own schema, and the newer build then
// migrates again.
type window struct {
	Number   int `json:"number"`
	Readable int `json:"readable"`
}

// migration brings a file from one schema number to the next. It must be able to run again on a file that it has
// migrated.
type migration struct {
	name string
	run  func(*transaction) error
}

// schema says which schemas a build opens, and how it reads and writes records. The build opens the schemas from oldest
// to newest, and a newer file whose window has a Readable of at most newest. migrations[i] leads from oldest+i to
// oldest+i+1.
type schema struct {
	oldest, newest int
	readable       int // the oldest schema whose builds can read a file of schema newest
	migrations     []migration
	forms          forms
}

// accepts returns an error if this build cannot read a file with the window.
func (s schema) accepts(path string, w window) error {
	switch {
	case w.Readable > s.newest:
		return registry.Errorf(registry.ErrUnsupported,
			"%s has schema %d, which only shims of schema %d or newer can read; this shim knows %d to %d: use a "+
				"newer shim", path, w.Number, w.Readable, s.oldest, s.newest)
	case w.Number < s.oldest:
		return registry.Errorf(registry.ErrUnsupported,
			"%s has schema %d; this shim knows %d to %d: open it once with a shim that knows both",
			path, w.Number, s.oldest, s.newest)
	}
	return nil
}

// isCurrent reports whether a file with this window needs no migration.
func (s schema) isCurrent(w window) bool { return w.Number == s.newest }

// migrate brings a file with the window w to schema newest within the transaction t. It migrates nothing in a file of a
// newer schema, and only lowers the file's schema number: see window.
func (s schema) migrate(t *transaction, w window) error {
	for number := w.Number; number < s.newest; number++ {
		m := s.migrations[number-s.oldest]
		if err := m.run(t); err != nil {
			return fmt.Errorf("migrate to schema %d (%s): %w", number+1, m.name, err)
		}
	}
	if s.isCurrent(w) {
		return nil
	}
	return t.setMeta(metaSchema, s.migratedWindow(w))
}

// migratedWindow returns the window of a file after its migration.
func (s schema) migratedWindow(w window) window {
	if s.isCurrent(w) {
		return w
	}
	return window{s.newest, s.readable}
}

// createBuckets creates the buckets and meta entries of an empty file.
func (s schema) createBuckets(t *transaction) error {
	if _, err := t.tx.CreateBucketIfNotExists([]byte(bucketMeta)); err != nil {
		return err
	}
	for _, name := range slices.Sorted(slices.Values(buckets())) {
		if err := t.create(name); err != nil {
			return err
		}
	}
	return errors.Join(
		t.setMeta(metaApplication, application),
		t.setMeta(metaSchema, window{s.newest, s.readable}),
		t.setMeta(metaGeneration, registry.Generation(0)),
		t.setMeta(metaBoot, ""),
		t.setMeta(metaSeq, registry.Seq(0)),
		t.setMeta(metaFloor, registry.Seq(0)),
		t.writeTallies(),
	)
}

// fields holds the fields of a record by name.
type fields = map[string]json.RawMessage

// form describes how the records of a bucket differ between the file and package registry, because a release has moved
// fields. Both functions change the fields of one record and keep unknown ones.
type form struct {
	// write copies moved fields to their new place. They stay at the old place while an older build may read the file.
	write func(fields) error
	// read moves the fields to their place in package registry. If a field is at both places, the new one counts.
	read func(fields) error
}

// forms has the forms of a schema. A bucket without a form stores its records as package registry has them.
type forms map[registry.Bucket]form

// toStored returns the text to store for a record that is encoded as package registry has it.
func (f forms) toStored(bucket registry.Bucket, text json.RawMessage) (json.RawMessage, error) {
	return changeFields(text, f[bucket].write)
}

// fromStored is the inverse of toStored.
func (f forms) fromStored(bucket registry.Bucket, text json.RawMessage) (json.RawMessage, error) {
	return changeFields(text, f[bucket].read)
}

// changeFields applies change to the fields in a record's text; nil: the text stays.
func changeFields(text json.RawMessage, change func(fields) error) (json.RawMessage, error) {
	if change == nil {
		return text, nil
	}
	var record fields
	if err := json.Unmarshal(text, &record); err != nil {
		return nil, err
	}
	if err := change(record); err != nil {
		return nil, err
	}
	return encode(record), nil
}

// intoForm returns the migration that brings the records of a bucket into a form. When it runs again, it changes only
// records that an older build, which knows only the old place, has rewritten meanwhile.
func intoForm(name string, bucket registry.Bucket, f form) migration {
	return migration{name, func(t *transaction) error { return t.rewrite(string(bucket), f.write) }}
}
