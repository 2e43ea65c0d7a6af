package mount

import (
	"encoding/gob"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// hungPart returns a part of a volume whose server accepts requests but does not answer.
func hungPart(t *testing.T) (w partEnv, p Part, dies func()) {
	w = newPartEnv(t, 0)
	must(t, unix.Unmount(w.volume(), 0))
	dies = mountFuse(t, w.volume())
	return w, w.part("a/b", true), dies
}

// A volume that hangs blocks only the helper, which cannot be killed. While the helper may still mount the part, no
// other call or process mounts or unmounts there. When the kernel releases the helper, nothing is mounted.
func TestHungVolumeBlocksOnlyItsHelper(t *testing.T) {
	w, p, dies := hungPart(t)
	h := newHelper()
	files := openFiles(t)
	for range 2 { // the second time the helper is known to hang
		wantErr(t, h.MountPart(deadline(t, hungAfter), p), ErrHung, "")
		wantErr(t, h.UnmountPart(deadline(t, time.Minute), p.Root, p.At), ErrHung, "")
		if helpers := children(t); len(helpers) != 1 || !unkillable(helpers[0]) {
			t.Fatalf("helpers: %v, want one that hangs", helpers)
		}
	}
	next := newHelper() // as in the next process
	wantErr(t, next.UnmountPart(deadline(t, time.Minute), p.Root, p.At), ErrHeld, "")
	wantErr(t, next.MountPart(deadline(t, time.Minute), p), ErrHeld, "")
	dies()
	reap(t, h)
	if lines := w.lines(w.at(p)); len(lines) > 0 {
		t.Errorf("the killed helper mounted the part: %v", lines)
	}
	must(t, h.UnmountPart(deadline(t, time.Minute), p.Root, p.At))
	w.gone(p)
	if n := openFiles(t); n > files {
		t.Errorf("%d open files, were %d", n, files)
	}
}

// A part of a dead volume cannot be mounted. A part that was mounted before can be unmounted without the server.
func TestPartOfADeadVolume(t *testing.T) {
	w, p, dies := hungPart(t)
	dies()
	h := newHelper()
	wantErr(t, h.MountPart(deadline(t, time.Minute), p), nil, "not connected")
	must(t, unix.Mount(w.volume(), mkdir(t, w.at(p)), "", unix.MS_BIND, ""))
	must(t, h.UnmountPart(deadline(t, time.Minute), p.Root, p.At))
	w.gone(p)
}

// startMountPart starts a helper and asks it to mount a part.
func startMountPart(t *testing.T, p Part) *process {
	t.Helper()
	a, err := start(HelperCommand, time.Now().Add(time.Minute))
	must(t, err)
	must(t, gob.NewEncoder(a.in).Encode(question{MountPart: &p}))
	return a
}

// A helper whose caller is gone ends, except for the thread that hangs.
func TestHungHelperEndsWithItsCaller(t *testing.T) {
	_, p, dies := hungPart(t)
	a := startMountPart(t, p)
	pid := strconv.Itoa(a.pid)
	until(t, "the helper opens the part", func() bool { return slices.Contains(syscallsOf(pid), unix.SYS_OPENAT2) })
	a.in.Close()
	a.out.Close()
	until(t, "its other threads end", func() bool {
		threads, err := os.ReadDir("/proc/" + pid + "/task")
		// The thread that hangs, and the first one, which is a zombie if it is another.
		return err == nil && len(threads) <= 2
	})
	dies()
	until(t, "the helper ends", a.reap)
	must(t, UnmountPart(p.Root, p.At))
}

// syscallsOf returns the numbers of the system calls in which the threads of a process are.
func syscallsOf(pid string) (numbers []int) {
	threads, _ := os.ReadDir("/proc/" + pid + "/task")
	for _, thread := range threads {
		b, _ := os.ReadFile("/proc/" + pid + "/task/" + thread.Name() + "/syscall")
		if n, err := strconv.Atoi(strings.Split(string(b), " ")[0]); err == nil {
			numbers = append(numbers, n)
		}
	}
	return numbers
}

// If a helper is killed at any moment, or loses its caller, the part is either mounted completely or not at all. The
// next helper continues from there.
func TestKilledHelperLeavesNoHalfMountedPart(t *testing.T) {
	w := newPartEnv(t, 0)
	p := w.part("a/b/c", true)
	done, nothing := 0, 0
	for i, longest := 0, 8*time.Millisecond; i < 60 || (done == 0 || nothing == 0) && i < 1000; i++ {
		if i%10 == 9 && done == 0 {
			longest *= 2 // no part was mounted in this time: the machine is slow
		}
		a := startMountPart(t, p)
		time.Sleep(rand.N(longest)) // any moment
		a.in.Close()
		a.out.Close()
		if i%2 == 0 {
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(a.pidfd), Events: unix.POLLIN}}, 10000)
		}
		if !a.kill(killLimit) {
			until(t, "the helper is dead", a.reap)
		}
		switch lines := w.lines(w.at(p)); {
		case len(lines) == 0:
			nothing++
		case len(lines) == 1 && lines[0][0] == "/a/b/c":
			done++
		default:
			t.Fatalf("the part is half mounted: %v", lines)
		}
		if rand.IntN(2) == 0 {
			must(t, UnmountPart(p.Root, p.At))
			w.gone(p)
			must(t, os.RemoveAll(w.volume("a")))
			continue
		}
		if err := MountPart(p); err != nil && !errors.Is(err, ErrMounted) {
			t.Fatal(err)
		}
		must(t, UnmountPart(p.Root, p.At))
	}
	if done == 0 || nothing == 0 {
		t.Errorf("%d parts were mounted, %d were not: no kill was in the middle", done, nothing)
	}
}

// The lock of a killed process is released after a moment. MountPart waits for that, even if the directory is removed.
func TestMountPartWaitsForALock(t *testing.T) {
	w := newPartEnv(t, 0)
	p := w.part("a", true)
	for _, removed := range []bool{false, true} {
		s, err := openSlot(p.Root, p.At, true)
		must(t, err)
		done := make(chan error, 1)
		go func() { done <- MountPart(p) }()
		select {
		case err := <-done:
			t.Errorf("MountPart did not wait: %v", err)
		case <-time.After(slotWait / 10):
		}
		if removed {
			must(t, s.unmountAll())
		}
		s.close()
		if err = <-done; errors.Is(err, ErrHeld) { // this test was not scheduled for slotWait
			err = MountPart(p)
		}
		must(t, err)
		if lines := w.lines(w.at(p)); len(lines) != 1 {
			t.Errorf("removed %v: mounted %v", removed, lines)
		}
		must(t, UnmountPart(p.Root, p.At))
		w.gone(p)
	}
}
