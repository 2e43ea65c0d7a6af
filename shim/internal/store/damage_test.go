package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"
	"pgregory.net/rapid"

	"holdfast/registry"
	"holdfast/registry/registrytest"
)

const pageSize = 4096

func sampleVolume(n int, key registry.VolumeKey) registry.Volume {
	id := fmt.Sprint("v", n)
	return registry.Volume{VolumeSpec: registry.VolumeSpec{
		Namespace: "n", ID: registry.VolumeID(id), Name: "name-" + id, Plugin: key.Plugin, External: key.External,
	}, Created: true}
}

// sample returns a file with branch pages, overflow pages, free pages and all buckets, cut to the pages in use.
func sample(t testing.TB) []byte {
	path := statePath(t)
	s := start(t, Options{Path: path})
	for n := range 4 {
		c := registry.Change{Events: make([]registry.Event, 5)}
		for i := range 16 {
			c.Put = append(c.Put, registry.Alloc{ID: registry.AllocID(fmt.Sprintf(
				"alloc-%03d", 16*n+i)), Job: strings.Repeat("job", 60)})
		}
		key := registry.VolumeKey{Plugin: "p", External: registry.ExternalID(fmt.Sprint("vol", n))}
		c.Put = append(c.Put,
			sampleVolume(n, key),
			registry.Claim{Volume: key, Alloc: "a", Request: "r"}, registry.Ref{Volume: key, Alloc: "a", Request: "r"},
			registry.Attachment{Volume: key, PublishContext: map[string]string{"device": strings.Repeat("x", 2500*n)}},
			registry.Intent{Volume: key},
			registry.Operation{ID: registry.OperationID(fmt.Sprint("op", n))},
			registry.Instance{InstanceKey: registry.InstanceKey{Role: "csi-node", Plugin: "p", Alloc: "a",
				Task: registry.TaskName(fmt.Sprint(n))}},
			registry.Task{TaskKey: registry.TaskKey{Alloc: "a", Task: registry.TaskName(fmt.Sprint(n))}})
		s.must(t, c)
	}
	var gone []registry.Key
	for i := range 18 {
		gone = append(gone, registry.AllocRecord(registry.AllocID(fmt.Sprintf("alloc-%03d", 2*i))))
	}
	s.must(t, registry.Change{Delete: gone})
	s.stop(t)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return whole[:usedBytes(t, path)]
}

// usedBytes returns the length of the pages in use, from the start of the file.
func usedBytes(t testing.TB, path string) (n int64) {
	t.Helper()
	inspect(t, path, func(tx *bolt.Tx) { n = tx.Size() })
	return n
}

// inspect reads a file with bbolt alone.
func inspect(t rapid.TB, path string, read func(*bolt.Tx)) {
	t.Helper()
	db, err := bolt.Open(path, fileMode, &bolt.Options{ReadOnly: true, PreLoadFreelist: true})
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := db.View(func(tx *bolt.Tx) error { read(tx); return nil }); err != nil {
		t.Fatal(err)
	}
}

// everything returns the records and events of a file, as a view shows them.
func everything(t testing.TB, s *Store) string {
	var all strings.Builder
	err := s.View(t.Context(), func(v registry.View) error {
		fmt.Fprintln(&all, v.AllInstances(), v.Tasks(), v.Allocs(), v.Volumes(), v.AllClaims(), v.AllAttachments(),
			v.AllRefs(), v.Intents(), v.Index())
		events, floor := v.Events(0, 1e6)
		fmt.Fprintln(&all, events, floor)
		for n := range 4 {
			volume, _ := v.VolumeByKey(registry.VolumeKey{Plugin: "p",
				External: registry.ExternalID(fmt.Sprint("vol", n))})
			operation, _ := v.Operation(registry.OperationID(fmt.Sprint("op", n)))
			fmt.Fprintln(&all, volume, operation, v.VolumesNamed("p", fmt.Sprint("name-v", n)))
		}
		return nil
	})
	if err != nil {
		fmt.Fprintln(&all, err)
	}
	return all.String()
}

