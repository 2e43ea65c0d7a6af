package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func testStore(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := openStore(dir)
	must(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

// files lists what lies under the data directory, lock files and empty directories aside.
func files(t *testing.T, dir string) []string {
	t.Helper()
	var found []string
	for _, sub := range []string{"volumes", "images", "dirs", "nodes"} {
		entries, err := os.ReadDir(filepath.Join(dir, sub))
		must(t, err)
		for _, e := range entries {
			found = append(found, sub+"/"+e.Name())
		}
	}
	return found
}

func dirPool(t *testing.T, dir string, capacity int64) *Pool {
	t.Helper()
	p, err := Open(dir, DirBackend, capacity, "ext4")
	must(t, err)
	return p
}

func want(name string) Request {
	return Request{Name: Name(name), Usage: Usage{Mode: Writer, FileSystem: "ext4"}}
}

func TestRecordSurvivesReopen(t *testing.T) {
	dir := t.TempDir()
	p := dirPool(t, dir, 1<<30)
	made, err := p.Create(t.Context(), want("a"))
	must(t, err)
	again, err := testStore(t, dir).find(made.ID)
	if err != nil || again.Name != "a" || again.Bytes != defaultBytes || again.Usage != made.Usage ||
		again.State != Ready {
		t.Errorf("after reopen: %+v, %v", again, err)
	}
}

func TestLockTellsHoldersApart(t *testing.T) {
	dir := t.TempDir()
	one, two := testStore(t, dir), testStore(t, dir) // as in two processes
	id := IDFor(Volume, "a")
	h, err := one.Lock(id)
	must(t, err)
	for _, s := range []*Store{one, two} {
		if _, err := s.Lock(id); status.Code(err) != codes.Aborted {
			t.Errorf("second lock: %v", err)
		}
	}
	other, err := two.Lock(IDFor(Volume, "b"))
	if err != nil {
		t.Errorf("lock of another volume: %v", err)
	}
	other.Release()
	h.Release()
	h, err = two.Lock(id)
	must(t, err)
	h.Release()
}

func TestDamagedRecordIsReported(t *testing.T) {
	dir := t.TempDir()
	p := dirPool(t, dir, 1<<30)
	r, err := p.Create(t.Context(), want("a"))
	must(t, err)
	for _, text := range []string{"", "{", `{"id":"` + string(IDFor(Volume, "b")) + `","state":"ready"}`, `{"id":"` +
		string(r.ID) + `"}`} {
		must(t, os.WriteFile(filepath.Join(dir, recordFile(r.ID)), []byte(text), 0o600))
		if _, err := p.find(r.ID); status.Code(err) != codes.DataLoss {
			t.Errorf("record %q: %v", text, err)
		}
		if err := p.Delete(Volume, string(r.ID), func(Record) error { return nil }); status.Code(err) != codes.DataLoss {
			t.Errorf("delete with record %q: %v", text, err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, dirName(r.ID))); err != nil {
		t.Errorf("the volume's bytes: %v", err)
	}
}

func TestRecoverRemovesWhatIsHalfDone(t *testing.T) {
	for _, state := range []State{Making, Removing} {
		dir := t.TempDir()
		p := dirPool(t, dir, 1<<30)
		r, err := p.Create(t.Context(), want("half"))
		must(t, err)
		if _, err := p.Create(t.Context(), want("whole")); err != nil {
			t.Fatal(err)
		}
		r.State = state
		must(t, p.replace(recordFile(r.ID), r))
		if _, err := p.find(r.ID); status.Code(err) != codes.NotFound {
			t.Errorf("%s: found: %v", state, err)
		}
		h, err := p.Lock(r.ID) // somebody is still at it
		must(t, err)
		if ids, err := p.Recover(); len(ids) > 0 || err != nil {
			t.Errorf("%s: recovered %v, %v under a lock", state, ids, err)
		}
		h.Release()
		if ids, err := p.Recover(); !slices.Equal(ids, []ID{r.ID}) || err != nil {
			t.Errorf("%s: recovered %v, %v", state, ids, err)
		}
		whole := IDFor(Volume, "whole")
		if got, keep := files(t, dir), []string{recordFile(whole), dirName(whole)}; !slices.Equal(got, keep) {
			t.Errorf("%s: left are %q, not %q", state, got, keep)
		}
	}
}

func TestVolumeSizesAreChecked(t *testing.T) {
	const capacity = 256 << 20
	for _, c := range []struct {
		least, most, bytes int64
		code               codes.Code
	}{
		{0, 0, defaultBytes, codes.OK},
		{1, 0, minBytes, codes.OK},
		{minBytes + 1, 0, minBytes + blockBytes, codes.OK},
		{0, 32 << 20, 32 << 20, codes.OK},
		{20 << 20, 20 << 20, 20 << 20, codes.OK},
		{capacity, 0, capacity, codes.OK},
		{capacity + 1, 0, 0, codes.OutOfRange},
		{0, minBytes - 1, 0, codes.OutOfRange},
		{minBytes + 1, minBytes + 2, 0, codes.OutOfRange},
		{2, 1, 0, codes.OutOfRange},
		{-1, 0, 0, codes.OutOfRange},
		{0, -1, 0, codes.OutOfRange},
	} {
		dir := t.TempDir()
		w := want("a")
		w.AtLeast, w.AtMost = c.least, c.most
		r, err := dirPool(t, dir, capacity).Create(t.Context(), w)
		if status.Code(err) != c.code || r.Bytes != c.bytes {
			t.Errorf("at least %d, at most %d: %d bytes, %v", c.least, c.most, r.Bytes, err)
		}
	}
}

func TestCapacityIsSharedByProcesses(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	for i := range 4 {
		p := dirPool(t, dir, 5*defaultBytes)
		wg.Go(func() {
			for j := range 4 {
				_, err := p.Create(t.Context(), want(strings.Repeat("v", 1+4*i+j)))
				if err != nil && status.Code(err) != codes.ResourceExhausted {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	entries, err := os.ReadDir(filepath.Join(dir, "dirs"))
	if err != nil || len(entries) != 5 {
		t.Errorf("%d volumes fit, %v", len(entries), err)
	}
}

func TestExistingVolumeOfAnotherKind(t *testing.T) {
	p := dirPool(t, t.TempDir(), 1<<30)
	first := want("a")
	first.AtLeast = 32 << 20
	r, err := p.Create(t.Context(), first)
	must(t, err)
	same := first
	same.Usage.Mode = Reader // narrower
	same.AtMost = 64 << 20
	if again, err := p.Create(t.Context(), same); err != nil || again.ID != r.ID {
		t.Errorf("compatible: %+v, %v", again, err)
	}
	for what, change := range map[string]func(*Request){
		"larger":     func(w *Request) { w.AtLeast = 33 << 20 },
		"smaller":    func(w *Request) { w.AtLeast, w.AtMost = 0, 31<<20 },
		"wider":      func(w *Request) { w.Usage.Mode = MultiWriter },
		"parameters": func(w *Request) { w.Parameters = "other" },
	} {
		w := first
		change(&w)
		if _, err := p.Create(t.Context(), w); status.Code(err) != codes.AlreadyExists {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestFailedMakeLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	p, err := Open(dir, LoopBackend, 1<<30, "ext4")
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Create(ctx, want("a")); !errors.Is(err, context.Canceled) {
		t.Errorf("create with a finished context: %v", err)
	}
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("left are %q", left)
	}
}
