package agent

import (
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

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// smallDisks make a file system of a few MiB and mount it.
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

// fill leaves no byte free below dir, and returns what frees the space again.
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

// onSmallDisk runs the test on each of them.
func onSmallDisk(t *testing.T, test func(t *testing.T, dir string)) {
	if os.Getuid() != 0 || mount.OnThread(func() error { return unix.Unshare(unix.CLONE_NEWNS) }) != nil {
		t.Skip("only root of the machine mounts file systems")
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
			t.Errorf("more is reserved than there is: %v", err)
		}
	})
}

func TestFullStateDiskRefusesOnlyWhatIsNew(t *testing.T) {
	onSmallDisk(t, func(t *testing.T, dir string) {
		inWorldAt(t, dir, func(w *world) {
			w.submit(job("disk", "system", tasks("g", plugin("disk"))))
			w.submit(job("user", "service", withVolumes(tasks("g", task("main", "")))))
			w.submit(batch("work", 40, ""))
			w.awaitRunning("user")
			w.await("all run", func([]*AllocRecord) bool { return w.count("start ") == 42 })
			free := fill(w.T, dir)
			refused := func() {
				w.Helper()
				_, err := w.agent.Submit(w.Context(), job("new", "service", tasks("g", task("main", ""))), Source{}, w.shim, SubmitOptions{})
				if !errors.Is(err, registry.ErrExhausted) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "job stop") {
					w.Errorf("a new job on a full disk: %v", err)
				}
			}
			refused()
			w.again(nil)
			refused()
			w.endAllOf("work", 0)
			w.again(nil)
			if err := w.agent.StopJob(w.Context(), "user", w.shim, StopOptions{}); err != nil {
				w.Fatal(err)
			}
			w.awaitState("user", AllocStopped)
			if err := w.agent.StopJob(w.Context(), "disk", w.shim, StopOptions{Purge: true}); err != nil {
				w.Fatal(err)
			}
			w.await("the plugin has ended", allEnded)
			w.has("stop user/main", "released user", "stop disk/plugin")
			if n := w.count("end work/"); n != 40 || w.count("start ") != 42 {
				w.Errorf("%d of 40 batch allocs have ended, %d starts", n, w.count("start "))
			}
			free()
			w.submit(job("new", "service", tasks("g", task("main", ""))))
			w.awaitRunning("new")
			w.takeDown()
		})
	})
}

// endAllOf has the tasks of a job end.
func (w *world) endAllOf(job string, code int) {
	w.Helper()
	for _, r := range w.agent.Allocs() {
		if r.Job == job {
			w.machine.end(attemptID(r.ID, "main", 1), code, "end")
		}
	}
	w.await(job+" has ended", func(all []*AllocRecord) bool {
		for _, r := range all {
			if r.Job == job && !r.State.Ended() {
				return false
			}
		}
		return true
	})
}

// What cannot be written down now is written down when there is room again, and nothing has happened before.
func TestChangesWaitForRoomOnTheDisk(t *testing.T) {
	inWorld(t, func(w *world) {
		var isFull atomic.Bool
		w.agent.ledger.before = func() error {
			if isFull.Load() {
				return unix.ENOSPC
			}
			return nil
		}
		w.submit(job("ends", "batch", tasks("g", task("main", ""))))
		w.submit(job("stays", "service", tasks("g", task("main", ""))))
		ends, _ := w.awaitRunning("ends"), w.awaitRunning("stays")
		isFull.Store(true)
		w.machine.end(attemptID(ends.ID, "main", 1), 0, "end")
		time.Sleep(time.Minute)
		if r := w.agent.record(ends.ID); r.State != AllocRunning {
			t.Errorf("published, and not on disk: %s", r.State)
		}
		if err := w.agent.StopJob(w.Context(), "stays", w.shim, StopOptions{}); !errors.Is(err, registry.ErrExhausted) {
			t.Errorf("stopped, and not on disk: %v", err)
		}
		isFull.Store(false)
		w.awaitState("ends", AllocComplete)
		w.takeDown()
	})
}

