package e2e

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"

	bolt "go.etcd.io/bbolt"

	"holdfast/host"
	"holdfast/internal/nextrelease"
	"holdfast/internal/testbin"
	"holdfast/proto/bootstrap"
)

// release is a build of the shim.
type release struct {
	name     string
	binary   host.Binary
	schema   uint32 // that it writes
	protocol int    // that it and the host of this test agree on
}

// releases returns this release and the next. A test built with the overlay of package nextrelease is a host of the
// next one.
func releases() (now, next release) {
	now = release{"this release", host.Binary{Path: filepath.Join(bin, "holdfast-shim")}, 1, 1}
	next = release{"the next release", host.Binary{Path: filepath.Join(nextBin(), "holdfast-shim-next")}, 2,
		slices.Max(bootstrap.Versions())}
	return now, next
}

// nextBin returns the directory with the shims of the next release, which few tests need.
var nextBin = sync.OnceValue(func() string {
	cache, err := filepath.Abs("../.cache")
	if err != nil {
		panic(err)
	}
	overlay, err := nextrelease.Flag(cache)
	if err != nil {
		panic(err)
	}
	faulty := testbin.FaultyShim("holdfast-shim-faulty-next")
	faulty.Flags = []string{overlay}
	dir, err := testbin.Build(testbin.Shim("holdfast-shim-next", overlay), faulty)
	if err != nil {
		panic(err)
	}
	return dir
})

// document is a record as JSON.
type document = map[string]any

// stateFile is the content of a state file.
type stateFile struct {
	schema    document
	instances map[string]document // by "role plugin alloc/task"
}

// stateOf reads a copy of the state file with bbolt only. The active shim writes meanwhile, so the copy is repeated
// until no transaction ended during it. Each transaction ends by writing one of the first two pages.
func (w *env) stateOf() (s stateFile) {
	w.t.Helper()
	path, copied := filepath.Join(w.config.StateDir, "shim.db"), filepath.Join(w.dir, "copy.db")
	var whole []byte
	w.waitUntil("a whole copy of the state", func() bool {
		before := w.metas(path)
		text, err := os.ReadFile(path)
		w.must(err)
		whole = text
		return bytes.Equal(before, w.metas(path))
	})
	w.must(os.WriteFile(copied, whole, 0o600))
	db, err := bolt.Open(copied, 0o600, &bolt.Options{ReadOnly: true})
	w.must(err)
	defer db.Close()
	s.instances = map[string]document{}
	w.must(db.View(func(tx *bolt.Tx) error {
		if err := json.Unmarshal(tx.Bucket([]byte("meta")).Get([]byte("schema"))[4:], &s.schema); err != nil {
			return err
		}
		return tx.Bucket([]byte("instances")).ForEach(func(_, value []byte) error {
			var d document
			err := json.Unmarshal(value[4:], &d)
			s.instances[fmt.Sprintf("%s %s %s/%s", d["role"], d["plugin"], d["alloc"], d["task"])] = d
			return err
		})
	}))
	return s
}

func (w *env) metas(path string) []byte {
	file, err := os.Open(path)
	w.must(err)
	defer file.Close()
	pages := make([]byte, 2*os.Getpagesize())
	_, err = file.ReadAt(pages, 0)
	w.must(err)
	return pages
}

// changeState changes the state file while no process has it open.
func (w *env) changeState(change func(tx *bolt.Tx) error) {
	w.t.Helper()
	db, err := bolt.Open(filepath.Join(w.config.StateDir, "shim.db"), 0o600, nil)
	w.must(err)
	w.must(db.Update(change))
	w.must(db.Close())
}

// sealed returns a record as it is stored, after its checksum.
func sealed(bucket string, key, text []byte) []byte {
	covered := slices.Concat([]byte(bucket), []byte{0, byte(len(key) >> 8), byte(len(key))}, key, text)
	return append(binary.BigEndian.AppendUint32(nil, crc32.Checksum(covered, crc32.MakeTable(crc32.Castagnoli))),
		text...)
}

// claimSchema writes another schema number and readable number into the state file.
func (w *env) claimSchema(number, readable int) {
	w.t.Helper()
	w.changeState(func(tx *bolt.Tx) error {
		key := []byte("schema")
		return tx.Bucket([]byte("meta")).Put(key, sealed("meta", key,
			fmt.Appendf(nil, `{"number":%d,"readable":%d}`, number, readable)))
	})
}

// enlarge adds an unknown field of so many bytes to each record of a bucket.
func (w *env) enlarge(bucket string, size int) {
	w.t.Helper()
	field := fmt.Appendf(nil, `,"unknown":"%s"}`, strings.Repeat("x", size))
	w.changeState(func(tx *bolt.Tx) error {
		b, larger := tx.Bucket([]byte(bucket)), map[string][]byte{}
		var tally struct {
			Records uint64 `json:"records"`
			Sum     uint64 `json:"sum"` // of checksums
		}
		err := b.ForEach(func(key, value []byte) error {
			text := slices.Concat(bytes.TrimSuffix(value[4:], []byte("}")), field)
			larger[string(key)] = sealed(bucket, key, text)
			tally.Records++
			tally.Sum += uint64(binary.BigEndian.Uint32(larger[string(key)]))
			return nil
		})
		for key, value := range larger {
			err = errors.Join(err, b.Put([]byte(key), value))
		}
		text, wrong := json.Marshal(tally)
		key := []byte("tally:" + bucket)
		return errors.Join(err, wrong, tx.Bucket([]byte("meta")).Put(key, sealed("meta", key, text)))
	})
}

// stateErrors compares a state that the release wrote with what it must write. was is the state before.
func (r release) stateErrors(was, is stateFile) (problems []string) {
	say := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	if want := (document{"number": float64(r.schema), "readable": 1.0}); !reflect.DeepEqual(is.schema, want) {
		say("the file says schema %v, not %v", is.schema, want)
	}
	for name, now := range is.instances {
		before := was.instances[name]
		switch list := listed(now); {
		case r.schema == 1 && before != nil && before["create_index"] == now["create_index"] &&
			!reflect.DeepEqual(listed(before), list):
			say("%s: what this release does not know was %v and is %v", name, listed(before), list)
		case r.schema > 1 && len(list) != 1:
			say("%s: there is no one endpoint in the list: %v", name, list)
		case r.schema > 1 && !matches(list[0], now["endpoint"]):
			say("%s: the list has %v, the old place %v", name, list[0], now["endpoint"])
		}
	}
	return problems
}

func listed(instance document) []any { list, _ := instance["endpoints"].([]any); return list }

// matches reports whether the first endpoint of the list equals the one at the old place.
func matches(first, old any) bool {
	a, _ := first.(document)
	b, _ := old.(document)
	return a != nil && b != nil && a["host"] == b["host"] && a["task"] == b["task"] && a["service"] == "csi"
}

// mountLines returns the mounts below the env's directory.
func (w *env) mountLines() []string { return strings.Split(strings.TrimSpace(w.mountTable()), "\n") }
