package mount

import (
	"context"
	"errors"
	"fmt"
	"holdfast/hooks"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"slices"
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

func newHelper() *Helper { return &Helper{Command: HelperCommand} }

func TestInspect(t *testing.T) {
	dir := tempDir(t)
	mountTmpfs(t, dir)
	write(t, "x", dir, "file")
	must(t, os.Symlink(dir, dir+"/link"))
	want := map[string]Info{
		dir: {}, dir + "/file": {}, dir + "/link": {}, "/dev/null": {}, "/proc": {},
		dir + "/none":      {Errno: unix.ENOENT},
		dir + "/link/file": {Errno: unix.ELOOP},
	}
	// it does not exist, and is not opened
	if unix.Mknod(dir+"/disk", unix.S_IFBLK|0o600, int(unix.Mkdev(7, 300))) == nil {
		want[dir+"/disk"] = Info{Block: true, Device: hooks.DeviceNumber{Major: 7, Minor: 300}}
	}
	found, err := newHelper().Inspect(soon(t, 10*time.Second), slices.AppendSeq([]string{dir}, maps.Keys(want)))
	if err != nil || !maps.Equal(found, want) {
		t.Errorf("%+v, %v", found, err)
	}
	for i, known := range map[Info]bool{{}: true, {Errno: unix.ENOENT}: true, {Errno: unix.EACCES}: false,
		{Hung: true}: true, {Errno: unix.EIO}: true} {
		if trouble := i.Trouble() != ""; i.Known() != known || trouble != (i.Hung || i.Dead()) {
			t.Errorf("%+v: known %v, trouble %q", i, i.Known(), i.Trouble())
		}
	}
}

func TestInspectADeadMount(t *testing.T) {
	dir := tempDir(t)
	dies := mountFuse(t, dir)
	dies()
	seen, err := newHelper().Inspect(soon(t, 10*time.Second), []string{dir})
	if s := seen[dir]; err != nil || s.Errno != unix.ENOTCONN || !s.Dead() || s.Hung {
		t.Errorf("%+v, %v", s, err)
	}
}

// A mount whose server does not answer blocks only the helper process, which cannot be killed. The caller returns at
// its deadline with the other paths, without a goroutine or file left. The helper is reaped once the kernel releases
// it.
func TestInspectingAHungMountBlocksOnlyItsHelper(t *testing.T) {
	dir := tempDir(t)
	hung, fine := mkdir(t, dir, "hung"), mkdir(t, dir, "fine")
	dies := mountFuse(t, hung)
	l := newHelper()
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	begun := time.Now()
	seen, err := l.Inspect(soon(t, time.Second), []string{hung, fine})
	if took := time.Since(begun); err != nil || took > 2*time.Second*slower {
		t.Errorf("it took %v: %v", took, err)
	}
	if s := seen[hung]; !s.Hung || s.Dead() || s.Trouble() == "" {
		t.Errorf("the hung one: %+v", s)
	}
	if s := seen[fine]; s != (Info{}) {
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

	// It keeps the mount in use.
	if err := Unmount(dir, "hung"); !errors.Is(err, ErrBusy) {
		t.Errorf("unmount: %v", err)
	}

	// A path that is known to hang is reported at once, without a second helper.
	begun = time.Now()
	seen, err = l.Inspect(soon(t, time.Minute), []string{hung})
	if took := time.Since(begun); err != nil || !seen[hung].Hung || took > 500*time.Millisecond {
		t.Errorf("the second time: %+v, %v after %v", seen, err, took)
	}
	if again := children(t); len(again) != 1 {
		t.Errorf("helpers: %v", again)
	}

	// Once the server is gone, the helper ends, is reaped, and the path is asked again.
	dies()
	for end := time.Now().Add(10 * time.Second); len(children(t)) > 0 && time.Now().Before(end); {
		seen, err = l.Inspect(soon(t, 10*time.Second), []string{hung})
	}
	if s := seen[hung]; err != nil || s.Hung || s.Errno != unix.ENOTCONN || len(children(t)) > 0 {
		t.Errorf("%+v, %v; helpers: %v", s, err, children(t))
	}
	if n := openFiles(t); n > files {
		t.Errorf("%d files, were %d", n, files)
	}
}

// A process that has inspected a hung mount exits at once, and its output ends.
func TestProcessWithAHungHelperExits(t *testing.T) {
	dir := tempDir(t)
	mountFuse(t, dir)
	begun := time.Now()
	out, err := exec.Command("/proc/self/exe", "-hold", "inspect:"+dir).CombinedOutput()
	if took := time.Since(begun); err != nil || took > 3*time.Second*slower || string(out) != "hung\nready\n" {
		t.Errorf("%q, %v after %v", out, err, took)
	}
}

// children lists the processes that this one has started and not reaped.
func children(t *testing.T) (pids []string) {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	must(t, err)
	for _, task := range tasks {
		b, _ := os.ReadFile("/proc/self/task/" + task.Name() + "/children")
		pids = append(pids, strings.Fields(string(b))...)
	}
	return pids
}

// reap waits for the helpers that the kernel lets go of now.
func reap(t *testing.T, l *Helper) {
	t.Helper()
	end := time.Now().Add(10 * time.Second)
	for ; len(l.killed) > 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
		l.hangs("")
	}
	if left := children(t); len(left) > 0 {
		t.Errorf("helpers are left: %v", left)
	}
}

// state returns D if a thread of a process sleeps in the kernel and cannot be killed.
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
	must(t, err)
	return len(names)
}

