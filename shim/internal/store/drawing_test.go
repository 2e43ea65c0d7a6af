package store

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
)

const drawingFile = "../../../docs/state.txt"

// TestStateFormatIsDocumented compares docs/state.txt with a real file. -update writes docs/state.txt.
func TestStateFormatIsDocumented(t *testing.T) {
	path := statePath(t)
	s := start(t, Options{Path: path, Boot: "boot"})
	s.must(t, full(t))
	s.stop(t)
	got := drawing(t, path)
	if *update {
		if err := os.WriteFile(drawingFile, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(drawingFile)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("docs/state.txt is not what the file looks like; run the test with -update. It looks like this:\n%s",
			got)
	}
}

// drawn returns the package that writes the records of a bucket, whether nodes share the records, and the parts of
// their keys.
func drawn(bucket registry.Bucket) (owner, nodes string, key []string) {
	owner, nodes = "store", "one node"
	if bucket.Shared() {
		nodes = "shared"
	}
	switch bucket {
	case bucketMeta:
		return owner, nodes, []string{"name"}
	case bucketEvents:
		return "all", nodes, []string{"seq, 8 bytes"}
	}
	if t := bucket.Type(); t != nil {
		return t.Owner, nodes, t.Path
	}
	for _, t := range registry.RecordTypes {
		for _, x := range t.Indexes {
			if x.Bucket == bucket {
				return owner, nodes, slices.Concat(x.Path, t.Path)
			}
		}
	}
	return "", nodes, nil
}

// drawing describes the file, which it reads with bbolt alone.
func drawing(t *testing.T, path string) string {
	var out strings.Builder
	fmt.Fprintf(&out, "shim.db, schema %d: a bbolt file with one level of buckets. TestStateFormatIsDocumented in "+
		"shim/internal/store prints this\n", Newest)
	out.WriteString("page from a file in which every field is set. For each bucket it names the package that writes " +
		"the records, and\n")
	out.WriteString("whether the nodes of a cluster share them. A value is the CRC-32C of bucket, key and text, 4 " +
		"bytes big-endian,\n")
	out.WriteString("followed by the text, which is JSON. A part of a key is prefixed by its length, 2 bytes " +
		"big-endian, unless its\n")
	out.WriteString("size is named here.\n")
	inspect(t, path, func(tx *bolt.Tx) {
		err := tx.ForEach(func(name []byte, b *bolt.Bucket) error {
			owner, nodes, key := drawn(registry.Bucket(name))
			fmt.Fprintf(&out, "\n%-20s written by %s; %s; key: %s\n", name, owner, nodes, strings.Join(key, " / "))
			return b.ForEach(func(key, value []byte) error {
				var v any
				if err := json.Unmarshal(value[4:], &v); err != nil {
					return err
				}
				if string(name) == bucketMeta {
					v = map[string]any{string(key): v}
				}
				draw(&out, "    ", v)
				return nil
			})
		})
		if err != nil {
			t.Fatal(err)
		}
	})
	return out.String()
}

// draw prints the fields of an object and the kinds of their values.
func draw(out *strings.Builder, indent string, v any) {
	object, _ := v.(map[string]any)
	for _, name := range slices.Sorted(maps.Keys(object)) {
		value, list := object[name], ""
		if items, ok := value.([]any); ok && len(items) > 0 {
			value, list = items[0], "list of "
		}
		fmt.Fprintf(out, "%-36s %s%s\n", indent+name, list, kindOf(value))
		draw(out, indent+"    ", value)
	}
}

func kindOf(v any) string {
	switch v.(type) {
	case map[string]any:
		return "object"
	case string:
		return "text"
	case float64:
		return "number"
	case bool:
		return "true or false"
	}
	return fmt.Sprintf("%T", v)
}
