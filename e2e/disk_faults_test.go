package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/fault"
)

// activation is an env with a disk of its own and a swap whose new shim is about to activate.
type activation struct {
	*env
	disk       *testDisk
	plugin     *pluginTask
	swapped    <-chan error
	report     host.SwapReport
	resumeFile string
}

// newActivation swaps to a program. first is called before the swap; it may be nil.
func newActivation(t *testing.T, program string, first func(*activation)) *activation {
	t.Parallel()
	disk := newDisk(t, "ext4", "400M")
	a := &activation{env: unopenedEnv(t, allCaps...), disk: disk}
	a.config.StateDir, a.config.SwapBudget = filepath.Join(disk.dir, "state"), 2*waitLimit
	a.open()
	a.plugin = a.env.addPlugin("alloc-p", csifake.Monolith)
	a.must(a.create("one"))
	a.must(a.create("two"))
	a.must(errOf(a.prepare(a.group("user", request{source: "one"}))))
	if first != nil {
		first(a)
	}
	here := filepath.Join(a.dir, "here")
	a.resumeFile = filepath.Join(a.dir, "go-on")
	path := fault.Binary(t, program, a.dir, "waits",
		"Activate before touch "+here+" times 1", "Activate before wait-for "+a.resumeFile)
	a.swapped = background(func() (err error) {
		a.report, err = a.host.Swap(a.ctx(), host.Binary{Path: path})
		return err
	})
	a.waitUntil("the new shim is at its activation", func() bool { return exists(here) })
	return a
}

// resume lets the new shim activate, and returns the result of the swap.
func (a *activation) resume() error {
	a.t.Helper()
	a.must(os.WriteFile(a.resumeFile, nil, 0o600))
	err := a.result("the swap", a.swapped)
	a.t.Logf("the swap: %s at %q after %s: %v", a.report.Outcome, a.report.Failed, a.report.Hold, err)
	return err
}

// wantReads checks that the active shim answers reads.
func (a *activation) wantReads() {
	a.t.Helper()
	volumes, _, err := a.host.Volumes(a.ctx(), host.VolumeQuery{})
	if err != nil || len(volumes) != 2 {
		a.t.Errorf("%d volumes are listed: %v", len(volumes), err)
	}
}

// deleteAll checks that creations, swaps and deletions succeed again.
func (a *activation) deleteAll() {
	a.t.Helper()
	a.must(a.create("three"))
	a.must(errOf(a.host.Swap(a.ctx(), host.Binary{Path: fault.Binary(a.t, faulty, a.dir, "later")})))
	for _, id := range []string{"one", "two", "three"} {
		a.must(a.delete(id))
	}
	a.stopPlugin(a.plugin)
}

// The disk fills up while the new shim is about to activate. The active shim answers reads and releases what is used.
// New things are refused with advice. Once there is room, everything works again.
func TestDiskFullAtActivation(t *testing.T) {
	slow(t)
	a := newActivation(t, faulty, nil)
	free := a.disk.fill()
	if err := a.resume(); err != nil && !strings.Contains(err.Error(), "swap: activate: ") {
		t.Errorf("the error does not say where: %v", err)
	}
	a.wantReads()
	var made []string
	for err := error(nil); err == nil; {
		id := fmt.Sprint("more-", len(made))
		if err = a.createWith(a.ctx(), id, `parameters = { text = "`+strings.Repeat("x", 3000)+`" }`); err == nil {
			made = append(made, id)
		} else if !errors.Is(err, host.ErrExhausted) || !strings.Contains(err.Error(), "free some space") {
			t.Fatalf("something new on a full disk: %v", err)
		}
		if len(made) > 5000 {
			t.Fatal("the disk is never full")
		}
	}
	t.Logf("%d volumes fit in what was reserved", len(made))
	a.must(a.release("user"))
	for _, id := range made {
		a.must(a.delete(id))
	}
	free()
	a.deleteAll()
}

