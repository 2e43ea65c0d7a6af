package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// smallDisks make and mount file systems of a few MiB.
var smallDisks = map[string]func(t *testing.T, dir string) error{
	"tmpfs": func(_ *testing.T, dir string) error { return unix.Mount("small", dir, "tmpfs", 0, "size=8m") },
	"ext4": func(t *testing.T, dir string) error {
		image := filepath.Join(t.TempDir(), "image")
		err := os.WriteFile(image, nil, 0o600)
		err = errors.Join(err, os.Truncate(image, 12<<20))
		if out, e := exec.Command("mkfs.ext4", "-q", "-m", "0", image).CombinedOutput(); e != nil {
			t.Fatalf("mkfs.ext4: %v: %s", e, out)
		}
		out, e := exec.Command("mount", "-o", "loop", image, dir).CombinedOutput()
		if e != nil {
			t.Logf("mount: %s", out)
		}
		return errors.Join(err, e)
	},
}

// fill uses all free space below dir. The returned function frees it.
func fill(t *testing.T, dir string) (free func()) {
	t.Helper()
	path := filepath.Join(dir, "filler")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for size := 1 << 20; size > 0; {
		_, err := f.Write(make([]byte, size))
		if err == nil {
			err = f.Sync()
		}
		switch {
		case errors.Is(err, unix.ENOSPC):
			size /= 2
		case err != nil:
			t.Fatal(err)
		}
	}
	return func() {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

// onSmallDisk runs the test on each of smallDisks.
func onSmallDisk(t *testing.T, test func(t *testing.T, dir string)) {
	if os.Getuid() != 0 || mount.OnThread(func() error { return unix.Unshare(unix.CLONE_NEWNS) }) != nil {
		t.Skip("only root can mount file systems")
	}
	for name, mount := range smallDisks {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := mount(t, dir); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := unix.Unmount(dir, 0); err != nil {
					t.Error(err)
				}
			})
			test(t, dir)
		})
	}
}

func TestLedgerReservesRoomForReleases(t *testing.T) {
	onSmallDisk(t, func(t *testing.T, dir string) {
		l, err := openLedger(filepath.Join(dir, "agent.db"))
		if err != nil {
			t.Fatal(err)
		}
		defer l.close()
		const allocs = 50
		put := func(i, size int) error {
			id := host.AllocID(fmt.Sprint("alloc-", i))
			return l.write(entry{allocsBucket, string(id), &AllocRecord{ID: id, Reason: strings.Repeat("x", size)}})
		}
		for i := range allocs {
			if err := put(i, 10); err != nil {
				t.Fatal(err)
			}
		}
		if err := l.reserve(allocs); err != nil {
			t.Fatal(err)
		}
		fill(t, dir)
		for i := range allocs {
			if err := put(i, 5000); err != nil {
				t.Fatalf("record %d: %v", i, err)
			}
		}
		if err := l.reserve(1000); !errors.Is(err, registry.ErrExhausted) {
			t.Errorf("reserved more than there is: %v", err)
		}
	})
}

func TestFullStateDiskRefusesOnlyWhatIsNew(t *testing.T) {
	onSmallDisk(t, func(t *testing.T, dir string) {
		withAgentAt(t, dir, func(e *env) {
			e.runPluginAndUser()
			e.submit(batchJob("work", 40, ""))
			e.awaitCount("start ", 42)
			free := fill(e.T, dir)
			refused := func() {
				e.Helper()
				e.hasError(e.trySubmit(serviceJob("new", ""), SubmitOptions{}), registry.ErrExhausted, dir, "job stop")
			}
			refused()
			e.restart(nil)
			refused()
			for _, r := range e.agent.Allocs() {
				if r.Job == "work" {
					e.exit(r, "main", 0)
				}
			}
			e.await("two are left", func(all []*AllocRecord) bool { return len(unended(all, lastRank)) == 2 })
			e.restart(nil)
			e.stopJob("user", StopOptions{})
			e.awaitState("user", AllocStopped)
			e.stopJob("disk", StopOptions{Purge: true})
			e.awaitAllEnded()
			e.has("stop user/main", "released user", "stop disk/plugin")
			e.hasCount("end work/", 40)
			e.hasCount("start ", 42)
			free()
			e.submit(serviceJob("new", ""))
			e.awaitRunning("new")
			e.stopAll()
		})
	})
}

