package store

import (
	"bytes"
	"iter"

	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
)

// head holds two numbers of a transaction: seq is the last index, and events up to floor have been pruned.
type head struct{ seq, floor registry.Seq }

func readHead(tx *bolt.Tx) *head {
	var h head
	getMeta(tx, metaSeq, &h.seq)
	getMeta(tx, metaFloor, &h.floor)
	return &h
}

// reader reads within one transaction. A record that cannot be decoded panics with damage.
type reader struct {
	tx *bolt.Tx
	*head
	forms forms
}

var _ registry.Reader = reader{}

func (r reader) Index() registry.Seq { return r.seq }

func (r reader) Get(k registry.Key) registry.Record {
	path := []byte(k.Path)
	value := bucketOf(r.tx, string(k.Bucket)).Get(path)
	if value == nil {
		return nil
	}
	record, err := r.decode(k.Bucket, path, value)
	must(err)
	return record
}

// Text implements registry.Reader.
func (r reader) Text(record registry.Record) ([]byte, error) {
	k := record.Key()
	return mergedText(record, get(r.tx, string(k.Bucket), []byte(k.Path)))
}

// decode decodes a stored value. It first moves the fields to where this release has them (form).
func (r reader) decode(bucket registry.Bucket, path, value []byte) (record registry.Record, err error) {
	text, err := verifiedText(string(bucket), path, value)
	if err != nil {
		return nil, err
	}
	text, err = r.forms.fromStored(bucket, text)
	if err == nil {
		record, err = bucket.Type().Decode(text)
	}
	if err != nil {
		return nil, registry.Errorf(registry.ErrDamaged, "record %s %q cannot be decoded: %w", bucket, path, err)
	}
	return record, nil
}

func (r reader) Paths(b registry.Bucket, prefix string) iter.Seq[string] {
	return func(yield func(string) bool) {
		cursor := bucketOf(r.tx, string(b)).Cursor()
		for key, _ := cursor.Seek([]byte(prefix)); key != nil; key, _ = cursor.Next() {
			if !bytes.HasPrefix(key, []byte(prefix)) || !yield(string(key)) {
				return
			}
		}
	}
}

func (r reader) Events(after registry.Seq, limit int) (events []registry.Event, floor registry.Seq) {
	if after+1 == 0 { // after is the largest number, so no event follows
		return nil, r.floor
	}
	cursor := bucketOf(r.tx, bucketEvents).Cursor()
	for key, value := cursor.Seek(numberKey(after + 1)); key != nil && len(events) < limit; key, value = cursor.Next() {
		var e registry.Event
		must(decode(bucketEvents, key, value, &e))
		events = append(events, e)
	}
	return events, r.floor
}

func (r reader) Damaged(format string, args ...any) {
	panic(damage{registry.Errorf(registry.ErrDamaged, format, args...)})
}
