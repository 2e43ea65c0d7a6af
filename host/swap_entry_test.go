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
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/host"
	"holdfast/internal/fault"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
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

// No call fails. Status never mixes two shims.
func TestSwapUnderLoad(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	w.config.Bake = 50 * time.Millisecond
	w.open()
	ctx, cancel := context.WithCancel(w.ctx())
	defer cancel()
	var load sync.WaitGroup
	load.Go(func() {
		for ctx.Err() == nil {
			if err := w.host.ReleaseAlloc(context.WithoutCancel(ctx), "a"); err != nil {
				t.Errorf("release: %v", err)
				return
			}
		}
	})
	load.Go(func() {
		binary, index := map[int]string{}, host.Seq(0)
		for ctx.Err() == nil {
			st, err := w.host.Status(context.WithoutCancel(ctx))
			if known, seen := binary[st.PID]; err != nil || seen && known != st.SHA256 || st.Protocol == 0 ||
				st.Generation == 0 || st.Index < index {
				t.Errorf("status: %v, %+v, which was of binary %q, after index %d", err, st, known, index)
				return
			}
			binary[st.PID], index = st.SHA256, st.Index
		}
	})
	for _, name := range []string{"one", "two"} {
		report, err := w.host.SwapAs(w.ctx(), host.Binary{Path: another(t, w.dir, name)}, "tester")
		if err != nil {
			t.Fatalf("swap to %s: %v", name, err)
		}
		st, err := w.host.Status(w.ctx())
		must(t, err)
		if st.SHA256 != report.To || st.Generation != report.Generation {
			t.Errorf("after the swap to %s the shim is %+v, the report says %+v", name, st, report)
		}
	}
	cancel()
	load.Wait()
	all := w.host.Swaps()
	if len(all) != 2 || all[0].By != "tester" || all[1].Outcome != host.SwapCommitted {
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

// A bad candidate changes nothing, and the error names the step and the reason.
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
			string(report.Failed) != c.says || report.Hold != 0 {
			t.Errorf("%s: %v, %+v", c.what, err, report)
		}
		after, err := w.host.Status(w.ctx())
		must(t, err)
		if after.PID != before.PID || after.Generation != before.Generation {
			t.Errorf("%s: the shim was %+v and is %+v", c.what, before, after)
		}
	}
}

// A list that was begun at one shim continues at the next with its token. It is complete, and no record is in it twice.
func TestListsGoOnAtTheNextShim(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	w.plugin("a")
	var want, got []string
	for i := range 6 {
		want = append(want, fmt.Sprint("vol-", i))
		must(t, w.create(want[i], ""))
	}
	next := another(t, w.dir, "next")
	for token, pages := "", 0; pages == 0 || token != ""; pages++ {
		reply, err := pb.NewVolumesClient(w.host.Conn()).List(w.ctx(),
			&pb.ListVolumesRequest{Call: &pb.Call{}, Page: &pb.Page{Token: token, Size: 2}})
		must(t, err)
		for _, v := range reply.GetVolumes() {
			got = append(got, v.GetSpec().GetId())
		}
		if token = reply.GetNextToken(); pages > 0 {
			w.crash()
			continue
		}
		_, err = w.host.Swap(w.ctx(), host.Binary{Path: next})
		must(t, err)
	}
	if !slices.Equal(got, want) {
		t.Errorf("over three shims the list is %v", got)
	}
}

// A shim that stands by refuses calls, and cannot activate while the new one has the state.
func TestReleasedShimRefuses(t *testing.T) {
	t.Parallel()
	w := openLongBake(t)
	task, old := w.task("a"), w.host.Conn()
	_, err := w.host.Swap(w.ctx(), host.Binary{Path: another(t, w.dir, "next")})
	must(t, err)
	before, err := w.host.Status(w.ctx())
	must(t, err)
	call := &pb.Call{OperationId: "0123456789abcdef0123456789abcdef"}
	_, write := pb.NewTasksClient(old).Starting(w.ctx(),
		&pb.TaskStartingRequest{Call: call, Task: wire.AllocTaskProto(task)})
	_, sync := pb.NewAllocsClient(old).Sync(w.ctx(), &pb.SyncRequest{Call: call})
	_, read := pb.NewVolumesClient(old).List(w.ctx(), &pb.ListVolumesRequest{Call: &pb.Call{}})
	for what, err := range map[string]error{"a write": write, "Sync": sync, "a read": read} {
		if st := status.Convert(err); st.Code() != codes.Unavailable || len(st.Details()) > 0 {
			t.Errorf("%s at a released shim: %v", what, st)
		}
	}
	for _, req := range []*pb.ActivateRequest{{Call: &pb.Call{}}, {Call: &pb.Call{}, Resume: true}} {
		ctx, cancel := context.WithTimeout(w.ctx(), time.Second)
		if _, err := pb.NewControlClient(old).Activate(ctx, req); err == nil {
			t.Errorf("%v: two shims are active", req)
		}
		cancel()
	}
	after, err := w.host.Status(w.ctx())
	must(t, err)
	if after != before {
		t.Errorf("the state was %+v and is %+v", before, after)
	}
	_, err = w.host.TaskStarting(w.ctx(), task)
	must(t, err)
}

func TestCloseEndsASwap(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	reached := filepath.Join(w.dir, "reached")
	hangs := fault.Binary(t, faultyShim, w.dir, "hangs", "Rehearse before touch "+reached, "Rehearse before hang")
	swapped := make(chan error, 1)
	go func() { _, err := w.host.Swap(w.ctx(), host.Binary{Path: hangs}); swapped <- err }()
	w.awaitFile(reached)
	must(t, w.host.Close())
	if err := <-swapped; !errors.Is(err, host.ErrUnavailable) {
		t.Errorf("the swap ended with %v", err)
	}
	if left := w.shims(); len(left) > 0 {
		t.Errorf("processes: %v", left)
	}
	if left, _ := filepath.Glob(filepath.Join(w.config.StateDir, "rehearsal*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if _, err := w.host.Swap(w.ctx(), host.Binary{Path: shimBinary}); !errors.Is(err, host.ErrUnavailable) {
		t.Errorf("a closed host: %v", err)
	}
}

func (w *env) awaitFile(path string) {
	w.t.Helper()
	w.until("made "+path, func(host.ShimState) bool { _, err := os.Stat(path); return err == nil })
}
