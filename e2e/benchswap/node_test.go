package benchswap

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/internal/mount"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// waitLimit bounds every wait and every call. No figure depends on it.
const waitLimit = 120 * time.Second

// node is one machine: a host, plugins, and allocs that use volumes.
type node struct {
	t       testing.TB
	dir     string
	sizes   sizes
	config  host.Config
	host    *host.Host
	plugins *plugins
	tasks   []host.WorkloadTask
	users   []host.AllocGroup // that use the volumes which stay
	spare   []host.AllocGroup // one per plugin: callers prepare and release them under new ids
}

// newNode starts the plugins, creates the volumes and mounts those that stay.
func newNode(t testing.TB, s sizes) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	n := &node{t: t, dir: dir, sizes: s}
	for _, sub := range []string{"plugins", "state", "run"} {
		must(t, os.Mkdir(filepath.Join(dir, sub), 0o700))
	}
	must(t, unix.Mount("tmpfs", filepath.Join(dir, "run"), "tmpfs", 0, "mode=0700")) // as /run is
	logs, err := os.Create(filepath.Join(dir, "log"))
	must(t, err)
	n.config = host.Config{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Node: "node-1", MaxHold: waitLimit,
		Shim: host.Binary{Path: binaries[0]}, Bake: s.bake, SwapBudget: s.budget,
		Logger: hclog.New(&hclog.LoggerOptions{Output: logs, Level: hclog.Warn}),
	}
	t.Cleanup(func() { n.sweep(logs) })
	n.open()
	t.Cleanup(func() { must(t, n.host.Close()) })
	n.plugins, err = startPlugins()
	must(t, err)
	t.Cleanup(func() { must(t, n.plugins.stop()) })
	n.fill()
	return n
}

func (n *node) open() {
	n.t.Helper()
	h, err := host.Open(n.ctx(), n.config)
	must(n.t, err)
	n.host = h
}

func (n *node) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(n.t.Context()), waitLimit)
	n.t.Cleanup(cancel)
	return ctx
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func pluginName(i int) string { return fmt.Sprintf("plugin-%02d", i) }

func spareVolume(i int) string { return fmt.Sprintf("spare-%02d", i) }

func (n *node) fill() {
	n.t.Helper()
	for i := range n.sizes.plugins {
		n.startPlugin(i)
	}
	n.waitRegistered(n.sizes.plugins)
	names := make([][]string, n.sizes.plugins)
	for k := range n.sizes.volumes {
		i := k % n.sizes.plugins
		names[i] = append(names[i], fmt.Sprintf("vol-%04d", k))
	}
	for i := range n.sizes.plugins {
		n.spare = append(n.spare, n.group("spare", i, spareVolume(i)))
		n.users = append(n.users, n.group("user", i, names[i]...))
	}
	must(n.t, n.forEachPlugin(func(i int) error {
		for _, name := range append(names[i], spareVolume(i)) {
			if _, err := n.host.CreateVolume(n.ctx(), volumeSpec(name, i)); err != nil {
				return fmt.Errorf("create %s: %w", name, err)
			}
		}
		_, err := n.host.PrepareAlloc(n.ctx(), n.users[i])
		return err
	}))
}

// forEachPlugin calls do for every plugin, for some of them at once.
func (n *node) forEachPlugin(do func(plugin int) error) error {
	const atOnce = 16
	var all sync.WaitGroup
	errs := make([]error, n.sizes.plugins)
	slots := make(chan struct{}, atOnce)
	for i := range errs {
		slots <- struct{}{}
		all.Go(func() { errs[i] = do(i); <-slots })
	}
	all.Wait()
	return errors.Join(errs...)
}

// pluginTask returns the task of a plugin under an alloc.
func (n *node) pluginTask(alloc string, i int) host.AllocTask {
	n.t.Helper()
	text := fmt.Sprintf("task \"plugin\" {\n driver = \"raw_exec\"\n"+
		" csi_plugin {\n id = %q\n type = \"monolith\"\n }\n}\n",
		pluginName(i))
	job, _, err := n.host.Parse(n.ctx(), host.Source{Name: "plugin.hcl", Text: []byte(text)}, host.ParseOptions{})
	must(n.t, err)
	return host.AllocTask{Alloc: host.AllocID(alloc), Task: "plugin", Attempt: 1, Sealed: job.Groups[0].Tasks[0].Sealed}
}

