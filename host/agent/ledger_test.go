package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	bolt "go.etcd.io/bbolt"

	"holdfast/host/agent/taskdriver"
	"holdfast/registry"
)

func TestDoctorExaminesTheLedger(t *testing.T) {
	open := func(t *testing.T, path string) *ledger {
		l, err := openLedger(path)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	write := func(t *testing.T, path, text string) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for what, c := range map[string]struct {
		prepare func(t *testing.T, path string)
		kind    registry.FindingKind // empty: no finding
		says    string
	}{
		"none":    {func(*testing.T, string) {}, "", ""},
		"healthy": {func(t *testing.T, path string) { _ = open(t, path).close() }, "", ""},
		"of an older version": {func(t *testing.T, path string) {
			l := open(t, path)
			err := l.db.Update(func(tx *bolt.Tx) error { return tx.DeleteBucket(engineBucket) })
			if err := errors.Join(err, l.close()); err != nil {
				t.Fatal(err)
			}
		}, "", ""},
		"empty": {func(t *testing.T, path string) { write(t, path, "") }, "", ""},
		"garbage": {func(t *testing.T, path string) { write(t, path, strings.Repeat("garbage ", 8192)) },
			registry.FoundDamage, "invalid database"},
		"truncated": {func(t *testing.T, path string) {
			_ = open(t, path).close()
			if err := os.Truncate(path, 9000); err != nil {
				t.Fatal(err)
			}
		}, registry.FoundDamage, "truncated"},
		"emptied, with allocs": {func(t *testing.T, path string) {
			write(t, path, "")
			if err := os.MkdirAll(filepath.Join(filepath.Dir(path), "allocs", "a1"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, registry.FoundDamage, "gone or empty"},
		"open in an agent": {func(t *testing.T, path string) {
			l := open(t, path)
			t.Cleanup(func() { _ = l.close() })
		}, registry.FoundUnseen, "locked"},
	} {
		t.Run(what, func(t *testing.T) {
			state := t.TempDir()
			path := ledgerPath(state)
			if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			c.prepare(t, path)
			found, wrong := ExamineLedger(state)
			if wrong != (c.kind != "") || found.Kind != c.kind || !strings.Contains(found.Detail, c.says) {
				t.Errorf("%v: %+v", wrong, found)
			}
		})
	}
}

// While a write to disk hangs, all readers see the state before the write.
func TestStatusAnswersWhileTheDiskHangs(t *testing.T) {
	withAgent(t, func(e *env) {
		e.submit(serviceJob("old", ""))
		old := e.awaitRunning("old")
		hangs, goOn := make(chan struct{}, 1), make(chan struct{})
		e.agent.ledger.before = func() error {
			select {
			case hangs <- struct{}{}:
			default:
			}
			<-goOn
			return nil
		}
		submitted := make(chan error, 1)
		go func() { submitted <- e.trySubmit(serviceJob("new", ""), SubmitOptions{}) }()
		<-hangs
		read := make(chan struct{})
		go func() {
			defer close(read)
			if jobs := e.agent.Jobs(); len(jobs) != 1 {
				t.Errorf("%d jobs are published, one is on disk", len(jobs))
			}
			if r, err := e.agent.Find(string(old.ID)); err != nil || r.State != AllocRunning ||
				len(e.agent.Allocs()) != 1 {
				t.Errorf("the old alloc: %v", err)
			}
			if err := e.agent.Logs(e.Context(), old.ID, "main", LogOptions{Stream: taskdriver.Stdout},
				nil); err != nil {
				t.Error(err)
			}
			e.agent.Retry()
			ctx, cancel := context.WithTimeout(e.Context(), time.Minute)
			defer cancel()
			if err := e.agent.Await(ctx, func(all []*AllocRecord) bool { return len(all) == 1 }); err != nil {
				t.Error(err)
			}
		}()
		synctest.Wait()
		select {
		case <-read:
		default:
			t.Error("a reader waits for the disk")
		}
		close(goOn)
		e.must(<-submitted)
		<-read
		e.awaitRunning("new")
		e.hasCount("start ", 2)
	})
}

func TestErrorOfTheLedgerNamesItsFileOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "loop")
	if err := os.Symlink(path, path); err != nil {
		t.Fatal(err)
	}
	if _, err := openLedger(path); err == nil || strings.Count(err.Error(), path) != 1 {
		t.Errorf("%v", err)
	}
}
