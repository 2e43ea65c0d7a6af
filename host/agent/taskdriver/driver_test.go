package taskdriver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
)

// Roles of this binary when a test runs it again.
const (
	roleEnv       = "DRIVER_TEST_ROLE"
	starterRole   = "starter"   // starts the task on standard input, prints its handle, and lives until it is killed
	userNSRole    = "userns"    // runs the tests in a user namespace
	version2Role  = "version2"  // runs tests without cgroups of version 1
	noCgroupsRole = "nocgroups" // runs tests without any cgroup
)

func TestMain(m *testing.M) {
	Main()
	switch os.Getenv(roleEnv) {
	case starterRole:
		startAndStay()
	case version2Role:
		unmountCgroups("cgroup")
	case noCgroupsRole:
		unmountCgroups("cgroup", "cgroup2")
	}
	// Parents whose starter was killed become children of this process, because pid 1 may not be an init.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

func startAndStay() {
	var r request
	if err := json.NewDecoder(os.Stdin).Decode(&r); err != nil {
		panic(err)
	}
	d := map[string]Driver{"exec": NewExec(), "raw_exec": NewRawExec()}[r.Driver]
	h, err := d.Start(context.Background(), r.Task)
	if err != nil {
		panic(err)
	}
	_ = json.NewEncoder(os.Stdout).Encode(h)
	_, _ = io.Copy(io.Discard, os.Stdin)
	select {}
}

// eachDriver runs a test with each driver.
func eachDriver(t *testing.T, test func(*testing.T, Driver)) {
	for _, d := range []Driver{NewExec(), NewRawExec()} {
		t.Run(d.Name(), func(t *testing.T) {
			if d.Isolated() {
				needMounts(t)
			}
			test(t, d)
		})
	}
}

// needMounts skips the test if it cannot mount. TestTasksInUserNamespace runs the test where it can.
func needMounts(t *testing.T) {
	t.Helper()
	if err := mount.OnThread(func() error { return unix.Unshare(unix.CLONE_NEWNS) }); err != nil {
		t.Skipf("cannot mount here: %v", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// tempDir returns a directory with a short path. Nothing may be mounted in it at the end of the test.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	mounted := func() (points []string) {
		for _, line := range mountLines(t, dir) {
			points = append(points, strings.Fields(line)[4])
		}
		return points
	}
	t.Cleanup(func() {
		for range 64 {
			if points := mounted(); len(points) == 0 || unix.Unmount(points[len(points)-1], 0) != nil {
				break
			}
		}
		if points := mounted(); len(points) > 0 {
			t.Errorf("still mounted: %q", points)
			return
		}
		_ = os.RemoveAll(dir)
	})
	return dir
}

// sharedDir returns a directory that propagates mounts.
func sharedDir(t *testing.T) string {
	t.Helper()
	dir := tempDir(t)
	must(t, mount.MakeShared(dir))
	return dir
}

// mountLines returns the lines of mountinfo that contain a text.
func mountLines(t *testing.T, text string) (lines []string) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, text) {
			lines = append(lines, line)
		}
	}
	return lines
}

// shell returns a task that runs a script.
func shell(t *testing.T, script string) Task {
	t.Helper()
	return Task{
		ID:  fmt.Sprintf("%s-%d-%d", strings.ReplaceAll(t.Name(), "/", "-"), os.Getpid(), time.Now().UnixNano()),
		Dir: filepath.Join(tempDir(t), "task"), Command: "sh", Args: []string{"-euc", script},
	}
}

// start starts a task, which is stopped at the end of the test.
func start(t *testing.T, d Driver, task Task) Handle {
	t.Helper()
	h, err := d.Start(t.Context(), task)
	must(t, err)
	stopAtEnd(t, d, h)
	return h
}

func stopAtEnd(t *testing.T, d Driver, h Handle) {
	t.Cleanup(func() {
		err := d.Stop(context.Background(), h, 0)
		_, waitErr := d.Wait(context.Background(), h)
		if err := errors.Join(err, waitErr); err != nil {
			t.Error(err)
		}
		wantNothingLeft(t, h.ID)
		for pid := 1; pid > 0; { // reap what a killed parent left, as init would
			pid, _ = unix.Wait4(-1, nil, unix.WNOHANG, nil)
		}
	})
}

// wantNothingLeft checks with ps and find that a task has neither processes nor cgroups.
func wantNothingLeft(t *testing.T, id string) {
	t.Helper()
	for _, f := range psFields(t, "pid=,stat=,args=", "e") {
		if f[1][0] != 'Z' && slices.Contains(f, taskEnv+"="+id) {
			t.Errorf("process %s is left", f[0])
		}
	}
	if out, _ := exec.Command("find", "/sys/fs/cgroup", "-name", "holdfast-"+id).Output(); len(out) > 0 {
		t.Errorf("cgroups are left: %s", out)
	}
}

// psFields returns the fields of each line of ps.
func psFields(t *testing.T, format string, more ...string) (lines [][]string) {
	t.Helper()
	out, err := exec.Command("ps", append([]string{"-e", "-ww", "-o", format}, more...)...).Output()
	must(t, err)
	for line := range strings.Lines(string(out)) {
		lines = append(lines, strings.Fields(line))
	}
	return lines
}

// children lists the children of this process, zombies included.
func children(t *testing.T) (found []string) {
	t.Helper()
	for _, f := range psFields(t, "ppid=,pid=,stat=,comm=") {
		if atoi(f[0]) == os.Getpid() && f[3] != "ps" {
			found = append(found, strings.Join(f, " "))
		}
	}
	return found
}

