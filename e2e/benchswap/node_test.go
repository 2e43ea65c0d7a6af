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

// patience bounds whatever is waited for; it is never what is measured.
const patience = 120 * time.Second

// node is one machine: a host, plugins, and allocs that use volumes.
type node struct {
	t       testing.TB
	dir     string
	sizes   sizes
	config  host.Config
	host    *host.Host
	plugins *plugins
	tasks   []host.WorkloadTask
	allocs  []host.AllocGroup // that use the volumes which stay
	// one for each plugin: what callers prepare and release over and over, under ids of their own
	spare   []host.AllocGroup
	slow    []host.AllocGroup // one for each slow caller
	written string            // where the task that writes finds its volume
}

// newNode has everything run and mounted. Whatever is left at the test's end fails it.
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
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Node: "node-1", MaxHold: patience,
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
	ctx, cancel := context.WithTimeout(context.WithoutCancel(n.t.Context()), patience)
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

// ofPlugin are the numbers below all that fall to a plugin.
func (n *node) ofPlugin(i, all int) (list []int) {
	for k := i; k < all; k += n.sizes.plugins {
		list = append(list, k)
	}
	return list
}

func slowVolume(i int) string  { return fmt.Sprintf("slow-%02d", i) }
func spareVolume(i int) string { return fmt.Sprintf("spare-%02d", i) }

// fill starts the plugins, and makes and mounts the volumes.
func (n *node) fill() {
	n.t.Helper()
	for i := range n.sizes.plugins {
		n.startPlugin(i)
	}
	n.registered(n.sizes.plugins)
	for i := range n.sizes.plugins {
		n.spare = append(n.spare, n.group("spare", i, spareVolume(i)))
		var volumes []string
		for _, k := range n.ofPlugin(i, n.sizes.volumes) {
			volumes = append(volumes, fmt.Sprintf("vol-%04d", k))
		}
		n.allocs = append(n.allocs, n.group("user", i, volumes...))
	}
	for i := range n.sizes.slow {
		n.slow = append(n.slow, n.group("slow", i%n.sizes.plugins, slowVolume(i)))
	}
	must(n.t, n.atEach(n.mounted))
}

// atEach does something for every plugin, for some of them at once.
func (n *node) atEach(do func(plugin int) error) error {
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

// mounted makes the volumes of a plugin, and mounts those that stay.
func (n *node) mounted(i int) error {
	names := []string{spareVolume(i)}
	for _, k := range n.ofPlugin(i, n.sizes.slow) {
		names = append(names, slowVolume(k))
	}
	for _, k := range n.ofPlugin(i, n.sizes.volumes) {
		names = append(names, fmt.Sprintf("vol-%04d", k))
	}
	for _, name := range names {
		if _, err := n.host.CreateVolume(n.ctx(), volumeOf(name, i)); err != nil {
			return fmt.Errorf("create %s: %w", name, err)
		}
	}
	plans, err := n.host.PrepareAlloc(n.ctx(), n.allocs[i])
	if err != nil {
		return fmt.Errorf("prepare %s: %w", n.allocs[i].Alloc, err)
	}
	if i > 0 {
		return nil
	}
	for _, e := range plans["t"].Env {
		if e.Name == "HOLDFAST_VOLUME_V0" {
			n.written = e.Value
		}
	}
	return nil
}

// pluginTask is the task of a plugin, under any alloc.
func (n *node) pluginTask(alloc string, i int) host.AllocTask {
	n.t.Helper()
	text := fmt.Sprintf("task \"plugin\" {\n driver = \"raw_exec\"\n csi_plugin {\n id = %q\n type = \"monolith\"\n }\n}\n", pluginName(i))
	job, _, err := n.host.Parse(n.ctx(), host.Source{Name: "plugin.hcl", Text: []byte(text)}, host.ParseOptions{})
	must(n.t, err)
	return host.AllocTask{Alloc: host.AllocID(alloc), Task: "plugin", Attempt: 1, Sealed: job.Groups[0].Tasks[0].Sealed}
}

func (n *node) startPlugin(i int) {
	n.t.Helper()
	task := n.pluginTask(fmt.Sprintf("alloc-%s", pluginName(i)), i)
	plan, err := n.host.TaskStarting(n.ctx(), task)
	must(n.t, err)
	spec := pluginSpec{Name: pluginName(i), Dir: filepath.Join(n.dir, "plugins"), SlowFor: n.sizes.slowFor}
	for _, e := range plan.Env {
		if e.Name == "CSI_ENDPOINT" {
			spec.Socket = csifake.SocketPath(e.Value)
		}
	}
	for _, k := range n.ofPlugin(i, n.sizes.slow) {
		spec.Slow = append(spec.Slow, csifake.VolumeID(slowVolume(k)))
	}
	must(n.t, n.plugins.add(spec))
	must(n.t, n.host.TaskStarted(n.ctx(), task.Key(), 1))
	n.tasks = append(n.tasks, host.WorkloadTask{AllocTask: task, Running: true, Started: bootTime(n.t)})
}

func bootTime(t testing.TB) host.BootTime {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	must(t, err)
	return host.BootTime{Boot: strings.TrimSpace(string(boot)), At: proc.BootTime()}
}

// registered waits until so many tasks are.
func (n *node) registered(tasks int) {
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

func volumeOf(name string, plugin int) host.VolumeSpec {
	return host.VolumeSpec{
		Namespace: "default", ID: host.VolumeID(name), Name: name, Plugin: host.PluginID(pluginName(plugin)),
		CapacityMin:  1 << 20,
		Capabilities: []registry.VolumeCapability{{Access: "single-node-writer", Attachment: "file-system"}},
	}
}

// group is an alloc whose one task uses volumes.
func (n *node) group(kind string, i int, volumes ...string) host.AllocGroup {
	n.t.Helper()
	var blocks, mounts strings.Builder
	for k, name := range volumes {
		fmt.Fprintf(&blocks, "volume \"v%d\" {\n type = \"csi\"\n source = %q\n access_mode = \"single-node-writer\"\n attachment_mode = \"file-system\"\n}\n", k, name)
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

// empty takes everything back in the order of an orchestrator, and holds the drivers' journals against what CSI
// demands.
func (n *node) empty() {
	n.t.Helper()
	must(n.t, n.atEach(func(i int) error { return n.host.ReleaseAlloc(n.ctx(), n.allocs[i].Alloc) }))
	for _, task := range n.tasks {
		must(n.t, n.host.TaskStopping(n.ctx(), task.Key(), 1))
		must(n.t, n.host.TaskExited(n.ctx(), task.Key(), 1, 0, 0, true))
	}
	for i := range n.sizes.plugins {
		for _, v := range csifake.Check(journalOf(filepath.Join(n.dir, "plugins"), pluginName(i)),
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

// sweep removes all of it.
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
