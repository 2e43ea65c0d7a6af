package host_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"holdfast/host"
)

// binaries returns the digests in the shim store.
func (w *env) binaries() (sums []string) {
	w.t.Helper()
	entries, err := os.ReadDir(filepath.Join(w.config.StateDir, "shims"))
	must(w.t, err)
	for _, e := range entries {
		sums = append(sums, e.Name())
	}
	return sums
}

// Four swaps to four binaries leave three: the running one and the two before it, whether the replaced shims have ended
// or not.
func TestSwapsKeepThreeBinaries(t *testing.T) {
	t.Parallel()
	for _, bake := range []time.Duration{time.Millisecond, time.Hour} {
		t.Run(bake.String(), func(t *testing.T) {
			t.Parallel()
			w := newEnv(t)
			w.config.Bake = bake
			w.open()
			var sums []string
			for i := range 4 {
				report, err := w.host.Swap(w.ctx(), host.Binary{Path: another(t, w.dir, fmt.Sprint("binary-", i))})
				must(t, err)
				sums = append(sums, report.To)
				if stored := w.binaries(); len(stored) > 3 || !slices.Contains(stored, report.From) {
					t.Errorf("swap %d: of %v and the first one, %v are stored", i, sums, stored)
				}
				if bake < time.Second {
					w.awaitCommit()
				}
			}
			last := slices.Sorted(slices.Values(sums[1:]))
			if stored := w.binaries(); !slices.Equal(stored, last) {
				t.Errorf("stored are %v, not %v", stored, last)
			}
		})
	}
}

// refuse makes swaps that are refused, each to a new binary, which is in the store by then.
func (w *env) refuse(names ...string) {
	w.t.Helper()
	for _, name := range names {
		path := filepath.Join(w.dir, name)
		must(w.t, os.WriteFile(path, []byte("#!/bin/sh\nexit 3 # "+name+"\n"), 0o700))
		if report, err := w.host.Swap(w.ctx(), host.Binary{Path: path}); err == nil ||
			report.Failed != host.SwapPrepare {
			w.t.Fatalf("%s: %v: %+v", name, err, report)
		}
		if stored := w.binaries(); len(stored) > 3 {
			w.t.Errorf("after %s was refused, %v are stored", name, stored)
		}
	}
}

// A refused binary evicts none that was active: the one before can be swapped back to, at the next host too.
func TestRefusedBinariesEvictNone(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	w.config.Bake = time.Millisecond
	w.open()
	var last host.SwapReport
	for _, name := range []string{"one", "two"} {
		var err error
		last, err = w.host.Swap(w.ctx(), host.Binary{Path: another(t, w.dir, name)})
		must(t, err)
		w.awaitCommit()
	}
	w.refuse("a", "b", "c")
	must(t, w.host.Close())
	w.open()
	w.refuse("d", "e", "f")
	report, err := w.host.Swap(w.ctx(), host.Binary{SHA256: last.From})
	if err != nil || report.To != last.From || report.From != last.To {
		t.Errorf("back from %s to %s: %v, %+v", last.To, last.From, err, report)
	}
}

// bytesRead returns how much this process and its dead children have read by system calls. Mapped pages are not in it.
func bytesRead(t *testing.T) (n int64) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/io")
	must(t, err)
	for line := range strings.Lines(string(text)) {
		if _, err := fmt.Sscanf(line, "rchar: %d", &n); err == nil {
			return n
		}
	}
	t.Fatalf("/proc/self/io says %q", text)
	return 0
}

// A crash restart does not read the binary. Open and Swap do, which shows that the test would see it. This test is not
// parallel, as it counts the reads of the test process.
func TestCrashRestartDoesNotHash(t *testing.T) {
	w := newEnv(t)
	w.config.Bake = time.Millisecond
	next := another(t, w.dir, "next")
	info, err := os.Stat(next)
	must(t, err)
	reads := func(what string, whole bool, f func()) {
		t.Helper()
		before := bytesRead(t)
		f()
		if n := bytesRead(t) - before; (n > info.Size()/2) != whole {
			t.Errorf("%s: %d bytes were read; the binary has %d", what, n, info.Size())
		}
	}
	reads("open", true, w.open)
	reads("a crash", false, w.crash)
	reads("a swap", true, func() {
		_, err := w.host.Swap(w.ctx(), host.Binary{Path: next})
		must(t, err)
	})
	w.awaitCommit()
	reads("a crash after the swap", false, w.crash)
	stored := filepath.Join(w.config.StateDir, "shims", w.host.Swaps()[0].To)
	now := time.Now()
	must(t, os.Chtimes(stored, now, now)) // its content may have changed
	reads("a crash after the binary was touched", true, w.crash)
}

// A binary that is replaced without a digest is trusted and logged. If nothing is at its path, its verified copy runs.
func TestConfiguredBinaryIsReplacedOrGone(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	path := another(t, w.dir, "configured")
	w.config.Shim = host.Binary{Path: path}
	w.open()
	first := w.host.ShimState().SHA256
	must(t, w.host.Close())
	must(t, os.Rename(another(t, w.dir, "replacement"), path))
	w.open()
	second := w.host.ShimState().SHA256
	if log := w.log.String(); second == first || !strings.Contains(log, "was replaced") ||
		!strings.Contains(log, first) {
		t.Errorf("%s runs after %s, and the log does not name both", second, first)
	}
	must(t, w.host.Close())
	must(t, os.Remove(path))
	w.open()
	if got := w.host.ShimState().SHA256; got != second ||
		!strings.Contains(w.log.String(), "the shim's binary is gone") {
		t.Errorf("%s runs, want %s", got, second)
	}
}