// isRefused opens a file with the given content, and reports whether Open refuses it. A refused file must be unchanged
// and copied. An accepted file must have the whole content, also after a write.
func (c *corpus) isRefused(t *testing.T, what string, file []byte) bool {
	t.Helper()
	c.n++
	path := filepath.Join(c.dir, fmt.Sprint(c.n), "shim.db")
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(filepath.Dir(path))
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	c.options.Path = path
	s, err := Open(t.Context(), c.options)
	if err != nil {
		c.checkRefused(t, what, path, file, err)
		return true
	}
	defer s.Close()
	if got := everything(t, s); got != c.want {
		t.Errorf("%s: accepted, and the content differs", what)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { _ = s.Run(ctx) }()
	if _, err := registrytest.Write(ctx, s, puts(alloc("new"))); err != nil {
		t.Errorf("%s: accepted, and then: %v", what, err)
	}
	for _, err := range s.Check() {
		t.Errorf("%s: accepted, and then: %v", what, err)
	}
	return false
}

// corpus opens files that are or may be damaged copies of one intact file.
type corpus struct {
	dir     string
	want    string // the content of the intact file
	n       int    // number of files opened
	options Options
}

func newCorpus(t *testing.T, file []byte) *corpus {
	path := statePath(t)
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	s := start(t, Options{Path: path})
	return &corpus{dir: t.TempDir(), want: everything(t, s.Store)}
}

func (c *corpus) checkRefused(t *testing.T, what, path string, file []byte, err error) {
	t.Helper()
	if !errors.Is(err, registry.ErrDamaged) {
		t.Errorf("%s: %v", what, err)
	}
	if now, _ := os.ReadFile(path); !bytes.Equal(now, file) {
		t.Errorf("%s: the damaged file was changed", what)
	}
	copies, _ := filepath.Glob(path + ".damaged-*")
	if len(copies) != 1 {
		t.Fatalf("%s: copies: %v", what, copies)
	}
	if kept, _ := os.ReadFile(copies[0]); !bytes.Equal(kept, file) || !strings.Contains(err.Error(), copies[0]) {
		t.Errorf("%s: the copy differs, or is not named: %v", what, err)
	}
}

// A damaged file never crashes the process that opens it, is never replaced by an empty one, and never returns other
// data than was stored.
func TestDamage(t *testing.T) {
	file := sample(t)
	c := newCorpus(t, file)
	random := rand.New(rand.NewPCG(1, 2))
	page := func(n int) []byte { return file[n*pageSize : (n+1)*pageSize] }
	count := len(file) / pageSize
	t.Logf("%d pages", count)

	if c.isRefused(t, "as it is", file) {
		t.Fatal("the whole file is refused")
	}
	for size := 0; size < len(file); size += pageSize {
		if !c.isRefused(t, fmt.Sprintf("cut to %d bytes", size), file[:size]) {
			t.Errorf("cut to %d bytes: accepted", size)
		}
	}
	for n := range count {
		zeroed := bytes.Clone(file)
		clear(zeroed[n*pageSize : (n+1)*pageSize])
		c.isRefused(t, fmt.Sprintf("page %d zeroed", n), zeroed)
		swapped := bytes.Clone(file)
		other := random.IntN(count)
		copy(swapped[n*pageSize:], page(other))
		copy(swapped[other*pageSize:], page(n))
		if n != other {
			c.isRefused(t, fmt.Sprintf("pages %d and %d swapped", n, other), swapped)
		}
		torn := bytes.Clone(file)
		copy(torn[n*pageSize+512*random.IntN(8):], page(random.IntN(count))[:512])
		c.isRefused(t, fmt.Sprintf("page %d torn", n), torn)
	}
	const flips = 60
	found := 0
	for i := range flips {
		flipped := bytes.Clone(file)
		at, bit := random.IntN(len(file)), random.IntN(8)
		if i%2 == 0 { // the header and the first entries of a page
			at = at/pageSize*pageSize + random.IntN(48)
		}
		flipped[at] ^= 1 << bit
		if c.isRefused(t, fmt.Sprintf("bit %d of byte %d", bit, at), flipped) {
			found++
		}
	}
	t.Logf("%d of %d flipped bits are in bytes that count", found, flips)
	if found < flips/6 {
		t.Error("hardly any flipped bit was found")
	}
}

// A shim that restarts repeatedly does not fill the disk with copies.
func TestDamageIsCopiedOnce(t *testing.T) {
	path := statePath(t)
	start(t, Options{Path: path}).stop(t)
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := Open(t.Context(), Options{Path: path}); !errors.Is(err, registry.ErrDamaged) {
			t.Fatalf("an empty file: %v", err)
		}
	}
	if copies, _ := filepath.Glob(path + ".damaged-*"); len(copies) != 1 {
		t.Errorf("copies: %v", copies)
	}
}

// TestDirectedDamage makes damage that a random bit rarely makes: damage that the check of bbolt does not find and its
// next write would spread, or that crashes or stalls a reader.
func TestDirectedDamage(t *testing.T) {
	file := sample(t)
	path := statePath(t)
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	var branches, beforeFree []int // beforeFree: pages that a free page follows
	freelist := 0
	inspect(t, path, func(tx *bolt.Tx) {
		for id := 2; int64(id)*pageSize < tx.Size(); id++ {
			info, _ := tx.Page(id)
			switch info.Type {
			case "branch":
				branches = append(branches, id*pageSize)
			case "freelist":
				freelist = id * pageSize
			case "free":
				continue
			}
			if next, err := tx.Page(id + info.OverflowCount + 1); err == nil && next != nil && next.Type == "free" {
				beforeFree = append(beforeFree, id*pageSize)
			}
			id += info.OverflowCount
		}
	})
	if len(branches) == 0 || freelist == 0 || len(beforeFree) == 0 {
		t.Fatal("the sample has no branch, no list of free pages, or no page before a free one")
	}
	c := newCorpus(t, file)
	refused := func(what string, change func(file []byte)) {
		t.Helper()
		harmed := bytes.Clone(file)
		change(harmed)
		if !c.isRefused(t, what, harmed) {
			t.Errorf("%s: accepted", what)
		}
	}
	free := freelist + headerSize
	refused("a page in use is called free", func(f []byte) { order.PutUint64(f[free:], uint64(branches[0]/pageSize)) })
	refused("a page is free twice", func(f []byte) { copy(f[free+8:free+16], f[free:free+8]) })
	refused("a free page far away", func(f []byte) { order.PutUint64(f[free:], 1<<40) })
	for _, start := range beforeFree {
		overflow := order.Uint32(file[start+12:])
		refused("a page extends over a free page", func(f []byte) { order.PutUint32(f[start+12:], overflow+1) })
	}
	for _, start := range branches {
		first := start + headerSize
		key := first + int(order.Uint32(file[first:])) + int(order.Uint32(file[first+4:])) - 1
		refused("a branch with a higher key", func(f []byte) { f[key]++ })
		refused("a branch with a lower key", func(f []byte) { f[key]-- })
		refused("a page below itself", func(f []byte) { order.PutUint64(f[first+8:], uint64(start/pageSize)) })
		refused("a page far away", func(f []byte) { order.PutUint64(f[first+8:], 1<<40) })
		refused("a page of 2^32 pages", func(f []byte) { order.PutUint32(f[start+12:], 1<<32-1) })
	}
}

