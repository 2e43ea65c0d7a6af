package main

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"holdfast/internal/mount/mounttest"
)

// asLoopfs makes the test binary run the main function of loopfs: the tests start and kill real processes.
const asLoopfs = "LOOPFS_TEST_AS_LOOPFS"

func TestMain(m *testing.M) {
	if os.Getenv(asLoopfs) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(mounttest.Run(m))
}

// machine holds what the processes of a test share: a data directory, and a directory for staging and target paths.
type machine struct {
	t                *testing.T
	base, data, work string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	t.Parallel()
	base, err := os.MkdirTemp("", "h-") // short, for sockets
	must(t, err)
	base, err = filepath.EvalSymlinks(base)
	must(t, err)
	m := &machine{t: t, base: base, data: filepath.Join(base, "data"), work: filepath.Join(base, "work")}
	must(t, os.Mkdir(m.work, 0o755))
	t.Cleanup(m.cleanUp)
	return m
}

// mountData gives the data directory a small file system of its own, mounted at fs. options are those of tmpfs.
func (m *machine) mountData(options string) (fs string) {
	m.t.Helper()
	fs = filepath.Join(m.base, "fs")
	must(m.t, os.Mkdir(fs, 0o700))
	must(m.t, unix.Mount("none", fs, "tmpfs", 0, options))
	m.t.Cleanup(func() { must(m.t, unix.Unmount(fs, 0)) })
	m.data = filepath.Join(fs, "data")
	return fs
}

// cleanUp is the last check of every test: nothing is mounted, and no loop device is left.
func (m *machine) cleanUp() {
	for _, point := range slices.Backward(m.mounted()) {
		m.t.Errorf("still mounted: %s", point)
		_ = unix.Unmount(point, unix.MNT_DETACH)
	}
	m.awaitNoLoops()
	must(m.t, os.RemoveAll(m.base))
}

// mounted lists the mounts below the test's directory, from the mount table.
func (m *machine) mounted() (points []string) {
	m.t.Helper()
	list, err := mountinfo.GetMounts(mountinfo.PrefixFilter(m.base))
	must(m.t, err)
	for _, e := range list {
		points = append(points, e.Mountpoint)
	}
	return points
}

// loops lists the loop devices over files of the test's directory, from sysfs.
func (m *machine) loops() (found []string) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	must(m.t, err)
	for _, f := range files {
		if name, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(name), m.base+"/") {
			found = append(found, f+" "+strings.TrimSpace(string(name)))
		}
	}
	return found
}

// awaitNoLoops waits until the kernel has freed every loop device.
func (m *machine) awaitNoLoops() {
	m.t.Helper()
	until(m.t, "all loop devices are freed", func() bool { return len(m.loops()) == 0 })
}

// volumeFiles lists the directories of volumes, snapshots and groups.
func (m *machine) volumeFiles() (found []string) {
	m.t.Helper()
	entries, err := os.ReadDir(filepath.Join(m.data, "volumes"))
	must(m.t, err)
	for _, e := range entries {
		found = append(found, e.Name())
	}
	return found
}

func (m *machine) expectNoVolumes() {
	m.t.Helper()
	if left := m.volumeFiles(); len(left) > 0 {
		m.t.Errorf("left are %q", left)
	}
}

// staging makes a staging directory, as an orchestrator does.
func (m *machine) staging(name string) string {
	m.t.Helper()
	dir := filepath.Join(m.work, name)
	must(m.t, os.Mkdir(dir, 0o755))
	return dir
}

func (m *machine) target(name string) string { return filepath.Join(m.work, name) }

// process is a running loopfs.
type process struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.NodeClient
	csi.GroupControllerClient
	csi.SnapshotMetadataClient
	t           *testing.T
	cmd         *exec.Cmd
	conn        *grpc.ClientConn
	socket, log string // paths
	ended       chan struct{}
}

// start runs loopfs with a socket of that name and waits until it serves.
func (m *machine) start(name string, args ...string) *process {
	m.t.Helper()
	return m.startCommand(name, []string{self(m.t)}, nil, args...)
}

