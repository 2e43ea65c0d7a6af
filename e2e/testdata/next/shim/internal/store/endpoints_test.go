package store

import (
	"errors"
	"reflect"
	"testing"

	bolt "go.etcd.io/bbolt"

	"holdfast/registry"
)

// before is the schema of the release before this one.
var before = schema{oldest: 1, newest: 1, readable: 1}

var movedKey = registry.InstanceKey{Role: "csi-node", Plugin: "p", Alloc: "a", Task: "t"}

func movedInstance(socket string) registry.Instance {
	return registry.Instance{InstanceKey: movedKey, Endpoint: registry.Endpoint{Host: socket, Task: "/csi/" + socket}}
}

// at is what a build of the schema reads of the instance.
func at(t *testing.T, path string, s *schema) (in registry.Instance) {
	t.Helper()
	r := start(t, Options{Path: path, schema: s})
	defer r.stop(t)
	err := r.View(t.Context(), func(v registry.View) error { in, _ = v.Instance(movedKey); return nil })
	if err != nil {
		t.Fatal(err)
	}
	return in
}

// alter changes the instance's record as it lies in the file.
func alter(t *testing.T, path string, change func(fields)) {
	t.Helper()
	r := start(t, Options{Path: path})
	defer r.stop(t)
	err := r.db.Update(func(tx *bolt.Tx) error {
		w := newTransaction(tx)
		err := w.rewrite(string(registry.BucketInstances), func(record fields) error { change(record); return nil })
		return errors.Join(err, w.writeTallies())
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestEndpointMoves: over swaps between this release and the one before, both of which rewrite an instance, each reads
// what the other wrote last, and what the list has besides stays.
func TestEndpointMoves(t *testing.T) {
	path := statePath(t)
	put := func(s *schema, socket string) {
		r := start(t, Options{Path: path, schema: s})
		r.must(t, puts(movedInstance(socket)))
		r.stop(t)
	}
	put(&before, "one")
	if got := at(t, path, &released).Endpoint; got != movedInstance("one").Endpoint {
		t.Errorf("after the first migration: %v", got)
	}
	alter(t, path, func(record fields) {
		record["endpoints"] = []byte(`[{"host":"one","task":"/csi/one","service":"other"},` +
			`{"host":"two","task":"x","service":"metrics"}]`)
	})
	for _, socket := range []string{"three", "four", "five"} {
		put(&before, socket)
		if got := at(t, path, &released).Endpoint; got != movedInstance(socket).Endpoint {
			t.Errorf("the release before wrote %s; this one reads %v", socket, got)
		}
		put(&released, socket+"!")
		if got := at(t, path, &before).Endpoint; got != movedInstance(socket+"!").Endpoint {
			t.Errorf("this release wrote %s!; the one before reads %v", socket, got)
		}
	}
	want := []any{
		map[string]any{"host": "five!", "task": "/csi/five!", "service": "other"},
		map[string]any{"host": "two", "task": "x", "service": "metrics"},
	}
	if got := onDisk(t, path)[movedKey.Key()]["endpoints"]; !reflect.DeepEqual(got, want) {
		t.Errorf("in the end the list is %v, not %v", got, want)
	}
}

// TestNewPlaceCounts: the old place is for the release before alone.
func TestNewPlaceCounts(t *testing.T) {
	path := statePath(t)
	r := start(t, Options{Path: path})
	r.must(t, puts(movedInstance("one")))
	r.stop(t)
	alter(t, path, func(record fields) { record["endpoint"] = []byte(`{"host":"old","task":"old"}`) })
	if got := at(t, path, &released).Endpoint; got != movedInstance("one").Endpoint {
		t.Errorf("it reads %v", got)
	}
}
