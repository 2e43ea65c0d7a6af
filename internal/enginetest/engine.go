// Package enginetest starts container engines for tests: a dockerd or a podman service with a state of its own, images
// made from programs of this machine, and a registry. Nothing comes from another machine.
package enginetest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/moby/client"
	"golang.org/x/sys/unix"

	"holdfast/internal/installed"
)

// Engine is a container engine that only one test uses.
type Engine struct {
	Name string // docker or podman
	Host string // of its API, as in unix:///tmp/x/docker.sock

	t      testing.TB
	dir    string
	config string // containers.conf of podman
	daemon *process
	// containerd is a separate process, as in the packages of distributions. A containerd that dockerd starts dies with
	// it.
	containerd *process
}

// process is a child of the test.
type process struct {
	*exec.Cmd
	exited chan struct{}
}

func (e *Engine) spawn(args []string) *process {
	e.t.Helper()
	log, err := os.OpenFile(filepath.Join(e.dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		e.t.Fatal(err)
	}
	defer log.Close()
	p := &process{exec.Command(args[0], args[1:]...), make(chan struct{})}
	p.Stdout, p.Stderr, p.Env = log, log, e.environ()
	p.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := p.Start(); err != nil {
		e.t.Fatal(err)
	}
	go func() { _ = p.Wait(); close(p.exited) }()
	return p
}

// end asks the process to end, and kills it after the grace.
func (p *process) end(grace time.Duration) {
	if p == nil {
		return
	}
	_ = p.Process.Signal(unix.SIGTERM)
	select {
	case <-p.exited:
	case <-time.After(grace):
		_ = p.Process.Kill()
		<-p.exited
	}
}

// Each runs a test with each engine.
func Each(t *testing.T, test func(t *testing.T, e *Engine)) {
	for name, start := range map[string]func(testing.TB, ...string) *Engine{"docker": Docker, "podman": Podman} {
		t.Run(name, func(t *testing.T) { test(t, start(t)) })
	}
}

// Docker starts a dockerd, with further flags.
func Docker(t testing.TB, flags ...string) *Engine {
	return start(t, "docker", flags)
}

// Podman starts a podman service. Lines are added to the [engine] table of its containers.conf.
func Podman(t testing.TB, lines ...string) *Engine {
	return start(t, "podman", lines)
}

func start(t testing.TB, name string, extra []string) *Engine {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("container engines need root here")
	}
	dir, err := os.MkdirTemp("", "e-") // short: the engines put sockets below
	if err != nil {
		t.Fatal(err)
	}
	e := &Engine{Name: name, Host: "unix://" + filepath.Join(dir, "engine.sock"), t: t, dir: dir}
	if name == "docker" {
		installed.Tool(t, "dockerd", "docker.io")
	} else {
		installed.Tool(t, "podman", "podman")
		installed.Tool(t, "runc", "runc")
		e.config = filepath.Join(dir, "containers.conf")
		text := "[containers]\ndefault_ulimits = []\n[engine]\n" + strings.Join(extra, "\n") + "\n"
		err := os.WriteFile(e.config, []byte(text), 0o600)
		if err == nil {
			err = os.WriteFile(e.registries(), []byte("[[registry]]\nlocation = \"127.0.0.1\"\ninsecure = true\n"),
				0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		extra = nil
	}
	t.Cleanup(e.close)
	if name == "docker" {
		e.containerd = e.spawn([]string{"containerd", "--root", filepath.Join(dir, "containerd"),
			"--state", filepath.Join(dir, "containerd.run"), "--address", e.containerdSocket(), "--log-level", "warn"})
	}
	e.Start(extra...)
	return e
}

// Start starts the daemon, also after Kill, and waits until it answers.
func (e *Engine) Start(flags ...string) {
	e.t.Helper()
	_ = os.Remove(filepath.Join(e.dir, "pid")) // of a daemon that was killed
	args := append([]string{"dockerd", "--iptables=false", "--bridge=none", "--storage-driver=vfs",
		"--data-root", filepath.Join(e.dir, "data"), "--exec-root", filepath.Join(e.dir, "exec"),
		"--containerd", e.containerdSocket(), "--pidfile", filepath.Join(e.dir, "pid"), "-H", e.Host}, flags...)
	if e.Name == "podman" {
		args = e.podman("system", "service", "--time=0", e.Host)
	}
	e.daemon = e.spawn(args)
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if _, err := e.Client().Ping(context.Background(), client.PingOptions{}); err == nil {
			return
		}
		select {
		case <-e.daemon.exited:
			e.t.Fatalf("%s ended at once:\n%s", e.Name, e.log())
		default:
		}
		if time.Now().After(deadline) {
			e.t.Fatalf("%s does not answer:\n%s", e.Name, e.log())
		}
	}
}

func (e *Engine) containerdSocket() string { return filepath.Join(e.dir, "containerd.sock") }

// registries is registries.conf of podman. dockerd uses registries on 127.0.0.1 without TLS by itself.
func (e *Engine) registries() string { return filepath.Join(e.dir, "registries.conf") }

func (e *Engine) log() string {
	text, _ := os.ReadFile(filepath.Join(e.dir, "log"))
	return string(text[max(0, len(text)-4096):])
}

func (e *Engine) environ() []string {
	return append(os.Environ(), "CONTAINERS_CONF="+e.config, "CONTAINERS_REGISTRIES_CONF="+e.registries(),
		"DOCKER_HOST="+e.Host)
}

func (e *Engine) podman(args ...string) []string {
	return append([]string{"podman", "--runtime", "/usr/sbin/runc", "--cgroup-manager", "cgroupfs",
		"--storage-driver", "vfs", "--events-backend", "file", "--root", filepath.Join(e.dir, "data"),
		"--runroot", filepath.Join(e.dir, "run"), "--tmpdir", filepath.Join(e.dir, "tmp")}, args...)
}

// PID is the process ID of the daemon.
func (e *Engine) PID() int { return e.daemon.Process.Pid }

// Kill kills the daemon at once. Its containers continue.
func (e *Engine) Kill() {
	_ = e.daemon.Process.Kill()
	<-e.daemon.exited
}

// Stop ends the daemon as a shutdown of the machine does. dockerd ends its containers.
func (e *Engine) Stop() { e.daemon.end(time.Minute) }

// close removes the containers and ends the daemon.
func (e *Engine) close() {
	if e.daemon == nil {
		return
	}
	select {
	case <-e.daemon.exited:
		e.Start() // without the daemon, the containers cannot be stopped
	default:
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c := e.Client()
	list, err := c.ContainerList(ctx, client.ContainerListOptions{All: true})
	for _, item := range list.Items {
		_, left := c.ContainerRemove(ctx, item.ID, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
		err = errors.Join(err, left)
	}
	e.daemon.end(time.Minute)
	e.containerd.end(time.Minute)
	for _, below := range e.mounts() {
		_ = unix.Unmount(below, unix.MNT_DETACH)
	}
	left := os.RemoveAll(e.dir)
	for ; errors.Is(left, unix.ENOTEMPTY) && ctx.Err() == nil; left = os.RemoveAll(e.dir) {
		time.Sleep(20 * time.Millisecond) // podman removes the container's files after its end
	}
	if err = errors.Join(err, left); err != nil {
		e.t.Errorf("end of %s: %v\n%s", e.Name, err, e.log())
	}
}

// mounts lists the engine's own mounts, the innermost first.
func (e *Engine) mounts() (list []string) {
	text, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], e.dir+"/") {
			list = append([]string{f[4]}, list...)
		}
	}
	return list
}