// runLoopfs starts loopfs with a backend on a new machine. It skips the test where the backend is not possible.
func runLoopfs(t *testing.T, backend string, args ...string) (*machine, *process) {
	t.Helper()
	need(t, backend)
	m := newMachine(t)
	return m, m.start("csi", append([]string{"--backend", backend}, args...)...)
}

func self(t *testing.T) string {
	t.Helper()
	exe, err := os.Executable()
	must(t, err)
	return exe
}

func (m *machine) startCommand(name string, command, env []string, args ...string) *process {
	m.t.Helper()
	log, err := os.CreateTemp(m.base, name+"-*.log")
	must(m.t, err)
	defer log.Close()
	p := &process{t: m.t, socket: filepath.Join(m.base, name+".sock"), log: log.Name(), ended: make(chan struct{})}
	args = append(command[1:], append([]string{"--data", m.data, "--log-level", "debug"}, args...)...)
	p.cmd = exec.Command(command[0], args...)
	p.cmd.Stderr = log
	p.cmd.Env = append(append(os.Environ(), asLoopfs+"=1", "CSI_ENDPOINT=unix://"+p.socket, "GORACE=atexit_sleep_ms=0"),
		env...)
	must(m.t, p.cmd.Start())
	go func() {
		defer close(p.ended)
		_ = p.cmd.Wait()
	}()
	m.t.Cleanup(p.kill)
	until(m.t, "loopfs serves", func() bool {
		if strings.Contains(p.logged(), "serving: endpoint=") {
			return true
		}
		if p.dead() {
			m.t.Fatalf("loopfs ended instead of serving:\n%s", p.logged())
		}
		return false
	})
	p.conn, err = grpc.NewClient("unix://"+p.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(m.t, err)
	m.t.Cleanup(func() { p.conn.Close() })
	p.IdentityClient = csi.NewIdentityClient(p.conn)
	p.ControllerClient, p.NodeClient = csi.NewControllerClient(p.conn), csi.NewNodeClient(p.conn)
	p.GroupControllerClient = csi.NewGroupControllerClient(p.conn)
	p.SnapshotMetadataClient = csi.NewSnapshotMetadataClient(p.conn)
	return p
}

// logged returns what the process has logged so far.
func (p *process) logged() string {
	text, err := os.ReadFile(p.log)
	must(p.t, err)
	return string(text)
}

func (p *process) dead() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// kill sends SIGKILL and waits for the end.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// stop sends SIGTERM; the process has to exit with 0.
func (p *process) stop() {
	p.t.Helper()
	must(p.t, p.cmd.Process.Signal(syscall.SIGTERM))
	<-p.ended
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		p.t.Errorf("after SIGTERM the exit code is %d:\n%s", code, p.logged())
	}
}

// need skips where this machine cannot run the backend. As root in the initial user namespace the test fails instead.
func need(t *testing.T, backend string) {
	t.Helper()
	err := mountPossible()
	if err == nil && backend == loopBackend {
		_, _, err = chooseBackend(loopBackend)
	}
	if err != nil && os.Geteuid() == 0 {
		t.Fatalf("root cannot use the backend: %v", err)
	}
	if err != nil {
		t.Skip(err)
	}
}

// eachBackend runs a test once per backend.
func eachBackend(t *testing.T, test func(t *testing.T, backend string)) {
	for _, b := range []string{loopBackend, dirBackend} {
		t.Run(b, func(t *testing.T) {
			need(t, b)
			test(t, b)
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// until waits for a condition.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("timed out waiting until %s", what)
		}
	}
}

// step checks the code of a call.
func step(t *testing.T, what string, err error, want codes.Code) {
	t.Helper()
	if status.Code(err) != want {
		t.Errorf("%s: %v, want %s", what, err, want)
	}
}

func write(t *testing.T, dir, text string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "f"), []byte(text), 0o644); err != nil {
		t.Error(err)
	}
}

func expectText(t *testing.T, dir, want string) {
	t.Helper()
	if text, err := os.ReadFile(filepath.Join(dir, "f")); string(text) != want || err != nil {
		t.Errorf("the file in %s holds %q, %v; want %q", dir, text, err, want)
	}
}

func expectReadOnly(t *testing.T, dir string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "g"), nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("write to %s: %v", dir, err)
	}
}

func expectGone(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("%s still exists: %v", path, err)
	}
}
