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

// Five swaps to five binaries leave three: the running one and the two before it, whether the replaced shims have
// ended or not.
func TestSwapsKeepThreeBinaries(t *testing.T) {
	t.Parallel()
	for _, bake := range []time.Duration{time.Millisecond, time.Hour} {
		t.Run(bake.String(), func(t *testing.T) {
			t.Parallel()
			w := newEnv(t)
			w.config.Bake = bake
			w.open()
			var sums []string
			for i := range 5 {
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
			last := slices.Sorted(slices.Values(sums[2:]))
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
