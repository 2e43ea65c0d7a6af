package mount

import (
	"context"
	"encoding/gob"
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// hungPart is a world whose volume takes requests and answers none.
func hungPart(t *testing.T) (w partEnv, p Part, dies func()) {
	w = newPartEnv(t, 0)
	must(t, unix.Unmount(w.volume(), 0))
	dies = mountFuse(t, w.volume())
	return w, w.part("a/b", true), dies
}

// A volume that hangs freezes nobody but the helper, which cannot be killed. The caller goes on at its deadline; what
// is known to hang is not asked again; nobody takes the place of the part for free while the helper could still mount
// something, not even a process that knows nothing of it; and when the kernel lets go of the helper, nothing is
// mounted.
func TestHungVolumeBlocksOnlyItsHelper(t *testing.T) {
	w, p, dies := hungPart(t)
	l := newHelper()
	files := openFiles(t)
	begun := time.Now()
	if err := l.MountPart(soon(t, time.Second), p); !errors.Is(err, ErrHung) ||
		time.Since(begun) > 2*time.Second*slower {
		t.Errorf("%v after %v", err, time.Since(begun))
	}
	helpers := children(t)
	if len(helpers) != 1 || state(helpers[0]) != "D" {
		t.Fatalf("helpers: %v; the volume does not hang as it should", helpers)
	}
	begun = time.Now()
	for range 2 {
		if err := l.MountPart(soon(t, time.Minute), p); !errors.Is(err, ErrHung) {
			t.Errorf("again: %v", err)
		}
		if err := l.UnmountPart(soon(t, time.Minute), p.Root, p.At); !errors.Is(err, ErrHung) {
			t.Errorf("its undo: %v", err)
		}
	}
	if again := children(t); time.Since(begun) > time.Second || len(again) != 1 {
		t.Errorf("it took %v, helpers: %v", time.Since(begun), again)
	}
	next := newHelper() // of the next process
	if err := next.UnmountPart(soon(t, 10*time.Second), p.Root, p.At); !errors.Is(err, ErrHeld) {
		t.Errorf("its undo by another process: %v", err)
	}
	if err := next.MountPart(soon(t, 10*time.Second), p); !errors.Is(err, ErrHeld) {
		t.Errorf("by another process: %v", err)
	}
	dies()
	reap(t, l)
	if lines := w.lines(w.at(p)); len(lines) > 0 {
		t.Errorf("it was mounted behind our back: %v", lines)
	}
	must(t, l.UnmountPart(soon(t, 10*time.Second), p.Root, p.At))
	w.gone(p)
	if n := openFiles(t); n > files {
		t.Errorf("%d files, were %d", n, files)
	}
}

// A caller whose context ends returns at once.
func TestMountPartEndsWithItsContext(t *testing.T) {
	_, p, dies := hungPart(t)
	l := newHelper()
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(100*time.Millisecond, func() { cancel(cause) })
	begun := time.Now()
	if err := l.MountPart(ctx, p); !errors.Is(err, cause) || time.Since(begun) > 5*time.Second {
		t.Errorf("%v after %v", err, time.Since(begun))
	}
	if err := newHelper().MountPart(ctx, p); !errors.Is(err, cause) {
		t.Errorf("a context that is over: %v", err)
	}
	dies()
	reap(t, l)
	must(t, UnmountPart(p.Root, p.At))
}

// A part of a dead volume cannot be mounted, and one that was mounted before is unmounted without its server.
func TestPartOfADeadVolume(t *testing.T) {
	w, p, dies := hungPart(t)
	dies()
	l := newHelper()
	if err := l.MountPart(soon(t, 10*time.Second), p); !strings.Contains(errText(err), "not connected") {
		t.Errorf("%v", err)
	}
	must(t, unix.Mount(w.volume(), mkdir(t, w.at(p)), "", unix.MS_BIND, ""))
	must(t, l.UnmountPart(soon(t, 10*time.Second), p.Root, p.At))
	w.gone(p)
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// begunPart is a helper that has just been asked to mount a part.
func begunPart(t *testing.T, p Part) *process {
	t.Helper()
	a, err := start(HelperCommand, time.Now().Add(time.Minute))
	must(t, err)
	must(t, gob.NewEncoder(a.in).Encode(question{MountPart: &p}))
	return a
}

// A helper whose caller is gone ends by itself: all of it but the thread that hangs.
func TestHelperEndsWithItsCaller(t *testing.T) {
	_, p, dies := hungPart(t)
	a := begunPart(t, p)
	pid := strconv.Itoa(a.pid)
	until(t, "it opens the part", func() bool { return slices.Contains(syscallsOf(pid), unix.SYS_OPENAT2) })
	a.in.Close()
	a.out.Close()
	until(t, "its other threads end", func() bool {
		threads, err := os.ReadDir("/proc/" + pid + "/task")
		// the one that hangs, and the first, which is a zombie if it is another one
		return err == nil && len(threads) <= 2
	})
	dies()
	until(t, "all of it ends", a.reap)
	must(t, UnmountPart(p.Root, p.At))
}

// syscallsOf are the numbers of the system calls that the threads of a process are in.
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

// until waits for something.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain until %s", what)
		}
	}
}

// A helper that is killed at any moment, or loses its caller, leaves a part complete or not mounted at all. The next
// one continues from there.
func TestKilledHelperLeavesNoHalfMountedPart(t *testing.T) {
	w := newPartEnv(t, 0)
	p := w.part("a/b/c", true)
	done, nothing := 0, 0
	for i, longest := 0, 8*time.Millisecond*slower; i < 60; i++ {
		if i%10 == 9 && done == 0 {
			longest *= 2 // than which it takes longer here
		}
		a := begunPart(t, p)
		time.Sleep(rand.N(longest)) // any moment
		a.in.Close()
		a.out.Close()
		if i%2 == 0 {
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(a.pidfd), Events: unix.POLLIN}}, 10000)
		}
		if !a.kill() {
			until(t, "it is dead", a.reap)
		}
		switch lines := w.lines(w.at(p)); {
		case len(lines) == 0:
			nothing++
		case len(lines) == 1 && lines[0][0] == "/a/b/c":
			done++
		default:
			t.Fatalf("half done: %v", lines)
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
		t.Errorf("%d were done, %d were not: nothing was hit", done, nothing)
	}
}

// A process that was killed releases its lock after a moment: MountPart waits for it, also if the directory is removed.
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
			t.Errorf("it was not waited for: %v", err)
		case <-time.After(slotWait / 10):
		}
		if removed {
			must(t, s.clear())
		}
		s.close()
		must(t, <-done)
		if lines := w.lines(w.at(p)); len(lines) != 1 {
			t.Errorf("removed %v: the kernel says %v", removed, lines)
		}
		must(t, UnmountPart(p.Root, p.At))
		w.gone(p)
	}
}

// Concurrent mounts and unmounts of a part find it either complete or missing.
func TestConcurrentPartMountsAndUnmounts(t *testing.T) {
	w := newPartEnv(t, 0)
	p := w.part("a", true)
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			for range 60 {
				if err := MountPart(p); err != nil && !errors.Is(err, ErrMounted) && !errors.Is(err, ErrHeld) {
					t.Error(err)
				}
				if err := UnmountPart(p.Root, p.At); err != nil && !errors.Is(err, ErrHeld) {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	must(t, UnmountPart(p.Root, p.At))
	w.gone(p)
}
