package store

import (
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"time"

	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
)

// requestLimit is the number of answered operations that are kept for replays.
const requestLimit = 10_000

// batch is one transaction of the writer, which several commits share.
type batch struct {
	*transaction
	view
	generation registry.Generation
	eventLimit int
	now        func() time.Time
	dirty      bool
}

// draft is a change that was checked and encoded. Writing it fails only for a reason of the file.
type draft struct {
	applied registry.Applied
	puts    []put
	events  []json.RawMessage
	grows   bool // it adds something, rather than continue or wind down what exists
}

// windDownBuckets are the buckets to which winding down adds records as well.
var windDownBuckets = []registry.Bucket{registry.BucketIntents, registry.BucketNodeIntents, registry.BucketRequests}

type put struct {
	key     registry.Key
	text    json.RawMessage
	entries []entry
}

// draft checks and encodes a change. It writes nothing.
func (b *batch) draft(c registry.Change) (draft, error) {
	if err := checkKeys(c); err != nil {
		return draft{}, err
	}
	at := b.seq + 1
	d := draft{applied: registry.Applied{Index: at, Change: b.withTimes(c).Stamped(at, b.generation, b.created)}}
	for _, record := range d.applied.Change.Put {
		p, isNew, err := b.draftPut(record)
		if err != nil {
			return d, err
		}
		d.puts = append(d.puts, p)
		d.grows = d.grows || isNew && !slices.Contains(windDownBuckets, p.key.Bucket)
	}
	for _, event := range d.applied.Change.Events {
		text, err := json.Marshal(event)
		if err != nil {
			return d, registry.Errorf(registry.ErrInternal, "encode event %s: %w", event, err)
		}
		d.events = append(d.events, text)
	}
	return d, nil
}

// withTimes sets the time of events that have none.
func (b *batch) withTimes(c registry.Change) registry.Change {
	c.Events = slices.Clone(c.Events)
	for i := range c.Events {
		if c.Events[i].At.IsZero() {
			c.Events[i].At = b.now()
		}
	}
	return c
}

// created returns the create index of the record at k, or 0 if there is none.
func (b *batch) created(k registry.Key) registry.Seq {
	old, found := anyOf[k.Bucket](b.view, k)
	if !found {
		return 0
	}
	created, _ := old.Indexes()
	return created
}

func (b *batch) draftPut(record registry.Record) (p put, isNew bool, err error) {
	p = put{key: record.Key(), entries: listEntries(record)}
	for _, e := range p.entries {
		if len(e.key) > bolt.MaxKeySize {
			return p, false, registry.Errorf(registry.ErrInternal,
				"%s %.200q is too long for %s", p.key.Bucket, p.key.Path, e.list)
		}
	}
	text, err := json.Marshal(record)
	if err != nil {
		return p, false, registry.Errorf(registry.ErrInternal, "encode %s %q: %w", p.key.Bucket, p.key.Path, err)
	}
	was := get(b.transaction.tx, string(p.key.Bucket), []byte(p.key.Path))
	p.text, err = b.forms.written(p.key.Bucket, merge(shapeOf(reflect.TypeOf(record)), was, text))
	if err != nil {
		return p, false, registry.Errorf(registry.ErrInternal, "encode %s %q: %w", p.key.Bucket, p.key.Path, err)
	}
	return p, was == nil, nil
}

// checkKeys returns an error if no record can have one of the keys.
func checkKeys(c registry.Change) error {
	for _, record := range c.Put {
		if err := checkKey(record.Key()); err != nil {
			return err
		}
	}
	for _, key := range c.Delete {
		if err := checkKey(key); err != nil {
			return err
		}
	}
	return nil
}

func checkKey(k registry.Key) error {
	for _, known := range registry.Buckets {
		if k.Bucket == known && k.Path != "" && len(k.Path) <= bolt.MaxKeySize {
			return nil
		}
	}
	return registry.Errorf(registry.ErrInternal, "no record can have the key %s %.200q", k.Bucket, k.Path)
}