func (n *node) startPlugin(i int) {
	n.t.Helper()
	task := n.pluginTask(fmt.Sprintf("alloc-%s", pluginName(i)), i)
	plan, err := n.host.TaskStarting(n.ctx(), task)
	must(n.t, err)
	spec := pluginSpec{Name: pluginName(i), Dir: filepath.Join(n.dir, "plugins")}
	for _, e := range plan.Env {
		if e.Name == "CSI_ENDPOINT" {
			spec.Socket = csifake.SocketPath(e.Value)
		}
	}
	must(n.t, n.plugins.add(spec))
	must(n.t, n.host.TaskStarted(n.ctx(), task.Key(), 1))
	boot, err := proc.BootID()
	must(n.t, err)
	n.tasks = append(n.tasks, host.WorkloadTask{AllocTask: task, Running: true,
		Started: host.BootTime{Boot: boot, At: proc.BootTime()}})
}

// waitRegistered waits until so many tasks are registered.
func (n *node) waitRegistered(tasks int) {
	n.t.Helper()
	err := n.host.Watch(n.ctx(), host.WatchOptions{}, func(e host.Event) error {
		if e.Kind == "task registered" {
			tasks--
		}
		if tasks == 0 {
			return io.EOF
		}
		return nil
	})
	if !errors.Is(err, io.EOF) {
		n.t.Fatalf("waiting for the plugins: %v", err)
	}
}

func volumeSpec(name string, plugin int) host.VolumeSpec {
	return host.VolumeSpec{
		Namespace: "default", ID: host.VolumeID(name), Name: name, Plugin: host.PluginID(pluginName(plugin)),
		CapacityMin:  1 << 20,
		Capabilities: []registry.VolumeCapability{{Access: "single-node-writer", Attachment: "file-system"}},
	}
}

// group returns an alloc with one task that uses volumes.
func (n *node) group(kind string, i int, volumes ...string) host.AllocGroup {
	n.t.Helper()
	var blocks, mounts strings.Builder
	for k, name := range volumes {
		fmt.Fprintf(&blocks, "volume \"v%d\" {\n type = \"csi\"\n source = %q\n access_mode = \"single-node-writer\"\n"+
			" attachment_mode = \"file-system\"\n}\n", k, name)
		fmt.Fprintf(&mounts, "volume_mount {\n volume = \"v%d\"\n destination = \"/v%d\"\n}\n", k, k)
	}
	text := fmt.Sprintf("job %q {\n group \"g\" {\n%s task \"t\" {\n driver = \"raw_exec\"\n%s}\n}\n}\n", kind, &blocks,
		&mounts)
	job, _, err := n.host.Parse(n.ctx(), host.Source{Name: "user.hcl", Text: []byte(text)}, host.ParseOptions{})
	must(n.t, err)
	return host.AllocGroup{
		Alloc: host.AllocID(fmt.Sprintf("%s-%02d", kind, i)), Job: kind, Group: "g", Namespace: "default",
		Sealed: job.Groups[0].Sealed,
	}
}

// takeDown releases the allocs, ends the plugins' tasks, and checks the plugins' journals and the mount table.
func (n *node) takeDown() {
	n.t.Helper()
	must(n.t, n.forEachPlugin(func(i int) error { return n.host.ReleaseAlloc(n.ctx(), n.users[i].Alloc) }))
	for _, task := range n.tasks {
		must(n.t, n.host.TaskStopping(n.ctx(), task.Key(), 1))
		must(n.t, n.host.TaskExited(n.ctx(), task.Key(), 1, 0, 0, true))
	}
	for i := range n.sizes.plugins {
		for _, v := range csifake.Check(journalPath(filepath.Join(n.dir, "plugins"), pluginName(i)),
			journal.Options{Settled: true, Strict: true}) {
			n.t.Errorf("journal of %s: %s", pluginName(i), v)
		}
	}
	mounts, err := mount.Below(n.dir)
	must(n.t, err)
	for _, m := range mounts {
		if m.Point != n.config.RunDir && m.Point != filepath.Join(n.config.StateDir, "mnt") {
			n.t.Errorf("left mounted: %s", m.Point)
		}
	}
}

// sweep unmounts and removes everything.
func (n *node) sweep(logs *os.File) {
	n.t.Helper()
	must(n.t, logs.Close())
	if n.t.Failed() {
		if text, err := os.ReadFile(logs.Name()); err == nil {
			n.t.Logf("the end of the log:\n%s", text[max(0, len(text)-20_000):])
		}
	}
	mounts, err := mount.Below(n.dir)
	must(n.t, err)
	for i := range mounts {
		if err := unix.Unmount(mounts[len(mounts)-1-i].Point, 0); err != nil {
			n.t.Errorf("unmount %s: %v", mounts[len(mounts)-1-i].Point, err)
		}
	}
	must(n.t, os.RemoveAll(n.dir))
}
