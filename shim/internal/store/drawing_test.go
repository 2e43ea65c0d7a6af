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

// TestStateFormatIsDocumented holds docs/state.txt to what a real file looks like. -update writes it.
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

// drawn says of a bucket which package writes its records, and what the parts of their keys are.
var drawn = map[string]struct {
	owner string
	key   []string
}{
	"meta":            {"store", []string{"name"}},
	"events":          {"all", []string{"seq, 8 bytes"}},
	"instances":       {"task", []string{"role", "plugin", "alloc", "task"}},
	"tasks":           {"task", []string{"alloc", "task"}},
	"allocs":          {"node", []string{"alloc"}},
	"volumes":         {"controller", []string{"namespace", "volume"}},
	"inline_volumes":  {"node", []string{"namespace", "volume"}},
	"claims":          {"controller", []string{"plugin", "external id", "alloc", "request"}},
	"attachments":     {"controller", []string{"plugin", "external id", "node"}},
	"stagings":        {"node", []string{"plugin", "external id"}},
	"refs":            {"node", []string{"plugin", "external id", "alloc", "request"}},
	"intents":         {"intent", []string{"plugin", "external id"}},
	"node_intents":    {"intent", []string{"plugin", "external id"}},
	"requests":        {"rpc", []string{"operation"}},
	bucketRequestAge:  {"store", []string{"create index, 8 bytes", "operation"}},
	bucketVolumeKeys:  {"store", []string{"plugin", "external id", "namespace", "volume"}},
	bucketVolumeNames: {"store", []string{"plugin", "name, its first 128 bytes", "namespace", "volume"}},
}

// TestBucketsHaveOwners: the owner of a bucket is a package of the shim.
func TestBucketsHaveOwners(t *testing.T) {
	for name, d := range drawn {
		if d.owner == "all" {
			continue
		}
		if _, err := os.Stat("../" + d.owner); err != nil {
			t.Errorf("bucket %s is owned by %s: %v", name, d.owner, err)
		}
	}
	for _, name := range buckets() {
		if drawn[name].owner == "" {
			t.Errorf("bucket %s has no owner", name)
		}
	}
}

// drawing is read from the file with bbolt alone.
func drawing(t *testing.T, path string) string {
	var out strings.Builder
	fmt.Fprintf(&out, "shim.db, schema %d: a bbolt file with one level of buckets. TestStateFormatIsDocumented in shim/internal/store prints this\n", Newest)
	out.WriteString("page from a file in which every field is set. For each bucket it names the package that writes the records, and\n")
	out.WriteString("whether the nodes of a cluster share them. A value is the CRC-32C of bucket, key and text, 4 bytes big-endian,\n")
	out.WriteString("followed by the text, which is JSON. A part of a key is prefixed by its length, 2 bytes big-endian, unless its\n")
	out.WriteString("size is named here.\n")
	db, err := bolt.Open(path, 0o600, &bolt.Options{ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	err = db.View(func(tx *bolt.Tx) error {
		return tx.ForEach(func(name []byte, b *bolt.Bucket) error {
			d := drawn[string(name)]
			nodes := "one node"
			if registry.Bucket(name).Shared() {
				nodes = "shared"
			}
			fmt.Fprintf(&out, "\n%-20s written by %s; %s; key: %s\n", name, d.owner, nodes, strings.Join(d.key, " / "))
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