// A start that lacks room is no failure of the task: a policy without any restart allows it to come later.
func TestStartsWaitForRoomOnTheDisk(t *testing.T) {
	inWorld(t, func(w *world) {
		w.machine.fails(registry.Errorf(registry.ErrExhausted, "write task.json: %w", unix.ENOSPC))
		w.submit(job("work", "service", tasks("g", task("main", `{"restart":[{"attempts":0,"mode":"fail"}]}`))))
		w.await("the reason is shown", func(all []*AllocRecord) bool {
			return len(all) == 1 && strings.Contains(all[0].Tasks["main"].Reason, "no space left")
		})
		time.Sleep(time.Hour)
		w.machine.fails(nil)
		w.awaitRunning("work")
		w.takeDown()
	})
}

// A job that was accepted is placed when there is room again, and says until then what it waits for.
func TestPlacementsWaitForRoomOnTheDisk(t *testing.T) {
	inWorld(t, func(w *world) {
		var isFull atomic.Bool
		w.agent.ledger.before = func() error {
			if isFull.Load() {
				return unix.ENOSPC
			}
			return nil
		}
		w.agent.writing.Lock() // reconcile is not first
		j := job("work", "service", tasks("g", task("main", "")))
		err := w.agent.commit(func() { w.agent.jobs["work"] = &JobRecord{Job: *j, Version: 1} }, entry{jobsBucket, "work", &JobRecord{Job: *j, Version: 1}})
		if err != nil {
			t.Fatal(err)
		}
		isFull.Store(true)
		w.agent.writing.Unlock()
		w.agent.kick()
		synctest.Wait()
		if text := w.agent.Shortage(); !strings.Contains(text, "no space left") {
			t.Errorf("it waits for %q", text)
		}
		isFull.Store(false)
		w.awaitRunning("work")
		if text := w.agent.Shortage(); text != "" {
			t.Errorf("it still waits for %q", text)
		}
		w.takeDown()
	})
}

// A shortage that a release met is over when the release is written down, also if nothing is placed then.
func TestShortageEndsWithoutAPlacement(t *testing.T) {
	inWorld(t, func(w *world) {
		var isFull atomic.Bool
		w.agent.ledger.before = func() error {
			if isFull.Load() {
				return unix.ENOSPC
			}
			return nil
		}
		w.submit(job("ends", "batch", tasks("g", task("main", ""))))
		ends := w.awaitRunning("ends")
		isFull.Store(true)
		w.machine.end(attemptID(ends.ID, "main", 1), 0, "end")
		synctest.Wait()
		if w.agent.Shortage() == "" {
			t.Error("it does not say what it waits for")
		}
		isFull.Store(false)
		w.awaitState("ends", AllocComplete)
		time.Sleep(time.Minute)
		if text := w.agent.Shortage(); text != "" {
			t.Errorf("it still waits for %q", text)
		}
		w.takeDown()
	})
}

func TestLogsBlockBoundsLogs(t *testing.T) {
	read := func(rest string) (taskSpec, error) {
		return newTaskSpec("service", hooks.Group{}, task("main", rest))
	}
	s, err := read(`{"logs":[{"max_files":3,"max_file_size":2}]}`)
	if err != nil || s.logFiles != 3 || s.logSize != 2<<20 {
		t.Errorf("%d files of %d bytes: %v", s.logFiles, s.logSize, err)
	}
	r := &AllocRecord{ID: "a"}
	if d := (Node{}).attempt(r, s, 1, hooks.Plan{}, "/a", true); d.LogFiles != 3 || d.LogSize != 2<<20 {
		t.Errorf("the driver is told %d files of %d bytes", d.LogFiles, d.LogSize)
	}
	for _, bad := range []string{`{"logs":[{"max_files":0}]}`, `{"logs":[{"max_file_size":-1}]}`} {
		if _, err := read(bad); !errors.Is(err, registry.ErrInvalid) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
