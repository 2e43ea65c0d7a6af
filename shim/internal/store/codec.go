package store

import (
	"encoding/binary"
	"encoding/json"
	"hash/crc32"

	"holdfast/registry"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

const sumSize = 4

// checksum covers the bucket and the key, so that a record is worth something only where it was put.
func checksum(bucket string, key, text []byte) uint32 {
	sum := crc32.Update(0, castagnoli, []byte(bucket))
	sum = crc32.Update(sum, castagnoli, []byte{0, byte(len(key) >> 8), byte(len(key))})
	sum = crc32.Update(sum, castagnoli, key)
	return crc32.Update(sum, castagnoli, text)
}

// seal makes the stored form of text.
func seal(bucket string, key, text []byte) []byte {
	value := binary.BigEndian.AppendUint32(make([]byte, 0, sumSize+len(text)), checksum(bucket, key, text))
	return append(value, text...)
}

// unseal is the text again. It lies within value.
func unseal(bucket string, key, value []byte) ([]byte, error) {
	if len(value) < sumSize || sealOf(value) != checksum(bucket, key, value[sumSize:]) {
		return nil, registry.Errorf(registry.ErrDamaged, "record %s %q fails its checksum", bucket, key)
	}
	return value[sumSize:], nil
}

// sealOf is the checksum that a stored value carries.
func sealOf(value []byte) uint32 { return binary.BigEndian.Uint32(value) }

func decode(bucket string, key, value []byte, into any) error {
	text, err := unseal(bucket, key, value)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(text, into); err != nil {
		return registry.Errorf(registry.ErrDamaged, "record %s %q cannot be decoded: %w", bucket, key, err)
	}
	return nil
}

// numberKey is a key that sorts as its number does.
func numberKey(n registry.Seq) []byte { return binary.BigEndian.AppendUint64(nil, uint64(n)) }

// tally is what a bucket's records add up to.
type tally struct {
	Records uint64 `json:"records"`
	Sum     uint64 `json:"sum"` // of their checksums, modulo 2^64
}

func (t *tally) add(value []byte)    { t.Records++; t.Sum += uint64(sealOf(value)) }
func (t *tally) remove(value []byte) { t.Records--; t.Sum -= uint64(sealOf(value)) }
