package taskdriver

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
)

// What this binary does when a test runs it again.
const (
	roleEnv  = "DRIVER_TEST_ROLE"
	starter  = "starter"  // starts the task on its standard input, prints its handle, and lives until it is killed
	inside   = "inside"   // runs the tests in a user namespace
	version2 = "version2" // runs tests without cgroups of version 1
	nogroups = "nogroups" // runs tests without any cgroup
)

func TestMain(m *testing.M) {
	Main()
	if os.Getenv(roleEnv) == starter {
		startAndStay()
	}
	if types, some := leaves[os.Getenv(roleEnv)]; some {
		leave(types...)
	}
	// The parents of tasks whose starter was killed come to us, not to a pid 1 that may be no init.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

func startAndStay() {
	var o request
	if err := json.NewDecoder(os.Stdin).Decode(&o); err != nil {
		panic(err)
	}
	h, err := driverOf(o.Driver).Start(testContext{}, o.Task)
	if err != nil {
		panic(err)
	}
	_ = json.NewEncoder(os.Stdout).Encode(h)
	_, _ = io.Copy(io.Discard, os.Stdin)
	select {}
}

// testContext is a context for a process without a test.
type testContext struct{}

func (testContext) Deadline() (time.Time, bool) { return time.Time{}, false }
func (testContext) Done() <-chan struct{}       { return nil }
func (testContext) Err() error                  { return nil }
func (testContext) Value(any) any               { return nil }

func driverOf(name string) Driver {
	if name == "exec" {
		return NewExec()
	}
	return NewRawExec()
}

// both runs a test with each driver.
func both(t *testing.T, test func(*testing.T, Driver)) {
	for _, d := range []Driver{NewExec(), NewRawExec()} {
		t.Run(d.Name(), func(t *testing.T) {
			if d.Isolated() {
				needMounts(t)
			}
			test(t, d)
		})
	}
}

// needMounts skips where no mount can be made; the user namespace run shows that a capable machine does not skip.
func needMounts(t *testing.T) {
	t.Helper()
	if err := mount.OnThread(func() error { return unix.Unshare(unix.CLONE_NEWNS) }); err != nil {
		t.Skipf("mounts cannot be made here: %v", err)
	}
}

// tempDir is a short directory; at the end nothing may be mounted in it.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for range 64 {
			if points := mountedBelow(t, dir); len(points) == 0 || unix.Unmount(points[len(points)-1], 0) != nil {
				break
			}
		}
		if points := mountedBelow(t, dir); len(points) > 0 {
			t.Errorf("still mounted: %q", points)
			return
		}
		_ = os.RemoveAll(dir)
	})
	return dir
}

// sharedDir is one below which mounts travel.
func sharedDir(t *testing.T) string {
	t.Helper()
	dir := tempDir(t)
	if err := mount.MakeShared(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// mountLines are the lines of this process's mountinfo with a text in them.
func mountLines(t *testing.T, text string) []string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, text) {
			lines = append(lines, line)
		}
	}
	return lines
}

func mountedBelow(t *testing.T, dir string) []string {
	var points []string
	for _, line := range mountLines(t, dir) {
		points = append(points, strings.Fields(line)[4])
	}
	return points
}

// shell is a task that runs a script.
func shell(t *testing.T, script string) Task {
	t.Helper()
	return Task{
		ID:  fmt.Sprintf("%s-%d-%d", strings.ReplaceAll(t.Name(), "/", "-"), os.Getpid(), time.Now().UnixNano()),
		Dir: filepath.Join(tempDir(t), "task"), Command: "sh", Args: []string{"-euc", script},
	}
}

// start starts a task and ends it with the test, whatever happens.
func start(t *testing.T, d Driver, task Task) Handle {
	t.Helper()
	h, err := d.Start(t.Context(), task)
	if err != nil {
		t.Fatal(err)
	}
	endWithTest(t, d, h)
	return h
}