// Client returns a client of the engine's API.
func (e *Engine) Client() *client.Client {
	c, err := client.New(client.WithHost(e.Host))
	if err != nil {
		e.t.Fatal(err)
	}
	return c
}

// Try runs the engine's own command, as in Try("run", "--rm", "image", "true").
func (e *Engine) Try(args ...string) (output string, err error) {
	if e.Name == "docker" {
		return e.Run(append([]string{"docker"}, args...)...)
	}
	return e.Run(e.podman(args...)...)
}

// Run runs a program that uses the engine.
func (e *Engine) Run(args ...string) (output string, err error) {
	var out, errs bytes.Buffer
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.Env = &out, &errs, e.environ()
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(errs.String()))
	}
	return strings.TrimSpace(out.String()), nil
}

// CLI runs the engine's own command, which must succeed, and returns its output.
func (e *Engine) CLI(args ...string) string {
	e.t.Helper()
	out, err := e.Try(args...)
	if err != nil {
		e.t.Fatal(err)
	}
	return out
}

// Remove kills and removes a container, if it exists. "podman rm -f" alone waits 10 s for a shell that ignores SIGTERM.
func (e *Engine) Remove(container string) error {
	args := []string{"rm", "-f", container}
	if e.Name == "podman" {
		args = []string{"rm", "-f", "--ignore", "--time", "0", container}
	}
	_, err := e.Try(args...)
	return err
}

// Programs returns files for Import: programs in /bin, with the libraries that ldd lists at their own paths.
func (e *Engine) Programs(programs ...string) map[string]string {
	e.t.Helper()
	files := map[string]string{}
	for _, name := range programs {
		path, err := exec.LookPath(name)
		if err != nil {
			e.t.Fatal(err)
		}
		files["/bin/"+filepath.Base(name)] = path
		libraries, _ := exec.Command("ldd", path).Output() // fails for a static program
		for _, word := range strings.Fields(string(libraries)) {
			if filepath.IsAbs(word) {
				files[word] = word
			}
		}
	}
	return files
}

// Import makes an image with a static busybox and further files. files maps their paths in the image to paths here.
func (e *Engine) Import(image string, files map[string]string) {
	e.t.Helper()
	installed.Tool(e.t, "busybox", "busybox-static")
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		e.t.Fatal(err)
	}
	archive, err := tarOf(busybox, files)
	if err != nil {
		e.t.Fatal(err)
	}
	source := filepath.Join(e.dir, "image.tar")
	if err := os.WriteFile(source, archive, 0o600); err != nil {
		e.t.Fatal(err)
	}
	e.CLI("import", "--change", "ENV PATH=/bin", "--change", `CMD ["sleep", "1000"]`, source, image)
	_ = os.Remove(source)
}

func tarOf(busybox string, files map[string]string) ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	err := addFile(w, "bin/busybox", busybox)
	for _, name := range strings.Fields("sh cat echo sleep ls sync id env mount umount mkdir rm") {
		err = errors.Join(err, w.WriteHeader(&tar.Header{
			Typeflag: tar.TypeSymlink, Name: "bin/" + name, Linkname: "busybox", Mode: 0o777,
		}))
	}
	err = errors.Join(err, w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: "tmp/", Mode: 0o1777}))
	for to, from := range files {
		err = errors.Join(err, addFile(w, path.Clean(strings.TrimPrefix(to, "/")), from))
	}
	return out.Bytes(), errors.Join(err, w.Close())
}

func addFile(w *tar.Writer, name, from string) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	err = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o755, Size: info.Size()})
	if err == nil {
		_, err = io.Copy(w, f)
	}
	return err
}
