package store

import (
	"encoding/json"
	"errors"
	"slices"
	"time"

	"holdfast/registry"
)

// requestLimit is the number of answered operations that are kept for replays.
const requestLimit = 10_000

// batch is one transaction of the writer, which several commits share.
type batch struct {
	*transaction
	reader
	generation registry.Generation
	eventLimit int
	now        func() time.Time
	dirty      bool // a change was written
}

// draft is a change that was checked and encoded. After that, only an error of the file can prevent its write.
type draft struct {
	applied registry.Applied
	puts    []put
	events  []json.RawMessage
	grows   bool // the change adds something, rather than continuing or ending what exists
}

type put struct {
	key     registry.Key
	text    json.RawMessage
	entries []registry.Key // in the indexes
}

// draft checks and encodes a change. It writes nothing.
func (b *batch) draft(c registry.Change) (draft, error) {
	if err := c.Check(); err != nil {
		return draft{}, err
	}
	at := b.seq + 1
	d := draft{applied: registry.Applied{Index: at, Change: b.withTimes(c).Stamped(at, b.generation, b.created)}}
	for _, record := range d.applied.Change.Put {
		p, isNew, err := b.draftPut(record, c.Texts[record.Key()])
		if err != nil {
			return d, err
		}
		d.puts = append(d.puts, p)
		d.grows = d.grows || isNew && !p.key.Bucket.Type().Release
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
	created, _ := registry.IndexesOf(b.Get(k))
	return created
}

// draftPut drafts a record. other is the text that another node has written for it; nil: this node writes the record.
func (b *batch) draftPut(record registry.Record, other []byte) (p put, isNew bool, err error) {
	p = put{key: record.Key(), entries: registry.IndexKeys(record)}
	was := get(b.transaction.tx, string(p.key.Bucket), []byte(p.key.Path))
	if other == nil {
		other = was
	}
	text, err := mergedText(record, other)
	if err == nil {
		p.text, err = b.forms.toStored(p.key.Bucket, text)
	}
	if err != nil {
		return p, false, registry.Errorf(registry.ErrInternal, "encode %s %q: %w", p.key.Bucket, p.key.Path, err)
	}
	return p, was == nil, nil
}

// write writes a draft: puts, then deletes, then events. An error comes from bbolt, and ends the whole transaction.
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
	if err := b.updateIndexes(p.key, p.entries); err != nil {
		return err
	}
	return b.put(string(p.key.Bucket), []byte(p.key.Path), p.text)
}

func (b *batch) deleteRecord(key registry.Key) error {
	if err := b.updateIndexes(key, nil); err != nil {
		return err
	}
	return b.delete(string(key.Bucket), []byte(key.Path))
}

// updateIndexes replaces the index entries of a record. It does not write an entry that stays.
func (b *batch) updateIndexes(k registry.Key, entries []registry.Key) error {
	if len(k.Bucket.Type().Indexes) == 0 {
		return nil
	}
	old := registry.IndexKeys(b.Get(k))
	for _, e := range old {
		if slices.Contains(entries, e) {
			continue
		}
		if err := b.delete(string(e.Bucket), []byte(e.Path)); err != nil {
			return err
		}
	}
	for _, e := range entries {
		if slices.Contains(old, e) {
			continue
		}
		if err := b.put(string(e.Bucket), []byte(e.Path), indexText); err != nil {
			return err
		}
	}
	return nil
}

// indexText is the stored text of each index entry.
var indexText = []byte("{}")

// finish prunes events and requests, and writes the index and the tallies.
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
	ages := bucketOf(b.transaction.tx, string(registry.RequestsByIndex))
	for b.tally(string(registry.BucketRequests)).Records > requestLimit {
		key, _ := ages.Cursor().First()
		if len(key) < len(numberKey(0)) {
			return registry.Errorf(registry.ErrDamaged, "%s has fewer entries than there are requests",
				registry.RequestsByIndex)
		}
		path := string(key[len(numberKey(0)):])
		if err := b.deleteRecord(registry.Key{Bucket: registry.BucketRequests, Path: path}); err != nil {
			return err
		}
	}
	return nil
}
