package store

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"hash/crc32"

	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
)

// damage is the value of the panic when a record cannot be decoded. Commit and View recover from it.
type damage struct{ err error }

// must panics with damage if err is not nil.
func must(err error) {
	if err != nil {
		panic(damage{err})
	}
}

// transaction is a bbolt transaction that adds checksums to values and updates tallies.
type transaction struct {
	tx      *bolt.Tx
	tallies map[string]*tally // of the buckets that were written to
}

func newTransaction(tx *bolt.Tx) *transaction {
	return &transaction{tx: tx, tallies: map[string]*tally{}}
}

func bucketOf(tx *bolt.Tx, name string) *bolt.Bucket {
	b := tx.Bucket([]byte(name))
	if b == nil {
		panic(damage{registry.Errorf(registry.ErrDamaged, "bucket %s is missing", name)})
	}
	return b
}

// get returns the text of a record, valid within the transaction, or nil if there is none.
func get(tx *bolt.Tx, bucket string, key []byte) []byte {
	value := bucketOf(tx, bucket).Get(key)
	if value == nil {
		return nil
	}
	text, err := verifiedText(bucket, key, value)
	must(err)
	return text
}

func (t *transaction) put(bucket string, key, text []byte) error {
	b, sum := bucketOf(t.tx, bucket), t.tally(bucket)
	if old := b.Get(key); old != nil {
		sum.remove(old)
	}
	value := withChecksum(bucket, key, text)
	sum.add(value)
	return b.Put(key, value)
}

func (t *transaction) delete(bucket string, key []byte) error {
	b := bucketOf(t.tx, bucket)
	old := b.Get(key)
	if old == nil {
		return nil
	}
	t.tally(bucket).remove(old)
	return b.Delete(key)
}

// create creates a bucket unless it exists.
func (t *transaction) create(bucket string) error {
	if t.tx.Bucket([]byte(bucket)) != nil {
		return nil
	}
	if _, err := t.tx.CreateBucket([]byte(bucket)); err != nil {
		return err
	}
	t.tallies[bucket] = &tally{}
	return nil
}

func (t *transaction) tally(bucket string) *tally {
	sum := t.tallies[bucket]
	if sum == nil {
		sum = &tally{}
		getMeta(t.tx, metaTally+bucket, sum)
		t.tallies[bucket] = sum
	}
	return sum
}

// writeTallies stores the tallies. It is the last write of a transaction.
func (t *transaction) writeTallies() error {
	for bucket, sum := range t.tallies {
		if err := t.setMeta(metaTally+bucket, sum); err != nil {
			return err
		}
	}
	return nil
}

// getMeta reads a meta entry. A missing one is damage.
func getMeta(tx *bolt.Tx, name string, into any) {
	must(decodeMeta(bucketOf(tx, bucketMeta), name, into))
}

func decodeMeta(meta *bolt.Bucket, name string, into any) error {
	value := meta.Get([]byte(name))
	if value == nil {
		return registry.Errorf(registry.ErrDamaged, "meta entry %s is missing", name)
	}
	return decode(bucketMeta, []byte(name), value, into)
}

func (t *transaction) setMeta(name string, v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return bucketOf(t.tx, bucketMeta).Put([]byte(name), withChecksum(bucketMeta, []byte(name), text))
}

// rewrite applies change to the fields of each record of a bucket. Migrations use it.
func (t *transaction) rewrite(bucket string, change func(fields) error) error {
	texts := map[string][]byte{}
	err := bucketOf(t.tx, bucket).ForEach(func(key, value []byte) error {
		var record fields
		if err := decode(bucket, key, value, &record); err != nil {
			return err
		}
		if err := change(record); err != nil {
			return err
		}
		if text := encode(record); !bytes.Equal(text, value[sumSize:]) {
			texts[string(key)] = text
		}
		return nil
	})
	if err != nil {
		return err
	}
	for key, text := range texts {
		if err := t.put(bucket, []byte(key), text); err != nil {
			return err
		}
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

const sumSize = 4

// checksum also covers the bucket and the key, so a record is valid only where it was put.
func checksum(bucket string, key, text []byte) uint32 {
	sum := crc32.Update(0, castagnoli, []byte(bucket))
	sum = crc32.Update(sum, castagnoli, []byte{0, byte(len(key) >> 8), byte(len(key))})
	sum = crc32.Update(sum, castagnoli, key)
	return crc32.Update(sum, castagnoli, text)
}

// withChecksum returns the stored value of a text: its checksum and the text.
func withChecksum(bucket string, key, text []byte) []byte {
	value := binary.BigEndian.AppendUint32(make([]byte, 0, sumSize+len(text)), checksum(bucket, key, text))
	return append(value, text...)
}

// verifiedText returns the text in a stored value, without copying it. It fails if the checksum is wrong.
func verifiedText(bucket string, key, value []byte) ([]byte, error) {
	if len(value) < sumSize || checksumIn(value) != checksum(bucket, key, value[sumSize:]) {
		return nil, registry.Errorf(registry.ErrDamaged, "record %s %q fails its checksum", bucket, key)
	}
	return value[sumSize:], nil
}

// checksumIn returns the checksum in a stored value.
func checksumIn(value []byte) uint32 { return binary.BigEndian.Uint32(value) }

func decode(bucket string, key, value []byte, into any) error {
	text, err := verifiedText(bucket, key, value)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, into); err != nil {
		return registry.Errorf(registry.ErrDamaged, "record %s %q cannot be decoded: %w", bucket, key, err)
	}
	return nil
}

// numberKey returns a key that sorts like its number.
func numberKey(n registry.Seq) []byte { return []byte(registry.NumberPath(n)) }

// tally is the number of records in a bucket, and the sum of their checksums.
type tally struct {
	Records uint64 `json:"records"`
	Sum     uint64 `json:"sum"` // of their checksums, modulo 2^64
}

func (t *tally) add(value []byte)    { t.Records++; t.Sum += uint64(checksumIn(value)) }
func (t *tally) remove(value []byte) { t.Records--; t.Sum -= uint64(checksumIn(value)) }
