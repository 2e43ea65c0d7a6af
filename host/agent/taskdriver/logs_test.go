package taskdriver

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

func TestLogsAreBounded(t *testing.T) {
	d := NewRawExec()
	task := shell(t, `i=0; while [ $i -lt 1000 ]; do echo "line $i of a long output"; i=$((i+1)); done`)
	task.LogSize, task.LogFiles = 1000, 3
	h := start(t, d, task)
	wait(t, d, h)
	files, err := filepath.Glob(filepath.Join(h.Dir, "logs", "stdout.*"))
	must(t, err)
	for _, file := range files {
		if info, err := os.Stat(file); err != nil || info.Size() > 1000 {
			t.Errorf("%s has %d bytes, %v", file, info.Size(), err)
		}
	}
	out := logs(t, d, h, Stdout)
	if len(files) != 3 || !strings.HasSuffix(out, "line 998 of a long output\nline 999 of a long output\n") ||
		len(out) > 3000 {
		t.Errorf("%d files, %d bytes, the end is %q", len(files), len(out), out[max(0, len(out)-80):])
	}
}

// A follower reads later output too, across rotations, and returns when the task ends.
func TestLogsAreFollowed(t *testing.T) {
	d, f := NewRawExec(), newFifos(t)
	task := shell(t, `echo error >&2; echo first; `+f.ready+f.wait+`
		i=0; while [ $i -lt 50 ]; do echo "line $i"; i=$((i+1)); done`)
	task.LogSize, task.LogFiles = 100, 100
	h := start(t, d, task)
	f.awaitReady(t)
	r, w := io.Pipe()
	go func() { w.CloseWithError(d.Logs(t.Context(), h, Stdout, true, w)) }()
	first := make([]byte, 6)
	_, err := io.ReadFull(r, first)
	must(t, err)
	f.release(t)
	rest, err := io.ReadAll(r)
	must(t, err)
	if text := logs(t, d, h, Stderr); text != "error\n" {
		t.Errorf("standard error is %q", text)
	}
	if text := string(rest); string(first) != "first\n" || !strings.HasSuffix(text, "line 48\nline 49\n") ||
		strings.Count(text, "\n") != 50 {
		t.Errorf("%q, then %q", first, text)
	}
}

// A follower also returns if the next attempt has replaced the record of the exit, or the directory is gone.
func TestFollowerMayMissTheExit(t *testing.T) {
	d := NewRawExec()
	task := shell(t, "true")
	first := start(t, d, task)
	wait(t, d, first)
	task.ID += "-next"
	second := start(t, d, task)
	wait(t, d, second)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	must(t, d.Logs(ctx, first, Stdout, true, io.Discard))
	must(t, os.RemoveAll(task.Dir))
	must(t, d.Logs(ctx, second, Stdout, true, io.Discard))
}

// onSmallDisk moves a task's directory to a file system of a few pages.
func onSmallDisk(t *testing.T, task *Task) (fill, free func()) {
	t.Helper()
	needMounts(t)
	dir := tempDir(t) // its cleanup unmounts
	if err := unix.Mount("small", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("cannot mount a tmpfs here: %v", err)
	}
	task.Dir = filepath.Join(dir, "task")
	filler := filepath.Join(dir, "filler")
	fill = func() {
		if err := os.WriteFile(filler, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("the disk is not full: %v", err)
		}
	}
	return fill, func() { must(t, os.Remove(filler)) }
}

func TestFullDiskDoesNotHinderItsWriter(t *testing.T) {
	task := shell(t, `dd if=/dev/zero bs=64k count=64; exit 7`)
	onSmallDisk(t, &task)
	d := NewRawExec()
	if exit := wait(t, d, start(t, d, task)); exit.Code != 7 || exit.Err != "" {
		t.Errorf("exit %+v", exit)
	}
}

func TestTasksAreStoppedInOrderOnAFullDisk(t *testing.T) {
	d, f := NewRawExec(), newFifos(t)
	task := shell(t, `trap 'exit 9' TERM; `+f.ready+` while :; do sleep 0.05; done`)
	fill, _ := onSmallDisk(t, &task)
	h := start(t, d, task)
	f.awaitReady(t)
	fill()
	must(t, d.Stop(t.Context(), h, time.Minute))
	if exit := wait(t, d, h); exit.Code != 9 || exit.Err != "" {
		t.Errorf("exit %+v", exit)
	}
}

func TestLogsContinueWhenTheDiskHasSpaceAgain(t *testing.T) {
	d, f := NewRawExec(), newFifos(t)
	task := shell(t, `dd if=/dev/zero bs=64k count=8 2> /dev/null; `+f.ready+f.wait+` echo last`)
	_, _ = onSmallDisk(t, &task)
	task.LogSize, task.LogFiles = 100<<10, 10
	h := start(t, d, task)
	f.awaitReady(t)
	must(t, os.Remove(filepath.Join(task.Dir, "logs", "stdout.0")))
	f.release(t)
	wait(t, d, h)
	if out := logs(t, d, h, Stdout); !strings.HasSuffix(out, "last\n") {
		t.Errorf("%d bytes, the end is %q", len(out), out[max(0, len(out)-20):])
	}
}

func TestStartOnAFullDiskReportsIt(t *testing.T) {
	task := shell(t, `true`)
	fill, free := onSmallDisk(t, &task)
	fill()
	d := NewRawExec()
	if _, err := d.Start(t.Context(), task); !errors.Is(err, registry.ErrExhausted) {
		t.Errorf("got %v", err)
	}
	free()
	run(t, d, task)
}
