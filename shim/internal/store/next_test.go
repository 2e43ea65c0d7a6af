package store

import (
	"errors"
	"reflect"
	"testing"

	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
)

// TestNextReleaseIsRead opens a file of the next release and reads each record. Fields that this release does not know
// survive a rewrite of the record. The file then has the schema of this release, so that the next release migrates it
// again.
func TestNextReleaseIsRead(t *testing.T) {
	path := nextFile(t)
	was := onDisk(t, path)
	s := start(t, Options{Path: path})
	var in registry.Instance
	err := s.View(t.Context(), func(v registry.View) error { in = v.AllInstances()[0]; return nil })
	if err != nil {
		t.Fatal(err)
	}
	in.Endpoint.Host = "elsewhere"
	s.must(t, puts(in))
	var w window
	if err := s.db.View(func(tx *bolt.Tx) error { getMeta(tx, metaSchema, &w); return nil }); err != nil {
		t.Fatal(err)
	}
	s.stop(t)
	if w != (window{Newest, Oldest}) {
		t.Errorf("the file's window is %v", w)
	}
	is := onDisk(t, path)
	list := was[in.Key()]["endpoints"]
	if list == nil || !reflect.DeepEqual(is[in.Key()]["endpoints"], list) {
		t.Errorf("the list was %v and is %v", list, is[in.Key()]["endpoints"])
	}
	if got := is[in.Key()]["endpoint"].(object)["host"]; got != "elsewhere" {
		t.Errorf("the endpoint is at %v", got)
	}
	delete(was, in.Key())
	delete(is, in.Key())
	if !reflect.DeepEqual(was, is) {
		t.Error("other records have changed")
	}
}

// nextFile returns a file as the next release writes it: an instance has a list of endpoints in addition to its
// endpoint.
func nextFile(t *testing.T) string {
	t.Helper()
	path := goldenCopy(t, Newest)
	raw(t, path, func(w *transaction) error {
		err := w.rewrite(string(registry.BucketInstances), func(record fields) error {
			record["endpoints"] = []byte(`[{"host":"h","task":"t","service":"csi"}]`)
			return nil
		})
		return errors.Join(err, w.setMeta(metaSchema, window{Newest + 1, Newest}))
	})
	return path
}
