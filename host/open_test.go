package host_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"holdfast/host"
	"holdfast/internal/mount"
)

// After a refusal nothing runs, and the state directory can be opened.
func TestOpenRefusesBadConfigurations(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	loose := filepath.Join(w.dir, "loose")
	must(t, os.Mkdir(loose, 0o700))
	must(t, os.Chmod(loose, 0o777))
	for name, c := range map[string]struct {
		change func(*host.Config)
		says   string
	}{
		"no binary": {func(c *host.Config) { c.Shim.Path = "" }, "Shim.Path"},
		"another binary": {func(c *host.Config) { c.Shim.SHA256 = strings.Repeat("0", 64) },
			"not the wanted binary"},
		"another program": {func(c *host.Config) { c.Shim.Path = "/bin/true" },
			"with nothing on stdout; if its last lines do not say why, it may be no shim: give the path"},
		"no state directory":        {func(c *host.Config) { c.StateDir = "" }, "StateDir"},
		"a state directory for all": {func(c *host.Config) { c.StateDir = loose }, "alone; chmod 700 it"},
		"a run directory for all":   {func(c *host.Config) { c.RunDir = loose }, "alone; chmod 700 it"},
		"a run directory of a long name": {func(c *host.Config) { c.RunDir += strings.Repeat("x", 120) },
			"choose a shorter one"},
		"a node that is no name":           {func(c *host.Config) { c.Node = "../x" }, "node name"},
		"a file in place of the directory": {func(c *host.Config) { c.StateDir = shimBinary }, "not a directory"},
		"a workload that is wrong": {func(c *host.Config) {
			c.Workload.Allocs = []host.AllocGroup{{Alloc: "../x"}}
		}, "alloc id"},
	} {
		config := w.config
		c.change(&config)
		h, err := host.Open(w.ctx(), config)
		if err == nil {
			must(t, h.Close())
			t.Errorf("%s was taken", name)
		} else if !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if left := w.shims(); len(left) > 0 {
		t.Errorf("processes are left: %v", left)
	}
	w.open()
}

// A link to the directory changes nothing: the shim uses the paths of the mount table. The first host is not disturbed,
// and Close unlocks the directory.
func TestOneHostPerStateDirectory(t *testing.T) {
	t.Parallel()
	w := newEnv(t)
	state, run := w.config.StateDir, w.config.RunDir
	must(t, os.Mkdir(state, 0o700))
	must(t, os.Mkdir(run, 0o700))
	w.config.StateDir, w.config.RunDir = filepath.Join(w.dir, "state-link"), filepath.Join(w.dir, "run-link")
	must(t, os.Symlink(state, w.config.StateDir))
	must(t, os.Symlink(run, w.config.RunDir))
	w.open()
	for _, dir := range []string{w.config.StateDir, state} {
		second := w.config
		second.StateDir, second.RunDir = dir, filepath.Join(w.dir, "run2")
		if _, err := host.Open(w.ctx(), second); !errors.Is(err, host.ErrConflict) ||
			!strings.Contains(err.Error(), "another host (process ") {
			t.Errorf("at %s: %v", dir, err)
		}
	}
	plan, err := w.host.TaskStarting(w.ctx(), w.task("a"))
	if err != nil || !strings.HasPrefix(endpoint(plan), "unix://"+run+"/") {
		t.Errorf("the endpoint is %q, %v", endpoint(plan), err)
	}
	if os.Getuid() == 0 {
		if m, found, err := mount.At(filepath.Join(state, "mnt")); err != nil || !found || !m.Shared() {
			t.Errorf("the mount root: %v, %v, %v", m, found, err)
		}
	}
	first := w.pid()
	must(t, w.host.Close())
	w.open()
	if w.pid() == first {
		t.Error("the shim is still the first one")
	}
}

// A plan operation that the orchestrator cannot apply is an error: in a job's text, and for a task parsed before.
func TestHostWithFewerOperations(t *testing.T) {
	t.Parallel()
	w := openEnv(t)
	task := w.task("a")
	must(t, w.host.Close())
	w.config.Operations = []host.Operation{host.OpEnv}
	w.open()
	text := "task \"t\" {\n driver = \"exec\"\n csi_plugin {\n id = \"x\"\n type = \"node\"\n }\n}\n"
	_, _, err := w.host.Parse(w.ctx(), host.Source{Name: "x.hcl", Text: []byte(text)}, host.ParseOptions{})
	if err == nil || !strings.Contains(err.Error(), `"bind"`) {
		t.Errorf("a text that needs binds: %v", err)
	}
	task.Isolated = true
	if _, err := w.host.TaskStarting(w.ctx(), task); !errors.Is(err, host.ErrUnsupported) ||
		!strings.Contains(err.Error(), `"bind"`) {
		t.Errorf("a task that needs binds: %v", err)
	}
	task.Isolated = false
	if _, err := w.host.TaskStarting(w.ctx(), task); err != nil {
		t.Errorf("a task that needs none: %v", err)
	}
}
