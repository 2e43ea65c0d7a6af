package store

import (
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"
	"pgregory.net/rapid"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// object is a record, decoded from JSON.
type object = map[string]any

func objectOf(t rapid.TB, v any) object {
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, text)
}

func parse(t rapid.TB, text []byte) (o object) {
	if err := json.Unmarshal(text, &o); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return o
}

// onDisk returns every record of the kinds in use, read with bbolt alone.
func onDisk(t rapid.TB, path string) map[registry.Key]object {
	found := map[registry.Key]object{}
	inspect(t, path, func(tx *bolt.Tx) {
		for _, bucket := range registry.Buckets {
			_ = tx.Bucket([]byte(bucket)).ForEach(func(k, v []byte) error {
				found[registry.Key{Bucket: bucket, Path: string(k)}] = parse(t, v[4:])
				return nil
			})
		}
	})
	return found
}

// model is the expected content of the file: records as this build knows them, and the fields that a later build has
// added.
type model struct {
	path    string
	left    registry.Revision
	seq     registry.Seq
	records map[registry.Key]object
	foreign map[registry.Key]map[string]object // by the object within the record that holds it
}

// TestStoreAgreesWithItsModel compares the store with a map. It commits, and lets a later build add fields. After each
// step the file is opened again.
func TestStoreAgreesWithItsModel(t *testing.T) {
	root := t.TempDir()
	count := 0
	rapid.Check(t, func(t *rapid.T) {
		count++
		m := &model{
			path: filepath.Join(root, fmt.Sprint(count), "shim.db"), records: map[registry.Key]object{},
			foreign: map[registry.Key]map[string]object{},
		}
		t.Repeat(map[string]func(*rapid.T){
			"change": m.change,
			"later":  m.laterBuild,
			"":       m.compare,
		})
	})
}

func drawRecord(t *rapid.T, shared bool) registry.Record {
	id := rapid.SampledFrom([]string{"a", "b", "aa", "ab"}).Draw(t, "id")
	detail := rapid.SampledFrom([]string{"", "x", "<&>\u2028"}).Draw(t, "detail")
	kind := 3
	if !shared {
		kind = rapid.IntRange(0, 2).Draw(t, "kind")
	}
	switch kind {
	case 0:
		return registry.Alloc{ID: registry.AllocID(id), Job: detail, State: registry.AllocReady}
	case 1:
		i := registry.Instance{InstanceKey: registry.InstanceKey{Role: "csi-node", Plugin: registry.PluginID(id),
			Alloc: "x", Task: "y"}}
		i.Health, i.Fingerprint.Version = registry.Health{State: registry.Healthy, Detail: detail}, detail
		return i
	case 2:
		task := registry.Task{TaskKey: registry.TaskKey{Alloc: "x", Task: registry.TaskName(id)}, Job: detail}
		if rapid.Bool().Draw(t, "restart") {
			task.Restart = &registry.RestartRequest{Detail: detail}
		}
		return task
	default:
		v := registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "n", ID: registry.VolumeID(id), Plugin: "p",
			FSType: detail}}
		v.External = registry.ExternalID(rapid.SampledFrom([]string{"", "e1", "e2"}).Draw(t, "external"))
		v.Name = rapid.SampledFrom([]string{"", "n", "nn"}).Draw(t, "name")
		v.Created = rapid.Bool().Draw(t, "created")
		v.Secrets = map[string]registry.Secret{"key": {Env: detail}}
		return v
	}
}

func (m *model) store(t *rapid.T, use func(*Store)) {
	ctx := t.Context()
	s, err := Open(ctx, Options{Path: m.path, EventLimit: 3, ReleasedAt: m.left})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	use(s)
	for _, err := range s.Check() {
		t.Errorf("check: %v", err)
	}
	m.left = registry.Revision{Generation: s.Generation(), Index: s.Index()}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	<-ended
}