// The file is damaged after its shim released it. The next shim does not verify it, and yet neither crashes nor changes
// it. It reports the damage and keeps a copy.
func TestDamageBetweenTwoShims(t *testing.T) {
	file := sample(t)
	path := statePath(t)
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	c := newCorpus(t, file)
	freelist := 0
	inspect(t, path, func(tx *bolt.Tx) {
		c.options.ReleasedAt = stateOf(tx).revision()
		c.options.Generation = c.options.ReleasedAt.Generation + 1
		for id := 2; int64(id)*pageSize < tx.Size(); id++ {
			if info, _ := tx.Page(id); info.Type == "freelist" {
				freelist = id * pageSize
			}
		}
	})
	if c.isRefused(t, "as it is", file) {
		t.Error("the whole file is refused")
	}
	harmed := bytes.Clone(file)
	clear(harmed[freelist : freelist+pageSize])
	cuts := map[string][]byte{"the list of free pages is zero": harmed}
	for size := 0; size < len(file); size += pageSize {
		cuts[fmt.Sprint("cut to ", size)] = file[:size]
		cuts[fmt.Sprint("cut within a page after ", size)] = file[:size+100]
	}
	for what, f := range cuts {
		if !c.isRefused(t, what, f) {
			t.Errorf("%s: accepted", what)
		}
	}
}

// TestReleasedFileIsNotVerifiedAgain makes damage that only verification finds. It stays undetected in a file that is
// as the previous shim left it. In any other file it is found.
func TestReleasedFileIsNotVerifiedAgain(t *testing.T) {
	path := statePath(t)
	s := start(t, Options{Path: path})
	s.must(t, puts(alloc("a")))
	left := registry.Revision{Generation: s.Generation(), Index: s.Index()}
	s.stop(t)
	raw(t, path, func(w *transaction) error { // an alloc that no tally counts
		return bucketOf(w.tx, string(registry.BucketAllocs)).Put([]byte("b"),
			withChecksum(string(registry.BucketAllocs), []byte("b"), []byte("{}")))
	})
	released, err := Open(t.Context(), Options{Path: path, Generation: left.Generation, ReleasedAt: left})
	if err != nil {
		t.Fatal(err)
	}
	if err := released.Close(); err != nil {
		t.Error(err)
	}
	left.Index++
	for what, options := range map[string]Options{"left elsewhere": {Path: path, ReleasedAt: left},
		"not released": {Path: path}} {
		if _, err := Open(t.Context(), options); !errors.Is(err, registry.ErrDamaged) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// The limit for the lock does not bound the verification, which takes long for a large file.
func TestLockLimitDoesNotEndVerification(t *testing.T) {
	path := statePath(t)
	start(t, Options{Path: path}).stop(t)
	s, err := Open(t.Context(), Options{Path: path, LockLimit: 1})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// VerifyFile accepts an intact file and refuses a damaged one. It changes neither.
func TestVerifyFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shim.db")
	if err := VerifyFile(t.Context(), path); !errors.Is(err, registry.ErrNotFound) {
		t.Errorf("without a file: %v", err)
	}
	whole := sample(t)
	damaged := bytes.Clone(whole)
	damaged[24] ^= 0x40 // in the first meta page
	for what, c := range map[string]struct {
		file []byte
		want error
	}{"whole": {whole, nil}, "damaged": {damaged, registry.ErrDamaged}, "empty": {nil, registry.ErrDamaged}} {
		if err := os.WriteFile(path, c.file, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := VerifyFile(t.Context(), path); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", what, err)
		}
		after, err := os.ReadFile(path)
		names, _ := os.ReadDir(filepath.Dir(path))
		if err != nil || !bytes.Equal(after, c.file) || len(names) != 1 {
			t.Errorf("%s: the file has changed, or there are others: %v, %v", what, names, err)
		}
	}
}
