package taskdriver

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// onSmallDisk has a task's directory on a file system of a few pages; it returns what fills it, and what frees it.
func onSmallDisk(t *testing.T, task *Task) (fill, free func()) {
	t.Helper()
	needMounts(t)
	dir := tempDir(t) // unmounts it
	if err := unix.Mount("small", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("no tmpfs can be mounted here: %v", err)
	}
	task.Dir = filepath.Join(dir, "task")
	filler := filepath.Join(dir, "filler")
	fill = func() {
		if err := os.WriteFile(filler, make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Errorf("the disk is not full: %v", err)
		}
	}
	return fill, func() {
		if err := os.Remove(filler); err != nil {
			t.Error(err)
		}
	}
}

// A task that writes far more than the disk takes is neither blocked nor killed, and how it ends is known.
func TestFullDiskDoesNotHinderItsWriter(t *testing.T) {
	task := shell(t, `dd if=/dev/zero bs=64k count=64; exit 7`)
	onSmallDisk(t, &task)
	d := NewRawExec()
	h := start(t, d, task)
	if exit := wait(t, d, h); exit.Code != 7 || exit.Err != "" {
		t.Errorf("it ended with %+v", exit)
	}
}

func TestTasksAreStoppedInOrderOnAFullDisk(t *testing.T) {
	f := newFifos(t)
	task := shell(t, `trap 'exit 9' TERM; echo > `+f.dir+`/ready; while :; do sleep 0.05; done`)
	fill, _ := onSmallDisk(t, &task)
	d := NewRawExec()
	h := start(t, d, task)
	f.reached(t)
	fill()
	if err := d.Stop(t.Context(), h, time.Minute); err != nil {
		t.Fatal(err)
	}
	if exit := wait(t, d, h); exit.Code != 9 || exit.Err != "" {
		t.Errorf("it ended with %+v", exit)
	}
}

func TestLogsGoOnWhenThereIsRoomAgain(t *testing.T) {
	f := newFifos(t)
	task := shell(t, `dd if=/dev/zero bs=64k count=8 2> /dev/null; echo > `+f.dir+`/ready; cat `+f.dir+`/go > /dev/null; echo last`)
	_, _ = onSmallDisk(t, &task)
	task.LogSize, task.LogFiles = 100<<10, 10
	d := NewRawExec()
	h := start(t, d, task)
	f.reached(t)
	if err := os.Remove(filepath.Join(task.Dir, "logs", "stdout.0")); err != nil {
		t.Fatal(err)
	}
	f.goOn(t)
	wait(t, d, h)
	if out := logs(t, d, h, Stdout); len(out) < 5 || out[len(out)-5:] != "last\n" {
		t.Errorf("of %d bytes the last ones are %q", len(out), out[max(0, len(out)-20):])
	}
}

func TestStartOnAFullDiskIsRefusedAsSuch(t *testing.T) {
	task := shell(t, `true`)
	fill, free := onSmallDisk(t, &task)
	fill()
	d := NewRawExec()
	if _, err := d.Start(t.Context(), task); !errors.Is(err, registry.ErrExhausted) {
		t.Errorf("started: %v", err)
	}
	free()
	if exit := wait(t, d, start(t, d, task)); exit.Code != 0 {
		t.Errorf("it ended with %+v", exit)
	}
}
