package store

import (
	"encoding/json"
	"reflect"
	"testing"

	"holdfast/registry"
)

// labelled has the job of an alloc among labels.
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

// TestForm: a build that stores a field elsewhere, and one that does not know of that, take a file from each other. Each reads what was
// written last, by whomever, and Check finds nothing.
func TestForm(t *testing.T) {
	later := schema{
		oldest: released.oldest, newest: released.newest + 1, readable: released.readable,
		migrations: append(released.migrations[:len(released.migrations):len(released.migrations)],
			intoForm("the job becomes a label", registry.BucketAllocs, labelled)),
		forms: forms{registry.BucketAllocs: labelled},
	}
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
		with(&later, "three", "two")
	}
	record := onDisk(t, path)[registry.AllocRecord("a")]
	if want := (object{"job": "two"}); !reflect.DeepEqual(record["labels"], want) || record["job"] != "two" {
		t.Errorf("in the end it is %v", record)
	}
}
