package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

var update = flag.Bool("update", false, "write the golden files anew")

// moveSocket migrates from schema 0, which was never released, to schema 1. In schema 0 an instance had its socket in
// two separate fields.
var moveSocket = migration{"the socket becomes an endpoint", func(t *transaction) error {
	return t.rewrite(string(registry.BucketInstances), func(fields map[string]json.RawMessage) error {
		if fields["socket"] == nil {
			return nil
		}
		fields["endpoint"] = encode(map[string]json.RawMessage{"host": fields["socket"], "task": fields["task_socket"]})
		delete(fields, "socket")
		delete(fields, "task_socket")
		return nil
	})
}}

// splitSocket undoes moveSocket, to make a file of schema 0.
func splitSocket(t *transaction) error {
	err := t.rewrite(string(registry.BucketInstances), func(fields map[string]json.RawMessage) error {
		var endpoint map[string]json.RawMessage
		if err := json.Unmarshal(fields["endpoint"], &endpoint); err != nil {
			return err
		}
		fields["socket"], fields["task_socket"] = endpoint["host"], endpoint["task"]
		delete(fields, "endpoint")
		return nil
	})
	return errors.Join(err, t.setMeta(metaSchema, window{0, 0}))
}

// tested is the released schema, with schema 0 before it.
var tested = schema{
	oldest: 0, newest: Newest, readable: Oldest, migrations: append([]migration{moveSocket}, released.migrations...),
	forms: released.forms,
}

// full returns a change with a record of each kind, in which every field is set.
func full(t testing.TB) (c registry.Change) {
	var key registry.VolumeKey
	var claim registry.Claim
	for seed, b := range registry.Buckets {
		record := registrytest.Record(t, b, seed+1)
		switch r := record.(type) {
		case registry.Volume:
			if !r.Ephemeral {
				key = r.VolumeKey()
			}
		case registry.Claim:
			r.Volume = key
			claim, record = r, r
		case registry.Ref:
			r.Volume, r.Alloc, r.Request = key, claim.Alloc, claim.Request
			record = r
		}
		c.Put = append(c.Put, record)
	}
	event := registrytest.Filled[registry.Event](t, len(c.Put)+1)
	event.Snapshot = nil // never stored
	c.Events = []registry.Event{event}
	return c
}

// golden returns the path of the golden file of schema n, which has a record in each bucket. A line has the bucket, the
// key and the value as they are stored. Once a release has written the schema, a line is never changed.
func golden(n int) string { return filepath.Join("testdata", fmt.Sprintf("schema%d.txt", n)) }

// goldenLines returns the lines of golden(n) by bucket and key.
func goldenLines(t *testing.T, n int) map[[2]string]string {
	t.Helper()
	text, err := os.ReadFile(golden(n))
	if err != nil && !(*update && errors.Is(err, os.ErrNotExist)) {
		t.Fatal(err)
	}
	lines := map[[2]string]string{}
	for line := range strings.Lines(string(text)) {
		var bucket, key, value string
		if _, err := fmt.Sscanf(line, "%s %q %q", &bucket, &key, &value); err != nil {
			t.Fatalf("%s: %v", golden(n), err)
		}
		lines[[2]string{bucket, key}] = value
	}
	return lines
}

// goldenCopy returns a file of schema n with the content of the golden file. For n = 0 it is the result of splitSocket
// for schema 1.
func goldenCopy(t *testing.T, n int) string {
	t.Helper()
	path := statePath(t)
	start(t, Options{Path: path}).stop(t)
	raw(t, path, func(w *transaction) error {
		for at, value := range goldenLines(t, max(n, 1)) {
			if at[0] != bucketMeta {
				w.tally(at[0]).add([]byte(value))
			}
			if err := bucketOf(w.tx, at[0]).Put([]byte(at[1]), []byte(value)); err != nil {
				return err
			}
		}
		if n == 0 {
			return splitSocket(w)
		}
		return nil
	})
	return path
}

// filled returns the buckets that have a record.
func filled(records map[registry.Key]object) map[registry.Bucket]bool {
	has := map[registry.Bucket]bool{}
	for key := range records {
		has[key.Bucket] = true
	}
	return has
}

