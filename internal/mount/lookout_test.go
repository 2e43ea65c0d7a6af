package mount

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// soon is a deadline that a helper of this binary meets, unless something hangs.
func soon(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d*slower)
	t.Cleanup(cancel)
	return ctx
}

func TestLook(t *testing.T) {
	dir := tempDir(t)
	if err := unix.Mount("test", dir, "tmpfs", 0, "size=64k,nr_inodes=100"); err != nil {
		t.Fatal(err)
	}
	write(t, strings.Repeat("x", 4096), dir, "file")
	if err := errors.Join(os.Symlink(dir, dir+"/link"), unix.Mkfifo(dir+"/pipe", 0o600)); err != nil {
		t.Fatal(err)
	}
	paths := []string{dir, dir, dir + "/file", dir + "/link", dir + "/pipe", dir + "/link/file", dir + "/none", "/dev/null", "/proc"}
	seen, err := new(Lookout).Look(soon(t, 10*time.Second), lookHelper, paths)
	if err != nil || len(seen) != 8 {
		t.Fatalf("%v, %v", seen, err)
	}
	for path, want := range map[string]Kind{
		dir: Directory, dir + "/file": File, dir + "/link": Link, dir + "/pipe": Other, "/dev/null": CharDevice, "/proc": Directory,
	} {
		if s := seen[path]; s.Kind != want || s.Trouble() != "" {
			t.Errorf("%s: %+v", path, s)
		}
	}
	for path, want := range map[string]unix.Errno{dir + "/none": unix.ENOENT, dir + "/link/file": unix.ELOOP} {
		if s := seen[path]; s.Errno != want || s.Dead() || s.Err() == nil || !strings.Contains(s.Trouble(), unix.ErrnoName(want)) {
			t.Errorf("%s: %+v", path, s)
		}
	}
	s := seen[dir]
	if s.FSType != "tmpfs" || s.Magic != unix.TMPFS_MAGIC || s.Bytes != (Room{65536, 61440, 61440}) || s.Inodes != (Room{100, 96, 96}) {
		t.Errorf("%+v", s)
	}
	if null := seen["/dev/null"]; null.Major != 1 || null.Minor != 3 {
		t.Errorf("%+v", null)
	}
}

