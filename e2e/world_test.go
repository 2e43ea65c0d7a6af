package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/moby/sys/mountinfo"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

// world is one machine with a host, its shim, and plugins that make real mounts and write one journal.
type world struct {
	t       *testing.T
	dir     string
	config  host.Config
	host    *host.Host
	journal string
	backend *csifake.Backend
	caps    []string
	started func(*csifake.Plugin) // is told of a plugin before its task counts as started
	beat    string                // of the heartbeat blocks of plugins that are started
	more    string                // of their csi_plugin blocks, in lines
}

// patience bounds whatever is waited for; it is never what a test measures.
const patience = 60 * time.Second

// newWorld opens a host. At the test's end everything must be taken down, and the journal legal.
func newWorld(t *testing.T, caps ...string) *world {
	t.Helper()
	w := placed(t, caps...)
	w.open()
	return w
}

// placed is a world whose host is still to be opened.
func placed(t *testing.T, caps ...string) *world {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, dir: dir, backend: csifake.NewBackend(""), caps: caps, beat: `interval = "1s"`}
	w.journal = csifake.NewJournal(t, journal.Options{Settled: true})
	level := hclog.Warn
	if testing.Verbose() {
		level = hclog.Debug
	}
	w.config = host.Config{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Node: "node-1", MaxHold: patience,
		Shim:   host.Binary{Path: filepath.Join(bin, "holdfast-shim")},
		Logger: hclog.New(&hclog.LoggerOptions{Output: t.Output(), Level: level}),
	}
	t.Cleanup(w.leave)
	return w
}

func (w *world) open() {
	w.t.Helper()
	h, err := host.Open(w.ctx(), w.config)
	if err != nil {
		w.t.Fatalf("open: %v", err)
	}
	w.host = h
}

// leave closes the host and proves that nothing is left: no mount but our two roots, no directory of a volume, no socket.
func (w *world) leave() {
	if err := w.host.Close(); err != nil {
		w.t.Errorf("close: %v", err)
	}
	if out, err := exec.Command(w.config.Shim.Path, "-check", filepath.Join(w.config.StateDir, "shim.db")).CombinedOutput(); err != nil {
		w.t.Errorf("the state is not sound: %v\n%s", err, out)
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(w.dir))
	if err != nil {
		w.t.Error(err)
	}
	for _, m := range mounts {
		if m.Mountpoint != w.config.RunDir && m.Mountpoint != filepath.Join(w.config.StateDir, "mnt") {
			w.t.Errorf("left mounted: %s", m.Mountpoint)
		}
	}
	root := filepath.Join(w.config.StateDir, "mnt")
	_ = filepath.WalkDir(root, func(path string, e os.DirEntry, err error) error {
		if err == nil && strings.HasPrefix(e.Name(), "v") && filepath.Dir(path) != root { // what lies right below it are plugins, by hashes
			w.t.Errorf("left on disk: %s", path)
		}
		return err
	})
	if left, _ := os.ReadDir(filepath.Join(w.config.RunDir, "t")); len(left) > 0 {
		w.t.Errorf("left of sockets: %v", left)
	}
	for _, m := range slices.Backward(mounts) { // what is left lies on our roots
		unmount(w.t, m.Mountpoint)
	}
	if err := os.RemoveAll(w.dir); err != nil {
		w.t.Error(err)
	}
}

// unmount unmounts what a test has left. A process that another test forks in this moment holds it until it executes its program.
func unmount(t *testing.T, path string) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		err := syscall.Unmount(path, 0)
		if err == nil {
			return
		}
		if !errors.Is(err, syscall.EBUSY) || time.Now().After(end) {
			t.Errorf("unmount %s: %v", path, err)
			return
		}
	}
}

func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(w.t.Context()), patience)
	w.t.Cleanup(cancel)
	return ctx
}

// pluginTask is a plugin that runs as a task.
type pluginTask struct {
	*csifake.Plugin
	task host.AllocTask
}

// plugin starts a plugin's task the way an orchestrator does, and waits until it is registered.
func (w *world) plugin(alloc string, role csifake.Role) *pluginTask {
	w.t.Helper()
	p := w.startPlugin(alloc, role, 1)
	w.registered(alloc)
	return p
}

func (w *world) startPlugin(alloc string, role csifake.Role, attempt uint64) *pluginTask {
	w.t.Helper()
	task, endpoint := w.startingPlugin(alloc, role, attempt, w.more)
	p := w.runPlugin(task, role, endpoint)
	if w.started != nil {
		w.started(p.Plugin)
	}
	if err := w.host.TaskStarted(w.ctx(), task.Key(), attempt); err != nil {
		w.t.Fatalf("task started: %v", err)
	}
	return p
}

