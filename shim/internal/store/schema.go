package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"holdfast/registry"
)

// Oldest and Newest bound the schema numbers that this build opens. It writes Newest.
const Oldest = 1

const application = "holdfast"

const (
	bucketMeta   = "meta"
	bucketEvents = "events"
	// The lists below are derived from records and written with them.
	bucketVolumeKeys  = "volumes_by_key"    // plugin, external id, namespace, id: finds a volume by its key
	bucketVolumeNames = "volumes_by_name"   // plugin, name, namespace, id: finds those that were created under a name
	bucketRequestAge  = "requests_by_index" // create index, path: finds the oldest
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

// buckets are those that carry a tally.
func buckets() []string {
	names := []string{bucketEvents, bucketVolumeKeys, bucketVolumeNames, bucketRequestAge}
	for _, b := range registry.Buckets {
		names = append(names, string(b))
	}
	return names
}

// window is the schema entry of a file. A build of an older schema may open the file if it is not older than Readable, so that
// a swap can be undone; it then takes Number down to its own, and the newer build migrates again.
type window struct {
	Number   int `json:"number"`
	Readable int `json:"readable"`
}

// migration brings a file from one schema number to the next. It has to be one that can run again over its own result.
type migration struct {
	name string
	run  func(*transaction) error
}

// schema is what a build can open: migrations[i] leads from oldest+i to oldest+i+1.
type schema struct {
	oldest, newest int
	readable       int // the oldest build that can read what newest writes
	migrations     []migration
	forms          forms
}

// accepts refuses what this build cannot read, before anything is written.
func (s schema) accepts(path string, w window) error {
	switch {
	case w.Readable > s.newest:
		return registry.Errorf(registry.ErrUnsupported,
			"%s has schema %d, and only shims of schema %d or newer can read it; this shim knows %d to %d: use a newer shim",
			path, w.Number, w.Readable, s.oldest, s.newest)
	case w.Number < s.oldest:
		return registry.Errorf(registry.ErrUnsupported,
			"%s has schema %d; this shim knows %d to %d: open it once with a shim that knows both", path, w.Number, s.oldest, s.newest)
	}
	return nil
}

// settled says whether a file of this window needs no migration.
func (s schema) settled(w window) bool { return w.Number == s.newest }

// migrate brings the file to the newest schema, within the transaction.
func (s schema) migrate(t *transaction, w window) error {
	for number := w.Number; number < s.newest; number++ {
		m := s.migrations[number-s.oldest]
		if err := m.run(t); err != nil {
			return fmt.Errorf("migrate to schema %d (%s): %w", number+1, m.name, err)
		}
	}
	if s.settled(w) {
		return nil
	}
	return t.setMeta(metaSchema, s.leaves(w))
}

// leaves is the window of a file once it is migrated.
func (s schema) leaves(w window) window {
	if s.settled(w) {
		return w
	}
	return window{s.newest, s.readable}
}

// lay makes an empty file's buckets and entries.
func (s schema) lay(t *transaction) error {
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

// fields is what a record holds, by name.
type fields = map[string]json.RawMessage

// form is how the records of a bucket lie in the file, where that is not how package registry has them: something of them has moved. Both
// functions change the fields of one record, and leave alone what they do not know.
type form struct {
	// write puts what has moved at its new place. While an older build may read the file it stays at its old place as well.
	write func(fields) error
	// read puts it where package registry has it: the new place counts.
	read func(fields) error
}

// forms are those of a schema. A bucket without one holds what package registry has.
type forms map[registry.Bucket]form

func (f forms) written(bucket registry.Bucket, text json.RawMessage) (json.RawMessage, error) {
	return reshaped(text, f[bucket].write)
}

func (f forms) read(bucket registry.Bucket, text json.RawMessage) (json.RawMessage, error) {
	return reshaped(text, f[bucket].read)
}

func reshaped(text json.RawMessage, change func(fields) error) (json.RawMessage, error) {
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

// intoForm is the migration that brings the records of a bucket into a form. Over its own result it changes nothing but what an older build
// has rewritten since: that one knows the old place only.
func intoForm(name string, bucket registry.Bucket, f form) migration {
	return migration{name, func(t *transaction) error { return t.rewrite(string(bucket), f.write) }}
}