// The disk fills up while a new shim is about to migrate more than there is room for. The old shim continues with the
// unchanged state and its own generation. Once there is room, the next swap migrates it.
func TestDiskTooFullToMigrate(t *testing.T) {
	slow(t)
	program := filepath.Join(nextBin(), "holdfast-shim-faulty-next")
	a := newActivation(t, program, (*activation).large)
	db := filepath.Join(a.config.StateDir, "shim.db")
	metas, old := a.metas(db), a.host.ShimState().PID
	free := a.disk.fill()
	err := a.resume()
	if !errors.Is(err, host.ErrExhausted) || a.report.Outcome != host.SwapRolledBack {
		t.Errorf("%v; %+v", err, a.report)
	}
	a.wantWords("the swap", err, "swap: activate: ", "make room there")
	if !bytes.Equal(a.metas(db), metas) || a.stateOf().schema["number"] != 1.0 {
		t.Errorf("the state was written to; its schema is %v", a.stateOf().schema)
	}
	if st, err := a.host.Status(a.ctx()); err != nil || st.PID != old || st.Schema != 1 {
		t.Errorf("%+v, %v serves, not process %d", st, err, old)
	}
	a.wantReads()
	a.must(a.release("user"))
	free()
	_, next := releases()
	a.must(errOf(a.host.Swap(a.ctx(), next.binary)))
	if got := a.stateOf().schema["number"]; got != 2.0 {
		t.Errorf("the state has schema %v once there is room", got)
	}
	a.deleteAll()
}

// large makes the records that the next release migrates larger than the space reserved for releases.
func (a *activation) large() {
	a.t.Helper()
	a.config.Workload = host.Workload{
		Allocs: []host.AllocGroup{a.group("user", request{source: "one"})},
		Tasks:  []host.WorkloadTask{a.running(a.plugin.task)},
	}
	a.must(a.host.Close())
	a.enlarge("instances", 6<<20)
	a.open()
}

// A swap that needs room on a full disk is refused before it holds a call, with advice.
func TestSwapOnAFullDisk(t *testing.T) {
	slow(t)
	t.Parallel()
	disk := newDisk(t, "ext4", "400M")
	w := unopenedEnv(t, allCaps...)
	w.config.StateDir, w.config.SwapBudget = filepath.Join(disk.dir, "state"), 2*waitLimit
	w.open()
	p := w.addPlugin("alloc-p", csifake.Monolith)
	w.must(w.create("one"))
	stored := host.Binary{Path: fault.Binary(t, faulty, w.dir, "stored")}
	w.must(errOf(w.host.Swap(w.ctx(), stored)))
	w.must(errOf(w.host.Swap(w.ctx(), w.config.Shim)))
	before, err := w.host.Status(w.ctx())
	w.must(err)
	free := disk.fill()
	for step, b := range map[string]host.Binary{"verify": host.Binary{Path: fault.Binary(t, faulty, w.dir, "new")},
		"prepare": stored} {
		report, err := w.host.Swap(w.ctx(), b)
		t.Logf("%s: %v", step, err)
		if !errors.Is(err, host.ErrExhausted) || !strings.Contains(err.Error(), "swap: "+step) ||
			!strings.Contains(err.Error(), "room") || report.Hold != 0 {
			t.Errorf("a swap that fails at %s: %v, calls held %s", step, err, report.Hold)
		}
	}
	if after, err := w.host.Status(w.ctx()); err != nil || after.PID != before.PID ||
		after.Generation != before.Generation {
		t.Errorf("the shim was %+v and is %+v, %v", before, after, err)
	}
	free()
	w.must(errOf(w.host.Swap(w.ctx(), stored)))
	w.must(w.delete("one"))
	w.stopPlugin(p)
}

// readOnly makes a directory read-only for files that are opened from now on; writable undoes it.
func (d *testDisk) readOnly(dir string) (writable func()) {
	d.t.Helper()
	d.run("mount", "--rbind", dir, dir)
	d.run("mount", "-o", "remount,bind,ro", dir)
	return func() { d.run("mount", "-o", "remount,bind,rw", dir) }
}

// The file system becomes read-only while the new shim is about to activate. The old shim continues without a write: it
// answers reads, and its refusals name the reason. Once the state is writable, everything works again.
func TestDiskReadOnlyAtActivation(t *testing.T) {
	slow(t)
	a := newActivation(t, faulty, nil)
	db := filepath.Join(a.config.StateDir, "shim.db")
	text, err := os.ReadFile(db)
	a.must(err)
	writable := a.disk.readOnly(a.config.StateDir)
	err = a.resume()
	if err == nil || !strings.Contains(err.Error(), "swap: activate: ") ||
		!strings.Contains(err.Error(), unix.EROFS.Error()) {
		t.Errorf("the error does not say where and why: %v", err)
	}
	a.wantReads()
	if now, err := os.ReadFile(db); err != nil || string(now) != string(text) {
		t.Errorf("the state was written to: %v", err)
	}
	if err := a.create("three"); !errors.Is(err, host.ErrExhausted) || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("something new: %v", err)
	}
	writable()
	a.must(a.release("user"))
	a.deleteAll()
}