// startingPlugin has the start of a plugin's task prepared. more is further lines of its csi_plugin block.
func (w *world) startingPlugin(alloc string, role csifake.Role, attempt uint64, more string) (task host.AllocTask, endpoint string) {
	w.t.Helper()
	text := fmt.Sprintf("task %q {\n driver = \"raw_exec\"\n csi_plugin {\n id = \"fake\"\n type = %q\n heartbeat {\n %s\n }\n%s }\n}\n", "plugin", role, w.beat, more)
	job, _, err := w.host.Parse(w.ctx(), host.Source{Name: "plugin.hcl", Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		w.t.Fatalf("parse: %v", err)
	}
	task = host.AllocTask{Alloc: host.AllocID(alloc), Task: "plugin", Attempt: attempt, Sealed: job.Groups[0].Tasks[0].Sealed}
	plan, err := w.host.TaskStarting(w.ctx(), task)
	if err != nil {
		w.t.Fatalf("task starting: %v", err)
	}
	return task, env(plan, "CSI_ENDPOINT")
}

// runPlugin runs the plugin of a task.
func (w *world) runPlugin(task host.AllocTask, role csifake.Role, endpoint string) *pluginTask {
	w.t.Helper()
	return &pluginTask{csifake.Start(w.t, csifake.Config{
		Role: role, Caps: w.caps, Socket: csifake.SocketPath(endpoint), Journal: w.journal, Backend: w.backend, Mounts: true,
		DataDir: filepath.Join(w.dir, "data"), Instance: string(task.Alloc),
		VolumeContext: map[string]string{"pool": "p"}, PublishContext: map[string]string{"lun": "7"},
	}), task}
}

// registered waits until the alloc's instances are healthy.
func (w *world) registered(alloc string) {
	w.t.Helper()
	w.until(func(e host.Event) bool { return e.Kind == "task registered" && string(e.Alloc) == alloc })
}

// until reads events from the beginning until one is as wanted.
func (w *world) until(wanted func(host.Event) bool) host.Event {
	w.t.Helper()
	var found host.Event
	err := w.host.Watch(w.ctx(), host.WatchOptions{}, func(e host.Event) error {
		if wanted(e) {
			found = e
			return io.EOF
		}
		return nil
	})
	if !errors.Is(err, io.EOF) {
		w.t.Fatalf("waiting for an event: %v", err)
	}
	return found
}

// exit ends a plugin's task.
func (w *world) exit(p *pluginTask) {
	w.t.Helper()
	p.Stop()
	if err := w.host.TaskExited(w.ctx(), p.task.Key(), p.task.Attempt, 0, 0, true); err != nil {
		w.t.Fatalf("task exited: %v", err)
	}
}

// create makes a volume that one node may write.
func (w *world) create(id string) error { return w.createWith(w.ctx(), id, "") }

// createWith makes it with more in its file.
func (w *world) createWith(ctx context.Context, id, more string) error {
	text := fmt.Sprintf(`
id        = %q
name      = %q
type      = "csi"
plugin_id = "fake"

capacity_min = "1MiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
capability {
  access_mode     = "multi-node-multi-writer"
  attachment_mode = "file-system"
}
%s`, id, id, more)
	spec, _, err := w.host.ParseVolume(ctx, host.Source{Name: id + ".volume.hcl", Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		return err
	}
	_, err = w.host.CreateVolume(ctx, spec)
	return err
}

func (w *world) delete(id string) error {
	return w.host.DeleteVolume(w.ctx(), host.VolumeName{Namespace: "default", ID: host.VolumeID(id)})
}

// group is an alloc whose one task uses a volume.
func (w *world) group(alloc, volume, mode string) host.AllocGroup {
	w.t.Helper()
	text := fmt.Sprintf(`
job "user" {
  group "g" {
    volume "data" {
      type            = "csi"
      source          = %q
      access_mode     = %q
      attachment_mode = "file-system"
    }
    task "t" {
      driver = "raw_exec"
      volume_mount {
        volume      = "data"
        destination = "/data"
      }
    }
  }
}
`, volume, mode)
	job, _, err := w.host.Parse(w.ctx(), host.Source{Name: "user.hcl", Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		w.t.Fatalf("parse: %v", err)
	}
	return host.AllocGroup{Alloc: host.AllocID(alloc), Job: "user", Group: "g", Namespace: "default", Sealed: job.Groups[0].Sealed}
}

// prepare gives the path at which a task without isolation finds the volume.
func (w *world) prepare(g host.AllocGroup) (string, error) {
	plans, err := w.host.PrepareAlloc(w.ctx(), g)
	if err != nil {
		return "", err
	}
	for _, e := range plans["t"].Env {
		if e.Name == "HOLDFAST_VOLUME_DATA" {
			return e.Value, nil
		}
	}
	return "", fmt.Errorf("the plan tells no path: %+v", plans)
}

func (w *world) release(alloc string) error {
	return w.host.ReleaseAlloc(w.ctx(), host.AllocID(alloc))
}

// must fails the test for an error.
func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// says: an error has the words.
func (w *world) says(what string, err error, words ...string) {
	w.t.Helper()
	for _, word := range words {
		if err == nil || !strings.Contains(err.Error(), word) {
			w.t.Errorf("%s says %v, and not %q", what, err, word)
		}
	}
}

// killShim kills the active shim and returns once the process is gone.
func (w *world) killShim() {
	w.t.Helper()
	st, err := w.host.Status(w.ctx())
	w.must(err)
	w.must(syscall.Kill(st.PID, syscall.SIGKILL))
	w.eventually("the shim has exited", func() bool { return !alive(st.PID) })
}

// bootTime is now, as a host that has kept no account would say.
func (w *world) bootTime() host.BootTime {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	w.must(err)
	return host.BootTime{Boot: strings.TrimSpace(string(boot))}
}
