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

	"holdfast/registry"
)

const pageSize = 4096

func sampleVolume(n int, key registry.VolumeKey) registry.Volume {
	id := fmt.Sprint("v", n)
	return registry.Volume{VolumeSpec: registry.VolumeSpec{
		Namespace: "n", ID: registry.VolumeID(id), Name: "name-" + id, Plugin: key.Plugin, External: key.External,
	}, Created: true}
}

// sample is the bytes of a file with branch pages, overflow pages, free pages and all buckets, cut to the pages in use.
func sample(t testing.TB) []byte {
	path := statePath(t)
	s := start(t, Options{Path: path})
	for n := range 4 {
		c := registry.Change{Events: make([]registry.Event, 5)}
		for i := range 16 {
			c.Put = append(c.Put, registry.Alloc{ID: registry.AllocID(fmt.Sprintf("alloc-%03d", 16*n+i)), Job: strings.Repeat("job", 60)})
		}
		key := registry.VolumeKey{Plugin: "p", External: registry.ExternalID(fmt.Sprint("vol", n))}
		c.Put = append(c.Put,
			sampleVolume(n, key),
			registry.Claim{Volume: key, Alloc: "a", Request: "r"}, registry.Ref{Volume: key, Alloc: "a", Request: "r"},
			registry.Placement{Volume: key, Publish: map[string]string{"device": strings.Repeat("x", 2500*n)}}, registry.Intent{Volume: key},
			registry.Operation{ID: registry.OperationID(fmt.Sprint("op", n))},
			registry.Instance{InstanceKey: registry.InstanceKey{Role: "csi-node", Plugin: "p", Alloc: "a", Task: registry.TaskName(fmt.Sprint(n))}},
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
	walker, err := newPages(bytes.NewReader(whole), int64(len(whole)))
	if err != nil {
		t.Fatal(err)
	}
	return whole[:walker.meta.highWater*pageSize]
}

// everything is all that a file holds, meta bucket and all, as read by its pages.
func everything(t testing.TB, s *Store) string {
	var all strings.Builder
	err := s.View(t.Context(), func(v registry.View) error {
		fmt.Fprintln(&all, v.AllInstances(), v.Tasks(), v.Allocs(), v.Volumes(), v.AllClaims(), v.Placements(), v.AllRefs(), v.Intents(), v.Index())
		events, floor := v.Events(0, 1e6)
		fmt.Fprintln(&all, events, floor)
		for n := range 4 {
			volume, _ := v.VolumeByKey(registry.VolumeKey{Plugin: "p", External: registry.ExternalID(fmt.Sprint("vol", n))})
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

// damaged opens a file of these bytes and says whether it was refused. If it was, it must be untouched and copied; if not, nothing of
// it may be wrong, now or after a write.
func (c *corpus) damaged(t *testing.T, what string, file []byte) bool {
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
	s, err := Open(t.Context(), Options{Path: path})
	if err != nil {
		c.refused(t, what, path, file, err)
		return true
	}
	defer s.Close()
	if got := everything(t, s); got != c.want {
		t.Errorf("%s: accepted, and the content differs", what)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { _ = s.Run(ctx) }()
	_, err = s.Commit(ctx, func(registry.View) (registry.Change, error) { return puts(alloc("new")), nil })
	if err != nil {
		t.Errorf("%s: accepted, and then: %v", what, err)
	}
	for err := range s.Check() {
		if !strings.Contains(err.Error(), "unreachable unfreed") { // a page that is lost to the free list harms nobody
			t.Errorf("%s: accepted, and then: %v", what, err)
		}
	}
	return false
}

type corpus struct {
	dir, want string
	n         int
}

func newCorpus(t *testing.T, file []byte) *corpus {
	path := statePath(t)
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	s := start(t, Options{Path: path})
	return &corpus{dir: t.TempDir(), want: everything(t, s.Store)}
}

func (c *corpus) refused(t *testing.T, what, path string, file []byte, err error) {
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

// TestDamage holds that whatever is done to a file, opening it neither crashes nor begins anew nor gives back anything else than was
// stored.
func TestDamage(t *testing.T) {
	file := sample(t)
	c := newCorpus(t, file)
	random := rand.New(rand.NewPCG(1, 2))
	page := func(n int) []byte { return file[n*pageSize : (n+1)*pageSize] }
	count := len(file) / pageSize
	t.Logf("%d pages", count)

	if c.damaged(t, "as it is", file) {
		t.Fatal("the whole file is refused")
	}
	for size := 0; size < len(file); size += pageSize {
		if !c.damaged(t, fmt.Sprintf("cut to %d bytes", size), file[:size]) {
			t.Errorf("cut to %d bytes: accepted", size)
		}
	}
	for n := range count {
		zeroed := bytes.Clone(file)
		clear(zeroed[n*pageSize : (n+1)*pageSize])
		c.damaged(t, fmt.Sprintf("page %d zeroed", n), zeroed)
		swapped := bytes.Clone(file)
		other := random.IntN(count)
		copy(swapped[n*pageSize:], page(other))
		copy(swapped[other*pageSize:], page(n))
		if n != other {
			c.damaged(t, fmt.Sprintf("pages %d and %d swapped", n, other), swapped)
		}
		torn := bytes.Clone(file)
		copy(torn[n*pageSize+512*random.IntN(8):], page(random.IntN(count))[:512])
		c.damaged(t, fmt.Sprintf("page %d torn", n), torn)
	}
	found := 0
	for range 150 {
		flipped := bytes.Clone(file)
		at, bit := random.IntN(len(file)), random.IntN(8)
		flipped[at] ^= 1 << bit
		if c.damaged(t, fmt.Sprintf("bit %d of byte %d", bit, at), flipped) {
			found++
		}
	}
	t.Logf("%d of 150 flipped bits are in bytes that count", found)
	if found < 15 {
		t.Error("hardly any flipped bit was found")
	}
}

// TestEveryLiveByteCounts flips one bit of each byte of the page headers and of a share of all others: the walker alone decides, and what
// it accepts has the same content, read by the walker.
func TestEveryLiveByteCounts(t *testing.T) {
	file := sample(t)
	want := contentOf(t, file)
	random := rand.New(rand.NewPCG(3, 4))
	for at := range file {
		if at%pageSize >= 24 && random.IntN(400) != 0 {
			continue
		}
		bit := byte(1) << random.IntN(8)
		file[at] ^= bit
		if _, err := verify(bytes.NewReader(file), int64(len(file))); err == nil && contentOf(t, file) != want {
			t.Errorf("bit %#x of byte %d: accepted, and the content differs", bit, at)
		}
		file[at] ^= bit
	}
}

func contentOf(t *testing.T, file []byte) string {
	t.Helper()
	var all bytes.Buffer
	walker, err := newPages(bytes.NewReader(file), int64(len(file)))
	if err == nil {
		err = walker.walk(func(bucket string, key, value []byte) error {
			fmt.Fprintf(&all, "%s %x %s\n", bucket, key, value)
			return nil
		})
	}
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}

// TestDamageIsCopiedOnce: a shim that is started over and over does not fill the disk with copies.
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

// TestDirectedDamage does what a random bit hardly hits and what bbolt would pay for with its next write: a free list that names a page in
// use, and a branch whose key is not the first of the page below it.
func TestDirectedDamage(t *testing.T) {
	file := sample(t)
	walker, err := newPages(bytes.NewReader(file), int64(len(file)))
	if err != nil {
		t.Fatal(err)
	}
	if err := walker.walk(func(string, []byte, []byte) error { return nil }); err != nil {
		t.Fatal(err)
	}
	refused := func(what string, change func(file []byte)) {
		t.Helper()
		harmed := bytes.Clone(file)
		change(harmed)
		if _, err := verify(bytes.NewReader(harmed), int64(len(harmed))); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
	at := int(walker.meta.freelist)*pageSize + headerSize
	refused("a page in use is called free", func(f []byte) { order.PutUint64(f[at:], walker.meta.root) })
	refused("a page is free twice", func(f []byte) { copy(f[at+8:at+16], f[at:at+8]) })
	branches := 0
	for start := 2 * pageSize; start < len(file); start += pageSize {
		if order.Uint16(file[start+8:]) != flagBranch || walker.free[uint64(start/pageSize)] {
			continue
		}
		branches++
		first := start + headerSize
		key := first + int(order.Uint32(file[first:])) + int(order.Uint32(file[first+4:])) - 1
		refused("the key of a branch", func(f []byte) { f[key] ^= 1 })
		refused("a page below itself", func(f []byte) { order.PutUint64(f[first+8:], uint64(start/pageSize)) })
		refused("a page far away", func(f []byte) { order.PutUint64(f[first+8:], 1<<40) })
		refused("a page of 2^32 pages", func(f []byte) { order.PutUint32(f[start+12:], 1<<32-1) })
	}
	if branches == 0 {
		t.Error("the sample has no branch")
	}
}
