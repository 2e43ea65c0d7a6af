package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"go.etcd.io/bbolt"
)

// setSchema marks a copy of the state as readable only by shims of the schema. The record has a valid checksum, as
// package store writes it.
func setSchema(file string, number int) error {
	db, err := bbolt.Open(file, 0o600, nil)
	if err != nil {
		return err
	}
	return errors.Join(db.Update(func(tx *bbolt.Tx) error {
		key, text := "schema", fmt.Sprintf(`{"number":%d,"readable":%d}`, number, number)
		covered := append([]byte("meta"), 0, 0, byte(len(key)))
		covered = append(append(covered, key...), text...)
		sum := crc32.Checksum(covered, crc32.MakeTable(crc32.Castagnoli))
		return tx.Bucket([]byte("meta")).Put([]byte(key), append(binary.BigEndian.AppendUint32(nil, sum), text...))
	}), db.Close())
}
