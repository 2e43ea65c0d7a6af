package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// partEnv is a mount root with a volume mounted below it, and a directory outside of the volume that no part may reach.
type partEnv struct {
	t             *testing.T
	root, outside string
}

func newPartEnv(t *testing.T, flags uintptr) partEnv {
	t.Helper()
	w := partEnv{t, tempDir(t), ""}
	must(t, MakeShared(w.root))
	w.outside = mkdir(t, w.root, "outside")
	write(t, "secret", w.outside, "marker")
	mkdir(t, w.root, "p", "publish", "v")
	must(t, unix.Mount("volume", w.volume(), "tmpfs", flags, "size=1m,mode=755"))
	return w
}

func (w partEnv) volume(elem ...string) string {
	return filepath.Join(append([]string{w.root, "p", "publish", "v"}, elem...)...)
}

// part returns a part of the volume.
func (w partEnv) part(path string, create bool) Part {
	return Part{Root: w.root, Volume: "p/publish/v", Path: path, Make: create, At: "parts/one/v"}
}

func (w partEnv) at(p Part) string { return filepath.Join(w.root, p.At) }

// lines returns the mounts at a mount point, from a separate parse of mountinfo: root, flags and optional fields of
// each.
func (w partEnv) lines(point string) (found [][3]string) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	must(w.t, err)
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); f[4] == point {
			found = append(found, [3]string{f[3], f[5], strings.Join(f[6:slices.Index(f, "-")], " ")})
		}
	}
	return found
}

// gone checks that nothing is left of a part.
func (w partEnv) gone(p Part) {
	w.t.Helper()
	if lines := w.lines(w.at(p)); len(lines) > 0 || exists(w.t, filepath.Dir(w.at(p))) {
		w.t.Errorf("%s is left: %v", p.At, lines)
	}
}

func TestPartIsMountedAlone(t *testing.T) {
	w := newPartEnv(t, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC)
	write(t, "here", mkdir(t, w.volume("a", "b")), "file")
	mountTmpfs(t, mkdir(t, w.volume("a", "b", "inner")))
	write(t, "not this", w.volume("a", "b", "inner"), "file")
	p := w.part("a/b", false)
	must(t, MountPart(p))
	at := w.lines(w.at(p))
	if len(at) != 1 || at[0][0] != "/a/b" || at[0][1] != "rw,nosuid,nodev,noexec,relatime" {
		t.Fatalf("the kernel says %q", at)
	}
	if b, err := os.ReadFile(w.at(p) + "/file"); string(b) != "here" {
		t.Errorf("%q, %v", b, err)
	}
	if exists(t, w.at(p)+"/inner/file") {
		t.Error("the part includes a mount inside it")
	}
	whole := w.lines(w.volume())
	if !strings.HasPrefix(at[0][2], "shared:") || at[0][2] == whole[0][2] || strings.Contains(at[0][2], "master") {
		t.Errorf("the part is %q, the volume %q: mounts would propagate between them", at[0][2], whole[0][2])
	}
	mountTmpfs(t, mkdir(t, w.at(p), "below"))
	if lines := w.lines(w.volume("a", "b", "below")); len(lines) > 0 {
		t.Errorf("a mount in the part appears in the volume: %v", lines)
	}
	must(t, unix.Unmount(w.at(p)+"/below", 0))
	must(t, UnmountPart(p.Root, p.At))
	w.gone(p)
	if !exists(t, w.volume("a", "b", "file")) || len(w.lines(w.volume())) != 1 {
		t.Error("the volume or its file is gone")
	}
	must(t, UnmountPart(p.Root, p.At)) // there is no part
}

