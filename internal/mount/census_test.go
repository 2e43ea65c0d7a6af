package mount

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// topology is three volumes on a shared root, and three namespaces in which random things were done to them.
type topology struct {
	t      *testing.T
	random *rand.Rand
	dir    string
	root   string
	vols   []string
	spares int
	pids   []int // ours first
	log    []string
}

func newTopology(t *testing.T, seed uint64) *topology {
	w := &topology{t: t, random: rand.New(rand.NewPCG(seed, 1)), dir: tempDir(t), pids: []int{os.Getpid()}}
	mountTmpfs(t, w.dir)
	w.here(1, "private:D", "shared:D")
	w.root = mkdir(t, w.dir, "root")
	if err := MakeShared(w.root); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"v0", "v1", "v2"} {
		vol := mkdir(t, w.root, name)
		mountTmpfs(t, vol)
		mkdir(t, vol, "sub")
		w.vols = append(w.vols, vol)
	}
	for range 2 {
		w.here(w.random.IntN(3), "bind:V:E", "bind:V/sub:E", "rbind:R:E", "tmpfs:V/sub", "tmpfs:V")
		steps := w.steps(w.random.IntN(6), "private:X", "slave:X", "shared:X", "bind:V:E", "bind:V/sub:E", "bind:R:E", "rbind:R:E",
			"tmpfs:V/sub", "umount:V", "tmpfs:V")
		h := holdOn(t, true, steps...)
		w.pids, w.log = append(w.pids, h.pid), append(w.log, fmt.Sprint(h.pid, steps))
	}
	w.here(w.random.IntN(3), "bind:V:E", "bind:V/sub:E", "rbind:R:E", "tmpfs:V/sub", "tmpfs:V")
	return w
}

// steps are for do, and may fail. V is a volume, E an empty directory of its own, R the root, X any of these.
func (w *topology) steps(n int, kinds ...string) (list []string) {
	for range n {
		kind := kinds[w.random.IntN(len(kinds))]
		if strings.HasSuffix(kind, "E") {
			w.spares++
			mkdir(w.t, w.dir, "e", fmt.Sprint(w.spares))
		}
		vol := "V"
		if len(w.vols) > 0 {
			vol = w.vols[w.random.IntN(len(w.vols))]
		}
		anywhere := []string{vol, w.root, w.dir, "/"}[w.random.IntN(4)]
		list = append(list, "?"+strings.NewReplacer(
			"V", vol, "R", w.root, "D", w.dir, "X", anywhere, "E", fmt.Sprint(w.dir, "/e/", w.spares),
		).Replace(kind))
	}
	return list
}

func (w *topology) here(n int, kinds ...string) {
	for _, step := range w.steps(n, kinds...) {
		w.log = append(w.log, fmt.Sprint(step, " ", do(step[1:])))
	}
}

// left lists the mounts of these file systems as the kernel has them, each with the process in whose namespace it is.
func (w *topology) left(mounts Mounts, pids ...int) (list []string) {
	for _, pid := range pids {
		for _, m := range mounts {
			for _, point := range shows(w.t, pid, m) {
				list = append(list, fmt.Sprint(pid, " ", point))
			}
		}
	}
	slices.Sort(list)
	return slices.Compact(list)
}

// Whatever was mounted, bound and shared in three namespaces: the mounts that are said to stay are those that the kernel still has when the
// volume is unmounted here, and no others.
func TestUsersForeseeWhatTheKernelDoes(t *testing.T) {
	stayed, gone, seeds := 0, 0, 30
	if os.Getenv(inside) != "" {
		seeds = 6
	}
	for seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			w := newTopology(t, uint64(seed))
			found, err := Users(w.vols)
			if err != nil {
				t.Fatal(err)
			}
			for _, vol := range w.vols {
				mounts, err := Below(vol)
				if err != nil {
					t.Fatal(err)
				}
				unmountAll(t, vol)
				here := w.left(mounts, w.pids[0])
				for _, line := range here {
					_, point, _ := strings.Cut(line, " ")
					unmountAll(t, point)
				}
				// What is left now is no copy of what was left here.
				want, got := slices.Concat(here, w.left(mounts, w.pids[1:]...)), []string(nil)
				for _, u := range found[vol] {
					if u.PID == 0 {
						u.PID = os.Getpid()
					}
					if u.Use == MountedAt {
						got = append(got, fmt.Sprint(u.PID, " ", u.Path))
					}
				}
				slices.Sort(got)
				slices.Sort(want)
				if !slices.Equal(got, want) {
					t.Errorf("%s: got %q\nthe kernel has %q\nafter %s", vol, got, want, strings.Join(w.log, "\n"))
				}
				stayed += min(len(want), 1)
				gone += 1 - min(len(want), 1)
			}
		})
	}
	if min(stayed, gone) < seeds/2 {
		t.Errorf("%d stayed and %d went: that proves little", stayed, gone)
	}
}

// unmountAll takes off what is mounted at a directory and below, whatever hides what.
func unmountAll(t *testing.T, dir string) {
	t.Helper()
	for left := raw(t, dir); len(left) > 0; left = raw(t, dir) {
		for _, point := range slices.Backward(left) {
			_ = unix.Unmount(point, 0)
		}
		if len(raw(t, dir)) >= len(left) {
			t.Fatalf("the kernel refuses to unmount all of %q", left)
		}
	}
}