// livingBelow lists the living descendants of a process.
func livingBelow(t *testing.T, pid int) (found []int) {
	t.Helper()
	all := psFields(t, "ppid=,pid=,stat=")
	for queue := []int{pid}; len(queue) > 0; queue = queue[1:] {
		for _, f := range all {
			if atoi(f[0]) == queue[0] {
				queue = append(queue, atoi(f[1]))
				if f[2][0] != 'Z' {
					found = append(found, atoi(f[1]))
				}
			}
		}
	}
	return found
}

func isLiving(pid int) bool {
	out, _ := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
	state := strings.TrimSpace(string(out))
	return state != "" && state[0] != 'Z'
}

func wantDead(t *testing.T, pids []int) {
	t.Helper()
	for _, pid := range pids {
		if isLiving(pid) {
			t.Errorf("process %d lives", pid)
		}
	}
}

func atoi(s string) int {
	n, _ := strconv.Atoi(strings.TrimSpace(s))
	return n
}

func wait(t *testing.T, d Driver, h Handle) Exit {
	t.Helper()
	exit, err := d.Wait(t.Context(), h)
	must(t, err)
	return exit
}

func wantAlive(t *testing.T, d Driver, h Handle, want bool) {
	t.Helper()
	if alive, err := d.Adopt(t.Context(), h); alive != want || err != nil {
		t.Errorf("alive %t, %v", alive, err)
	}
}

// run returns the output of a task that must succeed.
func run(t *testing.T, d Driver, task Task) string {
	t.Helper()
	h := start(t, d, task)
	if exit := wait(t, d, h); exit.Code != 0 || exit.Err != "" {
		t.Fatalf("exit %+v\n%s", exit, logs(t, d, h, Stderr))
	}
	return logs(t, d, h, Stdout)
}

func logs(t *testing.T, d Driver, h Handle, s Stream) string {
	t.Helper()
	var b bytes.Buffer
	must(t, d.Logs(t.Context(), h, s, false, &b))
	return b.String()
}

// wantLines compares output with lines.
func wantLines(t *testing.T, out string, want ...string) {
	t.Helper()
	if got := strings.TrimSpace(out); got != strings.Join(want, "\n") {
		t.Errorf("output\n%s\nwant\n%s", got, strings.Join(want, "\n"))
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func mkdir(t *testing.T, elem ...string) string {
	t.Helper()
	dir := filepath.Join(elem...)
	must(t, os.MkdirAll(dir, 0o755))
	return dir
}

func binds(b ...hooks.Bind) hooks.Plan       { return hooks.Plan{Binds: b} }
func devices(d ...hooks.Device) hooks.Plan   { return hooks.Plan{Devices: d} }
func rules(r ...hooks.DeviceRule) hooks.Plan { return hooks.Plan{Rules: r} }

func charRule(major, minor int64, access string) hooks.DeviceRule {
	return hooks.DeviceRule{Type: "c", Major: major, Minor: minor, Access: access}
}

// hostDevices is the bind that the shim gives to plugins that mount.
var hostDevices = binds(hooks.Bind{Source: "/dev", Target: "/dev", Propagation: hooks.Private})

// fifos lets a test and a script wait for each other.
type fifos struct {
	dir   string
	ready string // script that reports to the test
	wait  string // script that waits for the test
}

func newFifos(t *testing.T) fifos {
	t.Helper()
	dir := tempDir(t)
	must(t, errors.Join(unix.Mkfifo(dir+"/ready", 0o600), unix.Mkfifo(dir+"/go", 0o600)))
	return fifos{dir, " echo > " + dir + "/ready; ", " cat " + dir + "/go > /dev/null; "}
}

// awaitReady waits for the script.
func (f fifos) awaitReady(t *testing.T) {
	t.Helper()
	_, err := os.ReadFile(f.dir + "/ready")
	must(t, err)
}

// release lets the script continue.
func (f fifos) release(t *testing.T) {
	t.Helper()
	must(t, os.WriteFile(f.dir+"/go", []byte("go"), 0))
}

// TestTasksInUserNamespace runs tests as nobody in a user namespace.
func TestTasksInUserNamespace(t *testing.T) {
	if os.Getenv(roleEnv) != "" {
		t.Skip("this is the inner run")
	}
	dir := tempDir(t)
	must(t, os.Chmod(dir, 0o777))
	self := filepath.Join(dir, "driver.test")
	b, err := os.ReadFile(os.Args[0])
	must(t, errors.Join(err, os.WriteFile(self, b, 0o755)))
	cmd := exec.CommandContext(t.Context(), "unshare", "-Urm", self, "-test.v",
		"-test.run=Mounts|Propagation|ReadOnly|Paths|Devices|Refused|Exit|Stop|Survives|Killed|Leaked/exec")
	cmd.Dir = dir
	cmd.Env = []string{roleEnv + "=" + userNSRole, "TMPDIR=" + dir, "PATH=" + os.Getenv("PATH"),
		"GORACE=atexit_sleep_ms=0"}
	if os.Getuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	out, err := cmd.CombinedOutput()
	if err != nil && strings.Contains(string(out), "unshare failed") {
		t.Skipf("no user namespaces here: %s", out)
	}
	if err != nil || !strings.Contains(string(out), "--- PASS: TestBidirectionalMountsOutliveTheTask") {
		t.Fatalf("in a user namespace: %v\n%s", err, out)
	}
}
