package main

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
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

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/internal/installed"
	"holdfast/internal/mount/mounttest"
)

// asLoopfs makes the test binary run loopfs' own main: the tests start and kill real processes of what they test.
const asLoopfs = "LOOPFS_TEST_AS_LOOPFS"

func TestMain(m *testing.M) {
	if os.Getenv(asLoopfs) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(mounttest.Run(m))
}

// machine is what a test's processes share: a data directory, and a directory for staging and target paths.
type machine struct {
	t                *testing.T
	base, data, work string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	t.Parallel()
	base, err := os.MkdirTemp("", "h-") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	if base, err = filepath.EvalSymlinks(base); err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t, base: base, data: filepath.Join(base, "data"), work: filepath.Join(base, "work")}
	if err := os.Mkdir(m.work, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.cleanUp)
	return m
}

// cleanUp is the last check of every test: nothing is mounted, no loop device is left, only then the directory goes.
func (m *machine) cleanUp() {
	mounted := m.mounted()
	for i := len(mounted) - 1; i >= 0; i-- {
		m.t.Errorf("still mounted: %s", mounted[i])
		_ = unix.Unmount(mounted[i], unix.MNT_DETACH)
	}
	m.awaitNoLoops()
	if err := os.RemoveAll(m.base); err != nil {
		m.t.Error(err)
	}
}

// mounted lists the mounts below the test's directory, from the mount table.
func (m *machine) mounted() []string {
	m.t.Helper()
	list, err := mountinfo.GetMounts(mountinfo.PrefixFilter(m.base))
	if err != nil {
		m.t.Fatal(err)
	}
	var at []string
	for _, e := range list {
		at = append(at, e.Mountpoint)
	}
	return at
}

// loops lists the loop devices over files of the test's directory, from sysfs.
func (m *machine) loops() []string {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		m.t.Fatal(err)
	}
	var found []string
	for _, f := range files {
		if name, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(name), m.base+"/") {
			found = append(found, f+" "+strings.TrimSpace(string(name)))
		}
	}
	return found
}

func (m *machine) awaitNoLoops() {
	m.t.Helper()
	if left := m.settledLoops(10 * time.Second); len(left) > 0 {
		m.t.Errorf("loop devices leaked: %q", left)
	}
}

// settledLoops waits until the kernel has freed every device, or the time is over.
func (m *machine) settledLoops(wait time.Duration) []string {
	end := time.Now().Add(wait)
	for len(m.loops()) > 0 && time.Now().Before(end) {
		time.Sleep(2 * time.Millisecond)
	}
	return m.loops()
}

func (m *machine) volumeFiles() []string {
	m.t.Helper()
	var found []string
	for _, sub := range []string{"volumes", "images", "dirs"} {
		entries, err := os.ReadDir(filepath.Join(m.data, sub))
		if err != nil {
			m.t.Fatal(err)
		}
		for _, e := range entries {
			found = append(found, sub+"/"+e.Name())
		}
	}
	return found
}

func (m *machine) run(command ...string) error { return exec.Command(command[0], command[1:]...).Run() }

// reflinks says whether cp can make one in the test's directory.
func (m *machine) reflinks() bool {
	file := filepath.Join(m.base, "probe")
	if err := os.WriteFile(file, make([]byte, 4096), 0o600); err != nil {
		m.t.Fatal(err)
	}
	return m.run("cp", "--reflink=always", file, file+"2") == nil
}

// dataOnXFS makes the data directory a mounted xfs, which has reflinks.
func (m *machine) dataOnXFS() {
	m.t.Helper()
	installed.FileSystem(m.t, "xfs")
	image := filepath.Join(m.t.TempDir(), "xfs.img")
	f, err := os.Create(image)
	if err == nil {
		err = errors.Join(f.Truncate(300<<20), f.Close(), os.Mkdir(m.data, 0o700))
	}
	if err != nil {
		m.t.Fatal(err)
	}
	for _, command := range [][]string{{"mkfs.xfs", "-q", image}, {"mount", "-o", "loop", image, m.data}} {
		if out, err := exec.Command(command[0], command[1:]...).CombinedOutput(); err != nil {
			m.t.Fatalf("%s: %v: %s", command[0], err, out)
		}
	}
	m.t.Cleanup(func() {
		if err := m.run("umount", m.data); err != nil {
			m.t.Error(err)
		}
	})
}