func TestPartOfAReadOnlyVolumeIsReadOnly(t *testing.T) {
	w := newPartEnv(t, 0)
	mkdir(t, w.volume("a"))
	must(t, unix.Mount("", w.volume(), "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, "")) // the mount alone
	p := w.part("a", false)
	must(t, MountPart(p))
	wantErr(t, os.WriteFile(w.at(p)+"/x", nil, 0o600), unix.EROFS, "")
	must(t, UnmountPart(p.Root, p.At))
	wantErr(t, MountPart(w.part("b", true)), ErrNoPart, "read-only")
	must(t, UnmountPart(p.Root, p.At))
	w.gone(p)
}

func TestPartMayBeAFile(t *testing.T) {
	w := newPartEnv(t, 0)
	write(t, "text", mkdir(t, w.volume("a")), "file")
	p := w.part("a/file", true)
	must(t, MountPart(p))
	if b, err := os.ReadFile(w.at(p)); string(b) != "text" || len(w.lines(w.at(p))) != 1 {
		t.Errorf("%q, %v", b, err)
	}
	must(t, unix.Unmount(w.at(p), 0))
	for _, next := range []string{"a", "a/file", "a"} { // a directory where a file was, and back
		p.Path = next
		must(t, MountPart(p))
		must(t, unix.Unmount(w.at(p), 0))
	}
	p.Path = "a/file"
	must(t, MountPart(p))
	must(t, UnmountPart(p.Root, p.At))
	w.gone(p)
}

func TestMissingPartIsMade(t *testing.T) {
	w := newPartEnv(t, 0)
	defer unix.Umask(unix.Umask(0))
	must(t, os.Chmod(w.volume(), 0o750))
	mkdir(t, w.volume("team"))
	must(t, errors.Join(os.Chown(w.volume("team"), os.Getuid(), os.Getgid()), unix.Chmod(w.volume("team"), 0o2775)))
	must(t, unix.Chmod(mkdir(t, w.volume("drop")), 0o1777))
	for path, mode := range map[string]uint32{"a/b/c": 0o750, "team/x/y": 0o2775, "drop/z": 0o1777} {
		p := w.part(path, false)
		if err := MountPart(p); !errors.Is(err, ErrNoPart) {
			t.Errorf("%s: %v", path, err)
		}
		if exists(t, w.volume(path)) {
			t.Errorf("%s was made", path)
		}
		p.Make = true
		must(t, MountPart(p))
		for dir := path; strings.Contains(dir, "/"); dir = filepath.Dir(dir) {
			var st unix.Stat_t
			if err := unix.Stat(w.volume(dir), &st); err != nil || st.Mode != unix.S_IFDIR|mode {
				t.Errorf("%s: mode %o, %v", dir, st.Mode, err)
			}
		}
		if lines := w.lines(w.at(p)); len(lines) != 1 || lines[0][0] != "/"+path {
			t.Errorf("the kernel says %v", lines)
		}
		must(t, UnmountPart(p.Root, p.At))
		must(t, MountPart(p)) // the file exists now
		must(t, UnmountPart(p.Root, p.At))
	}
}

// Symbolic links inside the volume are followed. A path that leads out of the volume is neither mounted nor made.
func TestPartFollowsLinksInsideItsVolume(t *testing.T) {
	w := newPartEnv(t, 0)
	write(t, "1", mkdir(t, w.volume("releases", "1")), "marker")
	write(t, "file", w.volume(), "file")
	mountTmpfs(t, mkdir(t, w.volume("mounted")))
	must(t, unix.Mkfifo(w.volume("pipe"), 0o600))
	for name, to := range map[string]string{
		"current": "releases/1", "releases/up": "../releases/1", "up": "..", "far": "../../../outside",
		"absolute": w.outside,
		"self":     w.volume("releases"), "root": "/", "deep": "releases/../../outside", "proc": "/proc/self/root",
		"dangling": "nowhere/at/all", "made": "releases/made", "circle": "circle",
		"cross": "mounted", "topipe": "pipe",
	} {
		must(t, os.Symlink(to, w.volume(name)))
	}
	cases := map[string]error{}
	for _, path := range []string{"pipe", "topipe", "..", "../outside", "", ".", "/", "/etc", "a/../..", "a\x00b"} {
		cases[path] = nil // any error
	}
	for _, path := range []string{"up", "up/outside", "far", "far/new", "absolute", "absolute/new", "self", "root",
		"root/etc", "deep", "proc", "mounted", "mounted/new", "cross"} {
		cases[path] = ErrOutside
	}
	for _, path := range []string{"dangling", "dangling/new", "circle", "circle/new", "file/new", "made", "made/x"} {
		cases[path] = ErrNoPart
	}
	for path, want := range cases {
		for _, create := range []bool{false, true} {
			p := w.part(path, create)
			if err := MountPart(p); err == nil || want != nil && !errors.Is(err, want) {
				t.Errorf("%q, make %v: %v, want %v", path, create, err, want)
			}
			if lines := w.lines(w.at(p)); len(lines) > 0 {
				t.Errorf("%q is mounted: %v", path, lines)
				must(t, UnmountPart(p.Root, p.At))
			}
		}
	}
	for path, root := range map[string]string{
		"current": "/releases/1", "releases/up": "/releases/1", "releases": "/releases",
	} {
		p := w.part(path, false)
		must(t, MountPart(p))
		if lines := w.lines(w.at(p)); len(lines) != 1 || lines[0][0] != root {
			t.Errorf("%s: mounted %v, want %s", path, lines, root)
		}
		must(t, UnmountPart(p.Root, p.At))
	}
	for _, place := range []string{"outside/new", "p/publish/v/mounted/new", "p/publish/v/nowhere",
		"p/publish/v/releases/made"} {
		if exists(t, filepath.Join(w.root, place)) {
			t.Errorf("%s was made", place)
		}
	}
}

// A process that replaces directories by links during a MountPart cannot redirect it: the part is in the volume, and
// nothing is made outside.
func TestPartIsSafeAgainstSwappedLinks(t *testing.T) {
	w := newPartEnv(t, 0)
	write(t, "inside", mkdir(t, w.volume("a", "b")), "marker")
	mkdir(t, w.volume("x", "y"))
	mkdir(t, w.outside, "b")
	write(t, "secret", w.outside, "b", "marker")
	targets := []string{w.outside, "../../../outside", "..", "/", "x/../../../../outside", "x/y/../.."}
	for i, to := range targets {
		must(t, os.Symlink(to, w.volume(fmt.Sprint("link", i))))
	}
	stop := make(chan struct{})
	var swaps sync.WaitGroup
	end := sync.OnceFunc(func() { close(stop); swaps.Wait() })
	defer end()
	swaps.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				link := w.volume(fmt.Sprint("link", i/2%len(targets)))
				if err := unix.Renameat2(unix.AT_FDCWD, w.volume("a"), unix.AT_FDCWD, link,
					unix.RENAME_EXCHANGE); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	mounted, refused := 0, 0
	limit := time.Now().Add(time.Minute)
	for i := 0; i < 600 || min(mounted, refused) < 30 && time.Now().Before(limit); i++ {
		path := []string{"a/b", "a/new", "x/y"}[i%3]
		p := w.part(path, i%2 == 0)
		switch err := MountPart(p); {
		case err != nil:
			refused++
		default:
			mounted++
			marker, _ := os.ReadFile(w.at(p) + "/marker")
			if lines := w.lines(w.at(p)); string(marker) == "secret" || len(lines) != 1 ||
				exists(t, w.at(p)+"/outside") {
				t.Fatalf("%s got out: %q, %v", path, marker, lines)
			}
			if same, err := sameFileSystem(w.at(p), w.volume()); err != nil || !same {
				t.Fatalf("%s is of another file system: %v", path, err)
			}
		}
		must(t, UnmountPart(p.Root, p.At))
	}
	end()
	if mounted < 30 || refused < 30 {
		t.Errorf("%d mounted, %d refused: there was no race", mounted, refused)
	}
	left, err := os.ReadDir(w.outside)
	if err != nil || len(left) != 2 {
		t.Errorf("outside there are %v, %v", left, err)
	}
}

func sameFileSystem(a, b string) (bool, error) {
	var x, y unix.Stat_t
	err := errors.Join(unix.Stat(a, &x), unix.Stat(b, &y))
	return x.Dev == y.Dev, err
}

// A directory that is no mount point is not a volume: if the mount was lost, the directory is on the host's own disk.
func TestPartOfNoVolume(t *testing.T) {
	w := newPartEnv(t, 0)
	mkdir(t, w.volume("a"))
	mkdir(t, w.root, "plain", "a")
	mountTmpfs(t, mkdir(t, w.volume("a", "inner")))
	must(t, os.Symlink(w.volume(), w.root+"/link"))
	mkdir(t, w.root, "lost", "a")
	for _, volume := range []string{"plain", "lost", "none", "link", "p/publish/v/a/inner", "p/publish/v/a",
		"../outside", ".", "", "/"} {
		p := w.part("a", true)
		p.Volume = volume
		if err := MountPart(p); err == nil || len(w.lines(w.at(p))) > 0 {
			t.Errorf("%q: %v, %v", volume, err, w.lines(w.at(p)))
		}
		must(t, UnmountPart(p.Root, p.At))
	}
}

func TestPartIsMountedOnce(t *testing.T) {
	w := newPartEnv(t, 0)
	mkdir(t, w.volume("a"))
	p := w.part("a", false)
	must(t, MountPart(p))
	if err := MountPart(p); !errors.Is(err, ErrMounted) || len(w.lines(w.at(p))) != 1 {
		t.Errorf("%v, %v", err, w.lines(w.at(p)))
	}
	h := holdOn(t, false, "cwd:"+w.at(p))
	if err := UnmountPart(p.Root, p.At); !errors.Is(err, ErrBusy) || len(w.lines(w.at(p))) != 1 {
		t.Errorf("while it is used: %v", err)
	}
	h.end()
	mountTmpfs(t, w.at(p)) // a foreign mount on top
	must(t, UnmountPart(p.Root, p.At))
	w.gone(p)
}

// Files below a mount point stay, and do not prevent its unmount.
func TestPartLeavesWhatIsNotItsOwn(t *testing.T) {
	w := newPartEnv(t, 0)
	mkdir(t, w.volume("a"))
	p := w.part("a", false)
	write(t, "mine", mkdir(t, w.at(p)), "file")
	must(t, MountPart(p))
	must(t, UnmountPart(p.Root, p.At))
	if b, err := os.ReadFile(w.at(p) + "/file"); string(b) != "mine" || len(w.lines(w.at(p))) > 0 {
		t.Errorf("%q, %v", b, err)
	}
	must(t, os.RemoveAll(w.root+"/parts"))
	must(t, os.Symlink(w.outside, w.root+"/parts"))
	if err := MountPart(p); err == nil || exists(t, w.outside+"/one") {
		t.Errorf("a link was followed: %v", err)
	}
	if err := UnmountPart(p.Root, p.At); err == nil {
		t.Error("a link was followed")
	}
	for _, at := range []string{"", ".", "v", "..", "../x/v", "/parts/one/v"} {
		p.At = at
		if err := MountPart(p); err == nil {
			t.Errorf("at %q", at)
		}
		if err := UnmountPart(p.Root, at); err == nil {
			t.Errorf("at %q", at)
		}
	}
}