func (m *model) change(t *rapid.T) {
	var c registry.Change
	shared := rapid.Bool().Draw(t, "shared")
	for range rapid.IntRange(0, 3).Draw(t, "puts") {
		c.Put = append(c.Put, drawRecord(t, shared))
	}
	for range rapid.IntRange(0, 2).Draw(t, "deletes") {
		c.Delete = append(c.Delete, drawRecord(t, shared).Key())
	}
	for range rapid.IntRange(0, 3).Draw(t, "events") {
		c.Events = append(c.Events, registry.Event{Kind: registry.EventUpdated})
	}
	m.store(t, func(s *Store) {
		if _, err := registrytest.Write(t.Context(), s, c); err != nil {
			t.Fatal(err)
		}
	})
	m.apply(t, c)
}

func (m *model) apply(t *rapid.T, c registry.Change) {
	if c.Empty() {
		return
	}
	at, before := m.seq+1, maps.Clone(m.records)
	for _, r := range c.Put {
		var created registry.Seq
		if old, ok := before[r.Key()]; ok {
			created = registry.Seq(old["create_index"].(float64))
		}
		m.records[r.Key()] = objectOf(t, registry.Indexed(r, created, at))
		if m.records[r.Key()]["restart"] == nil {
			delete(m.foreign[r.Key()], "restart")
		}
	}
	for _, k := range c.Delete {
		delete(m.records, k)
		delete(m.foreign, k)
	}
	m.seq = at + registry.Seq(max(len(c.Events), 1)) - 1
}

// laterBuild adds a field that this build does not know to a record, or to an object within it.
func (m *model) laterBuild(t *rapid.T) {
	key := drawRecord(t, rapid.Bool().Draw(t, "shared")).Key()
	record, ok := m.records[key]
	if !ok {
		return
	}
	within := rapid.SampledFrom([]string{"", "health", "fingerprint", "restart", "started"}).Draw(t, "within")
	if _, ok := record[within].(object); within != "" && !ok {
		return
	}
	value := object{"deep": []any{rapid.StringN(0, 3, -1).Draw(t, "value"), 1.5}}
	if m.foreign[key] == nil {
		m.foreign[key] = map[string]object{}
	}
	m.foreign[key][within] = value
	text, err := json.Marshal(m.expected(t, key))
	if err != nil {
		t.Fatal(err)
	}
	m.store(t, func(s *Store) {
		err := s.db.Update(func(tx *bolt.Tx) error {
			w := newTransaction(tx)
			if err := w.put(string(key.Bucket), []byte(key.Path), text); err != nil {
				return err
			}
			return w.writeTallies()
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.readers.publish(s.db); err != nil {
			t.Fatal(err)
		}
	})
}

// expected returns a record with the added fields.
func (m *model) expected(t *rapid.T, key registry.Key) object {
	record := objectOf(t, m.records[key])
	for within, value := range m.foreign[key] {
		if within == "" {
			record["later"] = value
		} else {
			record[within].(object)["later"] = value
		}
	}
	text, err := released.forms.toStored(key.Bucket, encode(record))
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, text)
}

func (m *model) compare(t *rapid.T) {
	m.store(t, func(s *Store) {
		if s.Index() != m.seq {
			t.Fatalf("index %d instead of %d", s.Index(), m.seq)
		}
		m.compareNames(t, s)
	})
	found := onDisk(t, m.path)
	if len(found) != len(m.records) {
		t.Fatalf("%d records instead of %d", len(found), len(m.records))
	}
	for key := range m.records {
		if want := m.expected(t, key); !reflect.DeepEqual(found[key], want) {
			t.Fatalf("%v\n is %v\nnot %v", key, found[key], want)
		}
	}
}

// compareNames looks up volumes by the names under which they were created.
func (m *model) compareNames(t *rapid.T, s *Store) {
	want := map[string][]string{}
	for _, key := range slices.SortedFunc(maps.Keys(m.records), func(a, b registry.Key) int {
		return strings.Compare(a.Path, b.Path)
	}) {
		if v := m.records[key]; key.Bucket == registry.BucketVolumes && v["created"] == true {
			name := v["name"].(string)
			want[name] = append(want[name], v["id"].(string))
		}
	}
	err := s.View(t.Context(), func(v registry.View) error {
		for _, name := range []string{"", "n", "nn"} {
			var ids []string
			for _, volume := range v.VolumesNamed("p", name) {
				ids = append(ids, string(volume.ID))
			}
			if !slices.Equal(ids, want[name]) {
				t.Fatalf("volumes named %q are %q, not %q", name, ids, want[name])
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