// The helper process inherits neither inheritable files nor the environment.
func TestHelperProcessInheritsNothing(t *testing.T) {
	dir := tempDir(t)
	dies := mountFuse(t, dir)
	defer dies()
	state := write(t, "", t.TempDir(), "shim.db")
	fd, err := unix.Open(state, unix.O_RDWR, 0) // not close-on-exec
	must(t, err)
	must(t, unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB))
	t.Setenv("SECRET", "hunter2")
	l := newHelper()
	if seen, err := l.Inspect(soon(t, time.Second), []string{dir}); err != nil || !seen[dir].Hung {
		t.Fatalf("%v, %v", seen, err)
	}
	helpers := children(t)
	if len(helpers) != 1 {
		t.Fatalf("helpers: %v", helpers)
	}
	unix.Close(fd)
	other, err := unix.Open(state, unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(other)
	if err := unix.Flock(other, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		t.Errorf("the helper holds the lock of the state: %v", err)
	}
	if b, _ := os.ReadFile("/proc/" + helpers[0] + "/environ"); strings.Contains(string(b), "hunter2") {
		t.Error("the helper has our environment")
	}
	dies()
	reap(t, l)
}

// Many hung mounts do not hide those that are fine.
func TestHungMountsDoNotHideOthers(t *testing.T) {
	dir := tempDir(t)
	var paths []string
	var die []func()
	for i := range 70 {
		paths = append(paths, mkdir(t, dir, fmt.Sprint(i)))
		die = append(die, mountFuse(t, paths[i]))
	}
	paths = append(paths, mkdir(t, dir, "z"))
	l := newHelper()
	seen, err := l.Inspect(soon(t, 2*time.Second), paths)
	if err != nil || len(seen) != len(paths) || seen[dir+"/z"] != (Info{}) {
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
	reap(t, l)
}

func TestInspectEndsWithItsContext(t *testing.T) {
	dir := tempDir(t)
	dies := mountFuse(t, dir)
	l := newHelper()
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(100*time.Millisecond, func() { cancel(cause) })
	begun := time.Now()
	if seen, err := l.Inspect(ctx, []string{dir}); !errors.Is(err, cause) || len(seen) > 0 ||
		time.Since(begun) > 5*time.Second {
		t.Errorf("%v, %v after %v", seen, err, time.Since(begun))
	}
	if _, err := newHelper().Inspect(ctx, []string{dir}); !errors.Is(err, cause) {
		t.Errorf("a context that is over: %v", err)
	}
	dies()
	reap(t, l)
}

// A command that is no helper is an error, and never a hung path.
func TestInspectWithoutAHelper(t *testing.T) {
	var l Helper
	for _, command := range [][]string{nil, {"/none"}, {"/bin/true"}, {"/bin/echo", "what is that?"},
		{"/bin/sleep", "100"}} {
		l.Command = command
		seen, err := l.Inspect(soon(t, 500*time.Millisecond), []string{"/"})
		if err == nil || len(seen) > 0 {
			t.Errorf("%q: %v, %v", command, seen, err)
		}
		if err := l.Unmount(soon(t, 500*time.Millisecond), "/", "none"); err == nil {
			t.Errorf("%q: unmount", command)
		}
	}
	reap(t, &l)
}
