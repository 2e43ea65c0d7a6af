package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/internal/fault"
)

// The power of the state's disk is cut between fence and activate, or just after the new shim began its generation. The
// next host has everything acknowledged, completes the call that was under way, and does not trust earlier mounts.
func TestPowerCutInASwap(t *testing.T) {
	slow(t)
	for _, kind := range []string{"ext4", "xfs"} {
		for _, when := range []string{"before", "after"} {
			t.Run(kind+"/"+when, func(t *testing.T) {
				t.Parallel()
				powerCut(t, kind, when)
			})
		}
	}
}

func powerCut(t *testing.T, kind, when string) {
	disk := newDisk(t, kind, "600M")
	w := unopenedEnv(t, allCaps...)
	w.config.StateDir, w.config.SwapBudget = filepath.Join(disk.dir, "state"), 2*waitLimit
	w.open()
	p := w.addPlugin("alloc-p", csifake.Monolith)
	for _, id := range []string{"one", "two", "gone", "used"} {
		w.must(w.create(id))
	}
	w.must(w.delete("gone"))
	used := w.group("user", request{source: "used"})
	w.must(errOf(w.prepare(used)))
	released := w.group("released", request{source: "one"})
	w.must(errOf(w.prepare(released)))
	w.must(w.release("released"))
	gate := p.On("CreateVolume").Times(1).Hold()
	long := background(func() error { return w.create("long") })
	w.waitHeld(gate, long)
	before, err := w.host.Status(w.ctx())
	w.must(err)

	here, goOn := filepath.Join(w.dir, "here"), filepath.Join(w.dir, "go-on")
	path := fault.Binary(t, faulty, w.dir, "waits", "Activate "+when+" touch "+here, "Activate "+when+" wait-for "+goOn)
	swapped := background(func() error { return errOf(w.host.Swap(w.ctx(), host.Binary{Path: path})) })
	w.waitUntil("the new shim is at its activation", func() bool { return exists(here) })
	unsaved := filepath.Join(w.config.StateDir, "unsaved")
	w.must(os.WriteFile(unsaved, []byte("never flushed"), 0o600))
	written := time.Now()
	p.Kill()
	copied := disk.cut()
	tooLate := time.Since(written) > 20*time.Second // the kernel writes back after 30 s
	w.dies(goOn)
	gate.Open()
	t.Logf("the swap: %v; the call: %v", <-swapped, <-long)

	disk.powerUp(copied)
	w.must(journal.NoteReboot(w.journal, "csifake.example.org", "node-1"))
	if text, err := os.ReadFile(unsaved); err == nil && len(text) > 0 && !tooLate {
		t.Errorf("the power was not cut: what was not flushed is there: %q", text)
	}
	w.open()
	after, err := w.host.Status(w.ctx())
	w.must(err)
	want := before.Generation + 1
	if when == "after" {
		want++
	}
	if after.Generation != want {
		t.Errorf("generation %d is followed by %d, not %d", before.Generation, after.Generation, want)
	}
	w.recovered()
}

// dies kills the shims and closes the host: writes to the old device are lost.
func (w *env) dies(goOn string) {
	w.t.Helper()
	for _, pid := range shimsOf(w.config.StateDir) {
		w.must(unix.Kill(pid, unix.SIGKILL))
	}
	_ = w.host.Close()
	w.must(os.WriteFile(goOn, nil, 0o600))
}

// recovered checks that acknowledged changes are there, and completes the call that was under way.
func (w *env) recovered() {
	w.t.Helper()
	var ids []string
	volumes, _, err := w.host.Volumes(w.ctx(), host.VolumeQuery{})
	w.must(err)
	for _, v := range volumes {
		ids = append(ids, string(v.ID))
	}
	for _, id := range []string{"one", "two", "used"} {
		if !slices.Contains(ids, id) {
			w.t.Errorf("volume %s is lost: %v", id, ids)
		}
	}
	if slices.Contains(ids, "gone") {
		w.t.Error("the deleted volume is there again")
	}
	if allocs, _, err := w.host.Allocs(w.ctx(), host.AllocQuery{ID: "released"}); err != nil || len(allocs) > 0 {
		w.t.Errorf("the released alloc is there: %+v, %v", allocs, err)
	}
	p := w.addPlugin("alloc-q", csifake.Monolith)
	w.waitUntil("no call is open", func() bool {
		st, err := w.host.Status(w.ctx())
		return err == nil && st.OpenIntents == 0
	})
	now := w.calls("CreateVolume") // the new shim may have sent it before the power was cut
	if last := now[len(now)-1]; last.Name != "long" || codeOf(last) != "OK" {
		w.t.Errorf("the creation that was under way was not sent again: %q", answers(now))
	}
	w.must(w.release("user")) // no host names it any more
	for _, id := range []string{"one", "two", "used", "long"} {
		w.must(w.delete(id))
	}
	w.stopPlugin(p)
}