func endWithTest(t *testing.T, d Driver, h Handle) {
	t.Cleanup(func() {
		if err := d.Stop(testContext{}, h, 0); err != nil {
			t.Error(err)
		}
		if _, err := d.Wait(testContext{}, h); err != nil {
			t.Error(err)
		}
		if pids := withMark(t, h.ID); len(pids) > 0 {
			t.Errorf("processes are left: %v", pids)
		}
		noGroups(t, h.ID)
		for pid := 1; pid > 0; { // what a killed parent left to us is ours to reap, as it would be init's
			pid, _ = unix.Wait4(-1, nil, unix.WNOHANG, nil)
		}
	})
}

// noGroups fails if a cgroup of the task is left anywhere.
func noGroups(t *testing.T, id string) {
	t.Helper()
	out, _ := exec.Command("find", "/sys/fs/cgroup", "-name", "holdfast-"+id).Output()
	if len(out) > 0 {
		t.Errorf("cgroups are left: %s", out)
	}
}

func wait(t *testing.T, d Driver, h Handle) Exit {
	t.Helper()
	exit, err := d.Wait(t.Context(), h)
	if err != nil {
		t.Fatal(err)
	}
	return exit
}

// run runs a task to its end and fails unless that is good.
func run(t *testing.T, d Driver, task Task) string {
	t.Helper()
	h := start(t, d, task)
	if exit := wait(t, d, h); exit.Code != 0 || exit.Err != "" {
		t.Fatalf("it ended with %+v\n%s", exit, logs(t, d, h, Stderr))
	}
	return logs(t, d, h, Stdout)
}

func logs(t *testing.T, d Driver, h Handle, s Stream) string {
	t.Helper()
	var b bytes.Buffer
	if err := d.Logs(t.Context(), h, s, false, &b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// withMark lists the processes that were started with a task's id, by a search of its own: ps knows them.
func withMark(t *testing.T, id string) []string {
	t.Helper()
	out, err := exec.Command("ps", "-e", "-ww", "-o", "pid=,stat=,args=", "e").Output()
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) > 1 && f[1][0] != 'Z' && strings.Contains(line, taskEnv+"="+id) {
			found = append(found, f[0])
		}
	}
	return found
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func mkdir(t *testing.T, elem ...string) string {
	t.Helper()
	dir := filepath.Join(elem...)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// fifos are two pipes by which a script says that it has come so far and is told to go on.
type fifos struct{ dir string }

func newFifos(t *testing.T) fifos {
	t.Helper()
	f := fifos{tempDir(t)}
	for _, name := range []string{"ready", "go"} {
		if err := unix.Mkfifo(filepath.Join(f.dir, name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

// reached returns what the script wrote once it is there.
func (f fifos) reached(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(f.dir + "/ready")
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

func (f fifos) goOn(t *testing.T) {
	t.Helper()
	if err := os.WriteFile(f.dir+"/go", []byte("go"), 0); err != nil {
		t.Fatal(err)
	}
}

// TestUserNamespace runs the other tests as an ordinary user would: unshare -Urm, mapped from nobody.
func TestUserNamespace(t *testing.T) {
	if os.Getenv(roleEnv) != "" {
		t.Skip("this is the inner run")
	}
	dir := tempDir(t)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	self := filepath.Join(dir, "driver.test")
	b, err := os.ReadFile(os.Args[0])
	if err == nil {
		err = os.WriteFile(self, b, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "unshare", "-Urm", self, "-test.v", "-test.run=Mounts|Propagation|ReadOnly|Paths|Devices|Refused|Exit|Stop|Survives|Killed|Leaked/exec")
	cmd.Dir = dir
	cmd.Env = []string{roleEnv + "=" + inside, "TMPDIR=" + dir, "PATH=" + os.Getenv("PATH"), "GORACE=atexit_sleep_ms=0"}
	if os.Getuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	out, err := cmd.CombinedOutput()
	if err != nil && strings.Contains(string(out), "unshare failed") {
		t.Skipf("this machine allows no user namespaces: %s", out)
	}
	if err != nil || !strings.Contains(string(out), "--- PASS: TestBidirectionalMountsOutliveTheTask") {
		t.Fatalf("in a user namespace: %v\n%s", err, out)
	}
}