// staging makes a staging directory, as an orchestrator does.
func (m *machine) staging(name string) string {
	m.t.Helper()
	dir := filepath.Join(m.work, name)
	if err := os.Mkdir(dir, 0o755); err != nil {
		m.t.Fatal(err)
	}
	return dir
}

func (m *machine) target(name string) string { return filepath.Join(m.work, name) }

// process is one running loopfs.
type process struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.NodeClient
	t      *testing.T
	cmd    *exec.Cmd
	conn   *grpc.ClientConn
	socket string
	log    *record
	ended  chan struct{}
}

// record is what the process has logged so far.
type record struct {
	mu   sync.Mutex
	text strings.Builder
}

func (r *record) WriteString(s string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.text.WriteString(s)
}

func (r *record) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.String()
}

// start runs loopfs with its own socket name and waits until it serves.
func (m *machine) start(name string, args ...string) *process {
	m.t.Helper()
	return m.startCommand(name, []string{self(m.t)}, nil, args...)
}

func self(t *testing.T) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return exe
}

func (m *machine) startCommand(name string, command, env []string, args ...string) *process {
	m.t.Helper()
	p := &process{t: m.t, socket: filepath.Join(m.base, name+".sock"), log: &record{}, ended: make(chan struct{})}
	args = append(command[1:], append([]string{"--data", m.data, "--log-level", "debug"}, args...)...)
	p.cmd = exec.Command(command[0], args...)
	p.cmd.Env = append(append(os.Environ(), asLoopfs+"=1", "CSI_ENDPOINT=unix://"+p.socket, "GORACE=atexit_sleep_ms=0"),
		env...)
	stderr, err := p.cmd.StderrPipe()
	if err != nil {
		m.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	serving := make(chan struct{})
	go p.follow(stderr, serving)
	m.t.Cleanup(p.kill)
	select {
	case <-serving:
	case <-p.ended:
		m.t.Fatalf("loopfs ended instead of serving:\n%s", p.log)
	}
	p.dial()
	return p
}

// follow keeps the log and notes when the process serves and when it has ended.
func (p *process) follow(stderr io.Reader, serving chan<- struct{}) {
	defer close(p.ended)
	lines := bufio.NewScanner(stderr)
	for lines.Scan() {
		p.log.WriteString(lines.Text() + "\n")
		if serving != nil && strings.Contains(lines.Text(), "serving: endpoint=") {
			close(serving)
			serving = nil
		}
	}
	_ = p.cmd.Wait()
}

func (p *process) dial() {
	p.t.Helper()
	conn, err := grpc.NewClient("unix://"+p.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { conn.Close() })
	p.conn = conn
	p.IdentityClient, p.ControllerClient, p.NodeClient = csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewNodeClient(conn)
}

// kill is kill -9, and waits for the end.
func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// stop is SIGTERM; the process has to end well.
func (p *process) stop() {
	p.t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		p.t.Fatal(err)
	}
	<-p.ended
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		p.t.Errorf("after SIGTERM the exit code is %d:\n%s", code, p.log)
	}
}

// need skips where this machine cannot run the backend; root in the initial user namespace has no such excuse.
func need(t *testing.T, backend string) {
	t.Helper()
	err := disk.MountPossible()
	if err == nil && backend == disk.LoopBackend {
		_, _, err = disk.Choose(disk.LoopBackend)
	}
	if err != nil && os.Geteuid() == 0 {
		t.Fatalf("this machine should be able to: %v", err)
	}
	if err != nil {
		t.Skip(err)
	}
}

// step is one expectation on one call's code.
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
		t.Errorf("in %s is %q, %v; want %q", dir, text, err, want)
	}
}

func expectReadOnly(t *testing.T, dir string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, "g"), nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("%s can be written: %v", dir, err)
	}
}

func expectGone(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("%s is still there: %v", path, err)
	}
}

// eachBackend runs a test once per backend.
func eachBackend(t *testing.T, test func(t *testing.T, backend string)) {
	for _, b := range []string{disk.LoopBackend, disk.DirBackend} {
		t.Run(b, func(t *testing.T) {
			need(t, b)
			test(t, b)
		})
	}
}

// within bounds what a test waits for; it ends a hang, it decides nothing.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}
