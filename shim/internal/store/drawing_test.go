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
)

const drawingFile = "../../../docs/state.txt"

// TestDrawing holds docs/state.txt to what a real file looks like. -update writes it.
func TestDrawing(t *testing.T) {
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
		t.Errorf("docs/state.txt is not what the file looks like; run the test with -update. It looks like this:\n%s", got)
	}
}

// keys says what the parts of a bucket's keys are. The test fails on a bucket that is not here.
var keys = map[string][]string{
	"allocs": {"alloc"}, "claims": {"plugin", "external id", "alloc", "request"}, "events": {"seq, 8 bytes"},
	"instances": {"role", "plugin", "alloc", "task"}, "intents": {"plugin", "external id"}, "meta": {"name"},
	"placements": {"plugin", "external id"}, "refs": {"plugin", "external id", "alloc", "request"}, "requests": {"operation"},
	"requests_by_index": {"create index, 8 bytes", "operation"}, "tasks": {"alloc", "task"}, "volumes": {"namespace", "volume"},
	"volumes_by_key":  {"plugin", "external id", "namespace", "volume"},
	"volumes_by_name": {"plugin", "name, its first 128 bytes", "namespace", "volume"},
}

// drawing is read from the file with bbolt alone.
func drawing(t *testing.T, path string) string {
	var out strings.Builder
	fmt.Fprintf(&out, "shim.db, schema %d: bbolt, one level of buckets. Printed by code (shim/internal/store, TestDrawing) from a file in which every\n", Newest)
	out.WriteString("field is set. A value is its CRC-32C over bucket, key and text, 4 bytes big-endian, then the text, JSON. Unless it is said\n")
	out.WriteString("otherwise, each part of a key is prefixed by its length, 2 bytes big-endian.\n")
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	err = db.View(func(tx *bolt.Tx) error {
		return tx.ForEach(func(name []byte, b *bolt.Bucket) error {
			parts := keys[string(name)]
			if parts == nil {
				t.Errorf("no rule for the keys of %s", name)
			}
			fmt.Fprintf(&out, "\n%-20s key: %s\n", name, strings.Join(parts, " / "))
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
	})
	if err != nil {
		t.Fatal(err)
	}
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