func TestLookAtABlockDevice(t *testing.T) {
	dir := tempDir(t)
	mountTmpfs(t, dir)
	if err := unix.Mknod(dir+"/disk", unix.S_IFBLK|0o600, int(unix.Mkdev(7, 300))); err != nil {
		t.Skipf("this user cannot make a device: %v", err)
	}
	seen, err := new(Lookout).Look(soon(t, 10*time.Second), lookHelper, []string{dir + "/disk"}) // there is no such device: it is not opened
	if s := seen[dir+"/disk"]; err != nil || s.Kind != BlockDevice || s.Major != 7 || s.Minor != 300 || s.Trouble() != "" {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestLookAtADeadMount(t *testing.T) {
	dir := tempDir(t)
	dies := mountFuse(t, dir)
	dies()
	seen, err := new(Lookout).Look(soon(t, 10*time.Second), lookHelper, []string{dir})
	if s := seen[dir]; err != nil || s.Errno != unix.ENOTCONN || !s.Dead() || s.Hung || s.FSType != "fuse.test" || s.Kind != Directory {
		t.Errorf("%+v, %v", s, err)
	}
}

// A mount whose server takes requests and does not answer freezes nobody but the helper, which cannot even be killed: the caller goes on at
// its deadline, the other paths are seen, no goroutine and no file is left, and the helper is reaped when the kernel lets go of it.
func TestLookAtAHungMountFreezesNobody(t *testing.T) {
	dir := tempDir(t)
	hung, fine := mkdir(t, dir, "hung"), mkdir(t, dir, "fine")
	dies := mountFuse(t, hung)
	var l Lookout
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	begun := time.Now()
	seen, err := l.Look(soon(t, time.Second), lookHelper, []string{hung, fine})
	if took := time.Since(begun); err != nil || took > 2*time.Second*slower {
		t.Errorf("it took %v: %v", took, err)
	}
	if s := seen[hung]; !s.Hung || s.Dead() || s.Trouble() == "" {
		t.Errorf("the hung one: %+v", s)
	}
	if s := seen[fine]; s.Hung || s.Kind != Directory || s.Trouble() != "" {
		t.Errorf("the other: %+v", s)
	}
	if n := runtime.NumGoroutine(); n > goroutines {
		t.Errorf("%d goroutines, were %d", n, goroutines)
	}
	helpers := children(t)
	if len(helpers) != 1 || state(helpers[0]) == "" {
		t.Fatalf("helpers: %v; the mount does not hang as it should", helpers)
	}
	if n := openFiles(t); n > files+1 { // the helper itself
		t.Errorf("%d files, were %d", n, files)
	}

	// It is a user as any other, though only one of its threads is left.
	if users := usersOf(t, hung); len(users) != 1 || fmt.Sprint(users[0].PID) != helpers[0] || users[0].Use != Opens {
		t.Errorf("users: %v", users)
	}
	if err := Unmount(dir, "hung"); !errors.Is(err, ErrBusy) {
		t.Errorf("unmount: %v", err)
	}

	// What is known to hang is not asked again: it is told at once, and there is no second helper.
	begun = time.Now()
	seen, err = l.Look(soon(t, time.Minute), lookHelper, []string{hung})
	if took := time.Since(begun); err != nil || !seen[hung].Hung || took > 500*time.Millisecond {
		t.Errorf("the second time: %+v, %v after %v", seen, err, took)
	}
	if again := children(t); len(again) != 1 {
		t.Errorf("helpers: %v", again)
	}

	// Once the server is gone, the helper ends, is reaped, and the path is asked again.
	dies()
	for end := time.Now().Add(10 * time.Second); len(children(t)) > 0 && time.Now().Before(end); {
		seen, err = l.Look(soon(t, 10*time.Second), lookHelper, []string{hung})
	}
	if s := seen[hung]; err != nil || s.Hung || s.Errno != unix.ENOTCONN || len(children(t)) > 0 {
		t.Errorf("%+v, %v; helpers: %v", s, err, children(t))
	}
	if n := openFiles(t); n > files {
		t.Errorf("%d files, were %d", n, files)
	}
}

// A process that has looked at a hung mount exits at once, and whoever reads its output sees the end of it.
func TestLookAtAHungMountHoldsUpNoExit(t *testing.T) {
	dir := tempDir(t)
	mountFuse(t, dir)
	begun := time.Now()
	out, err := exec.Command("/proc/self/exe", "-hold", "look:"+dir).CombinedOutput()
	if took := time.Since(begun); err != nil || took > 3*time.Second*slower || string(out) != "hung\nready\n" {
		t.Errorf("%q, %v after %v", out, err, took)
	}
}

// children lists the processes that this one has started and not reaped.
func children(t *testing.T) (pids []string) {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		b, _ := os.ReadFile("/proc/self/task/" + task.Name() + "/children")
		pids = append(pids, strings.Fields(string(b))...)
	}
	return pids
}

// reap waits for the helpers that the kernel lets go of now.
func reap(t *testing.T, l *Lookout) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); len(l.left) > 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
		l.hangs("")
	}
	if left := children(t); len(left) > 0 {
		t.Errorf("helpers are left: %v", left)
	}
}

// state is that of the one thread of a killed process that is still there: D is one that cannot be killed.
func state(pid string) string {
	threads, _ := os.ReadDir("/proc/" + pid + "/task")
	for _, thread := range threads {
		b, _ := os.ReadFile("/proc/" + pid + "/task/" + thread.Name() + "/stat")
		if _, rest, _ := strings.Cut(string(b), ") "); strings.HasPrefix(rest, "D") {
			return "D"
		}
	}
	return ""
}