// updateGolden adds a record to each bucket of the golden file of the newest schema that has none.
func updateGolden(t *testing.T) {
	t.Helper()
	lines, path := goldenLines(t, Newest), goldenCopy(t, Newest)
	stored := filled(onDisk(t, path))
	c := full(t)
	c.Put = slices.DeleteFunc(c.Put, func(r registry.Record) bool { return stored[r.Key().Bucket] })
	switch {
	case len(c.Put) == 0:
		return
	case len(lines) > 0:
		c.Events = nil
	}
	s := start(t, Options{Path: path, Boot: "boot"})
	s.must(t, c)
	s.stop(t)
	inspect(t, path, func(tx *bolt.Tx) {
		_ = tx.ForEach(func(name []byte, b *bolt.Bucket) error {
			return b.ForEach(func(key, value []byte) error {
				at := [2]string{string(name), string(key)}
				_, found := lines[at]
				if at[0] == bucketMeta && !strings.HasPrefix(at[1], metaTally) || at[0] != bucketMeta && !found {
					lines[at] = string(value)
				}
				return nil
			})
		})
	})
	var text []string
	for at, value := range lines {
		text = append(text, fmt.Sprintf("%s %q %q\n", at[0], at[1], value))
	}
	slices.Sort(text)
	if err := os.WriteFile(golden(Newest), []byte(strings.Join(text, "")), 0o644); err != nil {
		t.Fatal(err)
	}
}

// A file of each schema that this build opens has the records of that time, and this build knows all their fields.
func TestGoldens(t *testing.T) {
	if *update {
		updateGolden(t)
	}
	if len(released.migrations) != Newest-Oldest || len(tested.migrations) != Newest {
		t.Fatalf("%d migrations lead from schema %d to %d", len(released.migrations), Oldest, Newest)
	}
	want := onDisk(t, goldenCopy(t, Oldest))
	for _, bucket := range registry.Buckets {
		if !filled(want)[bucket] {
			t.Errorf("%s has no record of bucket %s: run the test with -update", golden(Oldest), bucket)
		}
	}
	for n := range Newest + 1 {
		if _, err := os.Stat(golden(max(n, 1))); err != nil {
			continue // the schema of a release that is to come
		}
		path := goldenCopy(t, n)
		start(t, Options{Path: path, schema: &tested}).stop(t)
		got := onDisk(t, path)
		for key, record := range got {
			got[key] = strict(t, key, record)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("schema %d became\n%v\nnot\n%v", n, got, want)
		}
	}
}

// strict returns a record as package registry has it. It fails for a field that this build does not know, because a
// renamed field would be lost silently.
func strict(t *testing.T, key registry.Key, record object) object {
	t.Helper()
	into := reflect.New(key.Bucket.Type().GoType).Interface()
	plain, err := released.forms.fromStored(key.Bucket, encode(record))
	if err != nil {
		t.Fatal(err)
	}
	decoder := json.NewDecoder(bytes.NewReader(plain))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		t.Errorf("%s: %v", key.Bucket, err)
	}
	if got := objectOf(t, reflect.ValueOf(into).Elem().Interface()); !contains(got, parse(t, plain)) {
		t.Errorf("%s: decoded, %v\nis %v", key.Bucket, record, got)
	}
	return parse(t, plain)
}

// contains reports whether each field of part is in whole, with the same value.
func contains(whole, part object) bool {
	for name, value := range part {
		if inner, ok := value.(object); ok {
			if outer, ok := whole[name].(object); !ok || !contains(outer, inner) {
				return false
			}
		} else if !reflect.DeepEqual(whole[name], value) {
			return false
		}
	}
	return true
}

// setWindow makes the file one of another schema.
func setWindow(t *testing.T, path string, w window) {
	t.Helper()
	start(t, Options{Path: path}).stop(t)
	raw(t, path, func(tx *transaction) error { return tx.setMeta(metaSchema, w) })
}

// followedBy returns the schema after s, to which the migration leads.
func (s schema) followedBy(m migration) schema {
	s.newest++
	s.migrations = append(slices.Clone(s.migrations), m)
	return s
}

// A file that this build cannot read is refused with both numbers and is not changed. A newer file that this build can
// read is opened.
func TestSchemaWindow(t *testing.T) {
	for _, w := range []window{{Newest + 2, Newest + 1}, {Oldest - 1, Oldest - 1}} {
		path := statePath(t)
		setWindow(t, path, w)
		before, _ := os.ReadFile(path)
		_, err := Open(t.Context(), Options{Path: path})
		if !errors.Is(err, registry.ErrUnsupported) ||
			!strings.Contains(err.Error(), fmt.Sprintf("schema %d", w.Number)) ||
			!strings.Contains(err.Error(), fmt.Sprintf("%d to %d", Oldest, Newest)) {
			t.Errorf("%v: %v", w, err)
		}
		if after, _ := os.ReadFile(path); !bytes.Equal(before, after) {
			t.Errorf("%v: the file was changed", w)
		}
	}
	path := statePath(t)
	setWindow(t, path, window{Newest + 1, Newest})
	start(t, Options{Path: path}).stop(t)
}

