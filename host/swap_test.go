package host_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"holdfast/host"
)

// another returns a shim of another digest: bytes after a program have no effect.
func another(t *testing.T, dir, name string) string {
	t.Helper()
	program, err := os.ReadFile(shimBinary)
	must(t, err)
	path := filepath.Join(dir, name)
	must(t, os.WriteFile(path, append(program, name...), 0o700))
	return path
}

// No call, read or watch fails. Status never mixes two shims.
func TestSwapUnderLoad(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	w.config.Bake = 50 * time.Millisecond
	w.open()
	ctx, cancel := context.WithCancel(w.ctx())
	defer cancel()
	var calls, reads atomic.Int64
	var load sync.WaitGroup
	seen := make(chan host.Event, 100_000)
	var watch sync.WaitGroup
	watch.Go(func() {
		err := w.host.Watch(ctx, host.WatchOptions{}, func(e host.Event) error { seen <- e; return nil })
		if !errors.Is(err, context.Canceled) {
			t.Errorf("watch: %v", err)
		}
	})
	for worker := range 4 {
		load.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				id := host.AllocID(fmt.Sprintf("a-%d-%d", worker, n))
				limited, end := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
				err := w.host.ReleaseAlloc(limited, id)
				end()
				if err != nil {
					t.Errorf("release: %v", err)
					return
				}
				calls.Add(1)
				if _, _, err := w.host.Volumes(context.WithoutCancel(ctx), host.VolumeQuery{}); err != nil {
					t.Errorf("read: %v", err)
					return
				}
				reads.Add(1)
			}
		})
	}
	load.Go(func() {
		binary, index := map[int]string{}, host.Seq(0)
		for ctx.Err() == nil {
			st, err := w.host.Status(context.WithoutCancel(ctx))
			if known, seen := binary[st.PID]; err != nil || seen && known != st.SHA256 || st.Protocol == 0 ||
				st.Generation == 0 ||
				st.Index < index {
				t.Errorf("status: %v, %+v, which was of binary %q, after index %d", err, st, known, index)
				return
			}
			binary[st.PID], index = st.SHA256, st.Index
		}
	})
	binaries := []string{another(t, w.dir, "one"), another(t, w.dir, "two")}
	var worst time.Duration
	const swaps = 6
	for i := range swaps {
		report, err := w.host.SwapAs(w.ctx(), host.Binary{Path: binaries[i%2]}, "tester")
		if err != nil {
			t.Fatalf("swap %d: %v", i, err)
		}
		worst = max(worst, report.Hold)
		t.Logf("%+v", report.Steps)
		st, err := w.host.Status(w.ctx())
		must(t, err)
		if st.SHA256 != report.To || st.Generation != report.Generation {
			t.Errorf("after swap %d the shim is %+v, the report says %+v", i, st, report)
		}
	}
	cancel()
	load.Wait()
	watch.Wait()
	t.Logf("%d calls, %d reads, worst hold %s", calls.Load(), reads.Load(), worst)
	if calls.Load() < 100 || reads.Load() < 100 {
		t.Error("there was no load")
	}
	all := w.host.Swaps()
	if len(all) != swaps || all[0].By != "tester" || all[1].Outcome != host.SwapCommitted {
		t.Errorf("history: %+v", all)
	}
	var steps []host.SwapStep
	for _, s := range all[1].Steps {
		steps = append(steps, s.Step)
	}
	if !slices.Equal(steps,
		[]host.SwapStep{"verify", "prepare", "quiesce", "fence", "activate", "resume", "bake", "commit"}) {
		t.Errorf("the steps of a swap are %v", steps)
	}
}

// Nothing changes, and the error names step and reason.
func TestSwapRefusesABadCandidate(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	before, err := w.host.Status(w.ctx())
	must(t, err)
	rubbish := filepath.Join(w.dir, "rubbish")
	must(t, os.WriteFile(rubbish, []byte("#!/bin/sh\necho rubbish\nexit 3\n"), 0o700))
	for _, c := range []struct {
		what   string
		binary host.Binary
		says   string
	}{
		{"no such file", host.Binary{Path: filepath.Join(w.dir, "none")}, "verify"},
		{"another digest", host.Binary{Path: shimBinary, SHA256: strings.Repeat("0", 64)}, "verify"},
		{"no shim", host.Binary{Path: rubbish}, "prepare"},
	} {
		report, err := w.host.Swap(w.ctx(), c.binary)
		if err == nil || !strings.Contains(err.Error(), c.says) || report.Outcome != host.SwapRefused ||
			string(report.Failed) != c.says ||
			report.Hold != 0 {
			t.Errorf("%s: %v, %+v", c.what, err, report)
		}
		t.Log(err)
		after, err := w.host.Status(w.ctx())
		must(t, err)
		if after.PID != before.PID || after.Generation != before.Generation {
			t.Errorf("%s: the shim was %+v and is %+v", c.what, before, after)
		}
	}
}

// After such a swap, no rollback would be possible.
func TestSwapRefusesAStateThatTheOldShimCannotRead(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	st, err := w.host.Status(w.ctx())
	must(t, err)
	for _, readable := range []uint32{0, 1, st.Schema} {
		if err := w.host.RehearseReadable(w.ctx(), readable); err != nil {
			t.Errorf("readable by schema %d and newer: %v", readable, err)
		}
	}
	err = w.host.RehearseReadable(w.ctx(), st.Schema+1)
	if !errors.Is(err, host.ErrUnsupported) {
		t.Errorf("readable by a newer one: %v", err)
	}
	for _, says := range []string{fmt.Sprintf("only shims of schema %d or newer", st.Schema+1),
		"swap to a release between the two first"} {
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v does not say %q", err, says)
		}
	}
}

func TestSwapRollsBackWhenTheNewShimDies(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	w.open()
	before, err := w.host.Status(w.ctx())
	must(t, err)
	report, err := w.host.Swap(w.ctx(), host.Binary{Path: another(t, w.dir, "young")})
	must(t, err)
	w.kill()
	after, err := w.host.Status(w.ctx())
	must(t, err)
	if after.PID != before.PID || after.SHA256 != before.SHA256 || after.Generation <= report.Generation {
		t.Errorf("before %+v, after %+v", before, after)
	}
	if last := w.host.Swaps()[0]; last.Outcome != host.SwapRolledBack || last.Failed != host.SwapBake {
		t.Errorf("%+v", last)
	}
}