// fillLedger makes each write to the ledger fail while the result is true.
func (e *env) fillLedger() *atomic.Bool {
	var full atomic.Bool
	e.agent.ledger.before = func() error {
		if full.Load() {
			return unix.ENOSPC
		}
		return nil
	}
	return &full
}

// A change that cannot be recorded does not take effect. It is retried, and the shortage is reported until then.
func TestChangesWaitForSpace(t *testing.T) {
	withAgent(t, func(e *env) {
		full := e.fillLedger()
		e.submit(batchJob("ends", 1, ""))
		e.submit(serviceJob("stays", ""))
		ends, _ := e.awaitRunning("ends"), e.awaitRunning("stays")
		full.Store(true)
		e.exit(ends, "main", 0)
		synctest.Wait()
		if e.agent.Shortage() == "" {
			t.Error("the shortage is not reported")
		}
		time.Sleep(time.Minute)
		if r := e.agent.record(ends.ID); r.State != AllocRunning {
			t.Errorf("published before it is on disk: %s", r.State)
		}
		e.hasError(e.agent.StopJob(e.Context(), "stays", e.shim, StopOptions{}), registry.ErrExhausted)
		full.Store(false)
		e.awaitState("ends", AllocComplete)
		time.Sleep(time.Minute)
		if text := e.agent.Shortage(); text != "" {
			t.Errorf("the shortage is still reported: %q", text)
		}
		e.stopAll()
	})
}

// If a start fails because of a full disk, or because no container engine answers, that is no failure of the task. The
// start is retried under any restart policy, with pauses even if the policy has none.
func TestStartsWaitForSpaceAndEngine(t *testing.T) {
	for _, why := range []error{
		registry.Errorf(registry.ErrExhausted, "write task.json: %w", unix.ENOSPC),
		registry.Errorf(registry.ErrUnavailable, "no container engine answers"),
	} {
		withAgent(t, func(e *env) {
			e.driver.failStarts(why)
			e.submit(serviceJob("work", `{"restart":[{"attempts":0,"interval":"0s","delay":"0s","mode":"fail"}]}`))
			e.awaitAlloc("work", "shows the reason", func(r *AllocRecord) bool {
				return strings.Contains(r.Tasks["main"].Reason, why.Error())
			})
			time.Sleep(time.Hour)
			e.driver.failStarts(nil)
			r := e.awaitRunning("work")
			rec := r.Tasks["main"]
			if n := len(r.Notes); n > 10 || rec.Restarts.Total != 0 || rec.Attempt > uint64(time.Hour/maxPause)+2 {
				e.Errorf("%d notes, %d attempts, restarts %+v", n, rec.Attempt, rec.Restarts)
			}
			e.stopAll()
		})
	}
}

// The progress of a driver before a start is shown as the task's reason, and in one note. A stop of the job ends the
// preparation.
func TestPreparationOfATaskIsShownAndEndsWithItsJob(t *testing.T) {
	withAgent(t, func(e *env) {
		e.driver.prepare = func(ctx context.Context, progress func(string)) error {
			progress("pulling image box")
			progress("pulling image box: 1MiB of 2MiB")
			<-ctx.Done()
			return ctx.Err()
		}
		e.submit(serviceJob("work", ""))
		e.awaitAlloc("work", "shows its progress", func(r *AllocRecord) bool {
			return r.Tasks["main"].Reason == "pulling image box: 1MiB of 2MiB"
		})
		e.stopJob("work", StopOptions{})
		r := e.awaitState("work", AllocStopped)
		notes := 0
		for _, n := range r.Notes {
			if strings.Contains(n.Text, "pulling image box") {
				notes++
			}
		}
		if notes != 1 {
			e.Errorf("%d notes: %+v", notes, r.Notes)
		}
		e.hasCount("start", 0)
	})
}
