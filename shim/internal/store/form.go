package store

import (
	"encoding/json"

	"holdfast/registry"
)

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