// An open file reports the oldest release that can read it after the migration.
func TestReadable(t *testing.T) {
	nothing := migration{"changes nothing", func(*transaction) error { return nil }}
	for _, readable := range []int{Newest, Newest + 1} {
		later := released.followedBy(nothing)
		later.readable = readable
		path := statePath(t)
		start(t, Options{Path: path}).stop(t)
		for _, before := range []int{Newest, Newest + 1} {
			s := start(t, Options{Path: path, schema: &later})
			if s.Readable() != readable || s.PreviousSchema() != before {
				t.Errorf("a file of schema %d is readable by %d now, and had schema %d", before, s.Readable(),
					s.PreviousSchema())
			}
			s.stop(t)
		}
	}
}

// A failed migration leaves the file unchanged, also if earlier migrations succeeded.
func TestFailedMigration(t *testing.T) {
	path := goldenCopy(t, 0)
	before, _ := os.ReadFile(path)
	broken := errors.New("broken")
	failing := tested.followedBy(migration{"fails", func(*transaction) error { return broken }})
	if _, err := Open(t.Context(), Options{Path: path, schema: &failing}); !errors.Is(err, broken) {
		t.Errorf("failed migration: %v", err)
	}
	if after, _ := os.ReadFile(path); !bytes.Equal(before, after) {
		t.Error("the file was changed")
	}
}

// A migration finds a record that cannot be decoded, although its checksum is right. The error is damage and names it.
func TestMigrationOfARecordThatIsNoJSON(t *testing.T) {
	path := goldenCopy(t, 0)
	raw(t, path, func(w *transaction) error {
		return w.put(string(registry.BucketInstances), []byte("x"), []byte("{"))
	})
	_, err := Open(t.Context(), Options{Path: path, schema: &tested})
	if !errors.Is(err, registry.ErrDamaged) || !strings.Contains(err.Error(), `record instances "x"`) {
		t.Errorf("open: %v", err)
	}
}

// This build and a later one within the window open the file in turn, and both commit. Data that only the later build
// knows is kept.
func TestSchemaIsMigratedUpAndReadDown(t *testing.T) {
	later := released.followedBy(migration{"adds a bucket", func(w *transaction) error {
		return errors.Join(w.create("later"), w.put("later", []byte("key"), []byte(`{"of":"later"}`)))
	}})
	path := statePath(t)
	for range 10 {
		s := start(t, Options{Path: path, schema: &later})
		s.must(t, puts(alloc("a")))
		s.stop(t)
		s = start(t, Options{Path: path})
		s.must(t, puts(alloc("b")))
		s.stop(t)
	}
	inspect(t, path, func(tx *bolt.Tx) {
		if got := string(get(tx, "later", []byte("key"))); got != `{"of":"later"}` || len(onDisk(t, path)) != 2 {
			t.Errorf("after ten swaps: %q, %v", got, onDisk(t, path))
		}
		var w window
		if getMeta(tx, metaSchema, &w); w != (window{Newest, Oldest}) {
			t.Errorf("the file's window is %v", w)
		}
	})
}

// labelled stores the job of an alloc among labels.
var labelled = form{
	write: func(record fields) error {
		labels := fields{}
		if text := record["labels"]; text != nil {
			if err := json.Unmarshal(text, &labels); err != nil {
				return err
			}
		}
		labels["job"] = record["job"]
		record["labels"] = encode(labels)
		return nil
	},
	read: func(record fields) error {
		var labels fields
		if err := json.Unmarshal(record["labels"], &labels); err != nil {
			return err
		}
		record["job"] = labels["job"]
		delete(record, "labels")
		return nil
	},
}

// A build that stores a field at a new place, and a build that does not know that place, open a file in turn. Each
// reads the value that was written last, and Check finds nothing.
func TestForm(t *testing.T) {
	later := released.followedBy(intoForm("the job becomes a label", registry.BucketAllocs, labelled))
	later.forms = forms{registry.BucketAllocs: labelled}
	path := statePath(t)
	with := func(s *schema, want, job string) {
		t.Helper()
		r := start(t, Options{Path: path, schema: s})
		defer r.stop(t)
		var got registry.Alloc
		_ = r.View(t.Context(), func(v registry.View) error { got, _ = v.Alloc("a"); return nil })
		if got.Job != want {
			t.Errorf("schema %d reads %q, not %q", s.newest, got.Job, want)
		}
		r.must(t, puts(registry.Alloc{ID: "a", Job: job, State: registry.AllocReady}))
	}
	with(&released, "", "one")
	with(&later, "one", "two")
	for range 3 {
		with(&released, "two", "three")
		record := onDisk(t, path)[registry.AllocRecord("a")]
		if want := (object{"job": "two"}); !reflect.DeepEqual(record["labels"], want) {
			t.Errorf("the build that does not know the new place leaves %v there", record["labels"])
		}
		with(&later, "three", "two")
	}
	record := onDisk(t, path)[registry.AllocRecord("a")]
	if want := (object{"job": "two"}); !reflect.DeepEqual(record["labels"], want) || record["job"] != "two" {
		t.Errorf("in the end it is %v", record)
	}
}