func openFiles(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// The helper has nothing of ours: neither what was left open for every child, nor our environment.
func TestLookHelperHasNothingOfOurs(t *testing.T) {
	dir := tempDir(t)
	dies := mountFuse(t, dir)
	defer dies()
	state := write(t, "", t.TempDir(), "shim.db")
	fd, err := unix.Open(state, unix.O_RDWR, 0) // not close-on-exec
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		t.Fatal(err)
	}
	t.Setenv("SECRET", "hunter2")
	var l Lookout
	if seen, err := l.Look(soon(t, time.Second), lookHelper, []string{dir}); err != nil || !seen[dir].Hung {
		t.Fatalf("%v, %v", seen, err)
	}
	helpers := children(t)
	if len(helpers) != 1 {
		t.Fatalf("helpers: %v", helpers)
	}
	unix.Close(fd)
	other, err := unix.Open(state, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(other)
	if err := unix.Flock(other, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		t.Errorf("the helper holds the lock of the state: %v", err)
	}
	if b, _ := os.ReadFile("/proc/" + helpers[0] + "/environ"); strings.Contains(string(b), "hunter2") {
		t.Error("the helper has our environment")
	}
	dies()
	reap(t, &l)
}

// Many hung mounts do not hide those that are fine.
func TestLookBesideManyHungMounts(t *testing.T) {
	dir := tempDir(t)
	var paths []string
	var die []func()
	for i := range lookers + 6 {
		paths = append(paths, mkdir(t, dir, fmt.Sprint(i)))
		die = append(die, mountFuse(t, paths[i]))
	}
	paths = append(paths, mkdir(t, dir, "z"))
	var l Lookout
	seen, err := l.Look(soon(t, 2*time.Second), lookHelper, paths)
	if err != nil || len(seen) != len(paths) || seen[dir+"/z"].Kind != Directory {
		t.Errorf("%d of %d, %v", len(seen), len(paths), err)
	}
	for path, s := range seen {
		if s.Hung != (path != dir+"/z") {
			t.Errorf("%s: %+v", path, s)
		}
	}
	for _, dies := range die {
		dies()
	}
	reap(t, &l)
}

func TestLookEnds(t *testing.T) {
	dir := tempDir(t)
	dies := mountFuse(t, dir)
	var l Lookout
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(100*time.Millisecond, func() { cancel(cause) })
	begun := time.Now()
	if seen, err := l.Look(ctx, lookHelper, []string{dir}); !errors.Is(err, cause) || len(seen) > 0 || time.Since(begun) > 5*time.Second {
		t.Errorf("%v, %v after %v", seen, err, time.Since(begun))
	}
	if _, err := new(Lookout).Look(ctx, lookHelper, []string{dir}); !errors.Is(err, cause) {
		t.Errorf("a context that is over: %v", err)
	}
	dies()
	reap(t, &l)
}

// A command that is no helper is an error that says so, and never a hung path.
func TestLookWithoutAHelper(t *testing.T) {
	for _, helper := range [][]string{nil, {"/none"}, {"/bin/true"}, {"/bin/echo", "what is that?"}, {"/bin/sleep", "100"}} {
		seen, err := new(Lookout).Look(soon(t, 500*time.Millisecond), helper, []string{"/"})
		if err == nil || len(seen) > 0 {
			t.Errorf("%q: %v, %v", helper, seen, err)
		}
		if _, err := new(Lookout).Users(helper, time.Second/2, []string{"/"}); err == nil {
			t.Errorf("%q: users", helper)
		}
		if err := new(Lookout).Unmount(helper, time.Second/2, "/", "none"); err == nil {
			t.Errorf("%q: unmount", helper)
		}
	}
	reap(t, new(Lookout))
}

func TestUsersAndUnmountInAHelper(t *testing.T) {
	dir := volumes(t, "vol", "other")
	h := holdOn(t, false, "cwd:"+dir+"/vol")
	f, err := os.Open(dir + "/other/file") // the caller's own
	if err != nil {
		t.Fatal(err)
	}
	var l Lookout
	found, err := l.Users(lookHelper, 10*time.Second, []string{dir + "/vol", dir + "/other"})
	want := map[string][]User{dir + "/vol": {{PID: h.pid, Comm: "exe", Use: WorksIn, Path: dir + "/vol"}}}
	if err != nil || !reflect.DeepEqual(found, want) {
		t.Errorf("%v, %v", found, err)
	}
	if found, err := l.Users(lookHelper, 0, nil); err != nil || len(found) > 0 {
		t.Errorf("of none: %v, %v", found, err)
	}
	for _, name := range []string{"vol", "other"} {
		if err := l.Unmount(lookHelper, 10*time.Second, dir, name); !errors.Is(err, ErrBusy) {
			t.Errorf("%s: %v", name, err)
		}
	}
	h.end()
	f.Close()
	for _, name := range []string{"vol", "other", "none"} {
		if err := l.Unmount(lookHelper, 10*time.Second, dir, name); err != nil {
			t.Error(err)
		}
	}
	if points := raw(t, dir); len(points) != 1 {
		t.Errorf("the kernel says %q", points)
	}
	if err := l.Unmount(lookHelper, 10*time.Second, dir, "../x"); err == nil || errors.Is(err, ErrBusy) {
		t.Errorf("outside: %v", err)
	}
}
