package lifecycle

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"holdfast/registry"
	"holdfast/shim/internal/store"
)

// A rehearsal names a task or alloc that only a newer shim could start again, and says what to do. Unknown fields of a
// known version do not matter. It also reports which schemas can read the state.
func TestRehearsalRefusesWhatItCouldNotStart(t *testing.T) {
	sealed := func(version string) []byte {
		return []byte(`{"version":` + version + `,"later":1,"task":{"csi_plugin":{"id":"p","type":"node","later":1}}}`)
	}
	key := registry.TaskKey{Alloc: "alloc-1", Task: "plugin"}
	for _, c := range []struct {
		what   string
		record registry.Record
		says   []string // empty: it is no reason
	}{
		{"a task of this version", registry.Task{TaskKey: key, Sealed: sealed("1")}, nil},
		{"a task of a later one", registry.Task{TaskKey: key, Sealed: sealed("99")},
			[]string{"task alloc-1/plugin", "version 99", "stop its job"}},
		{"an alloc of a later one", registry.Alloc{ID: "alloc-2", Sealed: []byte(`{"version":99,"group":{}}`)},
			[]string{"alloc alloc-2", "version 99", "stop its job"}},
	} {
		t.Run(c.what, func(t *testing.T) {
			l := dirs(t)
			p := newProcess(t)
			_, err := p.Hello(t.Context(), hello(l))
			must(t, err)
			path := filepath.Join(l.State, "copy.db")
			writeState(t, path, c.record)
			got, err := p.Rehearse(t.Context(), path)
			if err == nil && (got.Schema != store.Newest || got.Readable != store.Oldest) {
				t.Errorf("schema %d, readable by %d", got.Schema, got.Readable)
			}
			if (err != nil) != (len(c.says) > 0) || err != nil && !errors.Is(err, registry.ErrUnsupported) {
				t.Errorf("the rehearsal says %v", err)
			}
			for _, want := range c.says {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%v does not say %q", err, want)
				}
			}
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the copy is left: %v", err)
			}
		})
	}
}