// write writes a draft: puts, then deletes, then events. Its errors are bbolt's, and end the whole transaction.
func (b *batch) write(d draft) error {
	b.dirty = true
	for _, p := range d.puts {
		if err := b.putRecord(p); err != nil {
			return err
		}
	}
	for _, key := range d.applied.Change.Delete {
		if err := b.deleteRecord(key); err != nil {
			return err
		}
	}
	for i, text := range d.events {
		if err := b.put(bucketEvents, numberKey(d.applied.Index+registry.Seq(i)), text); err != nil {
			return err
		}
	}
	b.seq = d.applied.Last()
	return nil
}

func (b *batch) putRecord(p put) error {
	if err := b.updateLists(p.key, p.entries); err != nil {
		return err
	}
	return b.put(string(p.key.Bucket), []byte(p.key.Path), p.text)
}

func (b *batch) deleteRecord(key registry.Key) error {
	if err := b.updateLists(key, nil); err != nil {
		return err
	}
	return b.delete(string(key.Bucket), []byte(key.Path))
}

// updateLists makes the derived lists have these entries of a record and no others. An entry that stays is not written.
func (b *batch) updateLists(k registry.Key, entries []entry) error {
	if k.Bucket != registry.BucketRequests && !slices.Contains(volumeBuckets, k.Bucket) {
		return nil
	}
	var old []entry
	if record, found := anyOf[k.Bucket](b.view, k); found {
		old = listEntries(record)
	}
	for _, e := range old {
		if slices.Contains(entries, e) {
			continue
		}
		if err := b.delete(e.list, []byte(e.key)); err != nil {
			return err
		}
	}
	for _, e := range entries {
		if slices.Contains(old, e) {
			continue
		}
		if err := b.put(e.list, []byte(e.key), listed); err != nil {
			return err
		}
	}
	return nil
}

// finish prunes, and writes the index and the tallies.
func (b *batch) finish() error {
	if err := b.pruneEvents(); err != nil {
		return err
	}
	if err := b.pruneRequests(); err != nil {
		return err
	}
	return errors.Join(b.setMeta(metaSeq, b.seq), b.writeTallies())
}

func (b *batch) pruneEvents() error {
	events := bucketOf(b.transaction.tx, bucketEvents)
	for b.tally(bucketEvents).Records > uint64(b.eventLimit) {
		key, value := events.Cursor().First()
		var event struct {
			Seq registry.Seq `json:"seq"`
		}
		must(decode(bucketEvents, key, value, &event))
		b.floor = event.Seq
		if err := b.delete(bucketEvents, numberKey(event.Seq)); err != nil {
			return err
		}
	}
	return b.setMeta(metaFloor, b.floor)
}

func (b *batch) pruneRequests() error {
	ages := bucketOf(b.transaction.tx, bucketRequestAge)
	for b.tally(string(registry.BucketRequests)).Records > requestLimit {
		key, _ := ages.Cursor().First()
		if len(key) < len(numberKey(0)) {
			return registry.Errorf(registry.ErrDamaged, "%s has fewer entries than there are requests",
				bucketRequestAge)
		}
		path := string(key[len(numberKey(0)):])
		if err := b.deleteRecord(registry.Key{Bucket: registry.BucketRequests, Path: path}); err != nil {
			return err
		}
	}
	return nil
}

// entry is a key in a derived list.
type entry struct{ list, key string }

// listed is the text of each entry.
var listed = []byte("{}")

// listEntries returns the entries of a record in derived lists.
func listEntries(record registry.Record) (entries []entry) {
	path := record.Key().Path
	switch r := record.(type) {
	case registry.Volume:
		if r.External != "" { // else its plugin has not named it yet
			entries = append(entries, entry{bucketVolumeKeys, registry.PathOf(r.Plugin, string(r.External)) + path})
		}
		if r.Created {
			entries = append(entries, entry{bucketVolumeNames, string(nameListKey(r.Plugin, r.Name, path))})
		}
	case registry.Operation:
		entries = append(entries, entry{bucketRequestAge, string(numberKey(r.CreateIndex)) + path})
	}
	return entries
}

// nameListKey returns the key in volumes_by_name of the volume at a path. Of a name longer than CSI allows ("Size
// Limits") it has the beginning, so a reader compares the whole name.
func nameListKey(plugin registry.PluginID, name, path string) []byte {
	return []byte(registry.PathOf(plugin, name[:min(len(name), registry.MaxID)]) + path)
}
