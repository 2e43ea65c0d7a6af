package mount

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
)

// hungAfter is the deadline of helpers that hang.
const hungAfter = time.Second

// inspectHung inspects paths, some of which hang. On a slow machine a helper may not have begun at its deadline, which
// is an error. The deadline then grows.
func inspectHung(h *Helper, paths ...string) (found map[string]Info, err error) {
	for limit := hungAfter; limit < time.Minute; limit *= 2 {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		found, err = h.Inspect(ctx, paths)
		cancel()
		if err == nil {
			break
		}
	}
	return found, err
}

func deadline(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// until waits for a condition.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("timed out waiting until %s", what)
		}
	}
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
	// The device does not exist, and is not opened.
	if unix.Mknod(dir+"/disk", unix.S_IFBLK|0o600, int(unix.Mkdev(7, 300))) == nil {
		want[dir+"/disk"] = Info{Block: true, Device: hooks.DeviceNumber{Major: 7, Minor: 300}}
	}
	found, err := newHelper().Inspect(deadline(t, time.Minute), slices.AppendSeq([]string{dir}, maps.Keys(want)))
	if err != nil || !maps.Equal(found, want) {
		t.Errorf("Inspect = %+v, %v", found, err)
	}
	for i, known := range map[Info]bool{{}: true, {Errno: unix.ENOENT}: true, {Errno: unix.EACCES}: false,
		{Hung: true}: true, {Errno: unix.EIO}: true} {
		if trouble := i.Trouble() != ""; i.Known() != known || trouble != (i.Hung || i.Dead()) {
			t.Errorf("%+v: known %v, trouble %q", i, i.Known(), i.Trouble())
		}
	}
}

// A mount whose server does not answer blocks only the helper process, which cannot be killed. The caller returns at
// its deadline with the results for other paths, and leaves no file open. The helper is reaped once the kernel releases
// it.
func TestInspectingAHungMountBlocksOnlyItsHelper(t *testing.T) {
	dir := tempDir(t)
	hung, fine := mkdir(t, dir, "hung"), mkdir(t, dir, "fine")
	dies := mountFuse(t, hung)
	h := newHelper()
	files := openFiles(t)
	for range 2 { // the second time the path is known to hang: no second helper is started for it
		found, err := inspectHung(h, hung, fine)
		if i := found[hung]; err != nil || !i.Hung || i.Dead() || i.Trouble() == "" || found[fine] != (Info{}) {
			t.Errorf("Inspect = %+v, %v", found, err)
		}
		if helpers := children(t); len(helpers) != 1 || !unkillable(helpers[0]) {
			t.Fatalf("helpers: %v, want one that hangs", helpers)
		}
	}
	if n := openFiles(t); n > files+1 { // the pidfd of the helper
		t.Errorf("%d open files, were %d", n, files)
	}
	wantErr(t, Unmount(dir, "hung"), ErrBusy, "")

	dies()
	reap(t, h)
	found, err := h.Inspect(deadline(t, time.Minute), []string{hung})
	if i := found[hung]; err != nil || i.Hung || !i.Dead() || i.Errno != unix.ENOTCONN {
		t.Errorf("Inspect of a dead mount = %+v, %v", i, err)
	}
	if n := openFiles(t); n > files {
		t.Errorf("%d open files, were %d", n, files)
	}
}

// A process that has inspected a hung mount can exit, and its output ends.
func TestProcessWithAHungHelperExits(t *testing.T) {
	dir := tempDir(t)
	mountFuse(t, dir)
	out, err := exec.CommandContext(deadline(t, time.Minute), "/proc/self/exe", "-hold", "inspect:"+
		dir).CombinedOutput()
	if err != nil || string(out) != "hung\nready\n" {
		t.Errorf("output %q, %v", out, err)
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

// reap waits for the helpers that the kernel releases now.
func reap(t *testing.T, h *Helper) {
	t.Helper()
	until(t, "all helpers are reaped", func() bool {
		h.hangsIn("")
		return len(h.killed) == 0 && len(children(t)) == 0
	})
}

// unkillable reports whether a thread of a process sleeps in the kernel and cannot be killed.
func unkillable(pid string) bool {
	threads, _ := os.ReadDir("/proc/" + pid + "/task")
	for _, thread := range threads {
		b, _ := os.ReadFile("/proc/" + pid + "/task/" + thread.Name() + "/stat")
		if _, rest, _ := strings.Cut(string(b), ") "); strings.HasPrefix(rest, "D") {
			return true
		}
	}
	return false
}

func openFiles(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(names)
}

// The helper process inherits neither inheritable files nor the environment.
func TestHungHelperInheritsNothing(t *testing.T) {
	dir := tempDir(t)
	dies := mountFuse(t, dir)
	path := write(t, "", t.TempDir(), "shim.db")
	file, err := unix.Open(path, unix.O_RDWR, 0) // not close-on-exec
	must(t, err)
	must(t, unix.Flock(file, unix.LOCK_EX|unix.LOCK_NB))
	t.Setenv("SECRET", "hunter2")
	h := newHelper()
	hung := make(chan error, 1)
	go func() {
		found, err := inspectHung(h, dir)
		if err == nil && !found[dir].Hung {
			err = fmt.Errorf("Inspect = %v", found)
		}
		hung <- err
	}()
	// A helper that hangs in FUSE is killed, and its environment is gone then.
	until(t, "the environment of a helper is read", func() (read bool) {
		for _, pid := range children(t) {
			b, err := os.ReadFile("/proc/" + pid + "/environ")
			read = read || err == nil
			if strings.Contains(string(b), "hunter2") {
				t.Errorf("environment of the helper: %q", b)
			}
		}
		return read || len(hung) > 0
	})
	must(t, <-hung)
	unix.Close(file)
	other, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, err)
	defer unix.Close(other)
	must(t, unix.Flock(other, unix.LOCK_EX|unix.LOCK_NB))
	dies()
	reap(t, h)
}

func TestInspectEndsWithItsContext(t *testing.T) {
	dir := tempDir(t)
	dies := mountFuse(t, dir)
	h := newHelper()
	cause := errors.New("cancelled by the test")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(100*time.Millisecond, func() { cancel(cause) })
	for range 2 { // the second time the context has ended before
		if found, err := h.Inspect(ctx, []string{dir}); !errors.Is(err, cause) || len(found) > 0 {
			t.Errorf("Inspect = %v, %v", found, err)
		}
	}
	dies()
	reap(t, h)
}

// A command that is not a helper is an error. No path counts as hung then.
func TestInspectWithoutAHelper(t *testing.T) {
	var h Helper
	for _, command := range [][]string{nil, {"/none"}, {"/bin/true"}, {"/bin/echo", "what is that?"},
		{"/bin/sleep", "100"}} {
		h.Command = command
		if found, err := h.Inspect(deadline(t, 500*time.Millisecond), []string{"/"}); err == nil || len(found) > 0 {
			t.Errorf("%q: Inspect = %v, %v", command, found, err)
		}
		if err := h.Unmount(deadline(t, 500*time.Millisecond), "/", "none"); err == nil {
			t.Errorf("%q: Unmount succeeded", command)
		}
	}
	reap(t, &h)
}
