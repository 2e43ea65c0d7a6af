package host_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/internal/mount"
	"holdfast/internal/testbin"
)

// The programs that all tests use, the second one for fault.Binary.
var shimBinary, faultyShim string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := testbin.Build(testbin.Shim("shim"), testbin.FaultyShim("faulty"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	shimBinary, faultyShim = filepath.Join(dir, "shim"), filepath.Join(dir, "faulty")
	return m.Run()
}

// patience bounds whatever is waited for; it is never what a test measures.
const patience = 60 * time.Second

// notes is a log that can be read.
type notes struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (n *notes) Write(p []byte) (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.buf.Write(p)
}

func (n *notes) String() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.buf.String()
}

// world is a host with a real shim in directories of its own.
type world struct {
	t      *testing.T
	dir    string
	config host.Config
	host   *host.Host
	log    *notes
}

// at is a world whose host is not open yet.
func at(t *testing.T) *world {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	w := &world{t: t, dir: dir, log: &notes{}}
	w.config = host.Config{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Node: "node-1", MaxHold: patience,
		Shim: host.Binary{Path: shimBinary}, Logger: hclog.New(&hclog.LoggerOptions{Output: w.log, Level: hclog.Debug}),
	}
	t.Cleanup(w.leave)
	return w
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := at(t)
	w.open()
	return w
}

// unhurried is newWorld for a test in which a swap has to come about, however slow the machine is.
func unhurried(t *testing.T) *world {
	t.Helper()
	w := at(t)
	w.config.SwapBudget, w.config.Bake = patience, time.Hour
	w.open()
	return w
}

func (w *world) open() {
	w.t.Helper()
	h, err := host.Open(w.ctx(), w.config)
	must(w.t, err)
	w.host = h
}

func (w *world) leave() {
	if w.host != nil {
		if err := w.host.Close(); err != nil {
			w.t.Errorf("close: %v", err)
		}
	}
	if w.t.Failed() {
		w.t.Log(w.log)
	}
	mounts, err := mount.Below(w.dir)
	must(w.t, err)
	for _, m := range slices.Backward(mounts) {
		must(w.t, unix.Unmount(m.Point, 0))
	}
	must(w.t, os.RemoveAll(w.dir))
}

func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(w.t.Context()), patience)
	w.t.Cleanup(cancel)
	return ctx
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// kill kills the active shim.
func (w *world) kill() {
	w.t.Helper()
	st, err := w.host.Status(w.ctx())
	must(w.t, err)
	must(w.t, syscall.Kill(st.PID, syscall.SIGKILL))
}

// damage kills the shim and makes its state unreadable, so that none can start. repair takes that back.
func (w *world) damage() (repair func()) {
	w.t.Helper()
	db := filepath.Join(w.config.StateDir, "shim.db")
	bad := filepath.Join(w.dir, "bad")
	must(w.t, os.WriteFile(bad, bytes.Repeat([]byte("rubbish "), 8192), 0o600))
	good := filepath.Join(w.dir, "good")
	must(w.t, os.Rename(db, good))
	must(w.t, os.Rename(bad, db))
	must(w.t, syscall.Kill(w.pid(), syscall.SIGKILL))
	return func() { must(w.t, os.Rename(good, db)) }
}

func (w *world) pid() int {
	w.t.Helper()
	st, err := w.host.Status(w.ctx())
	must(w.t, err)
	return st.PID
}

// task is a plugin's task as Parse seals it.
func (w *world) task(alloc string) host.AllocTask {
	w.t.Helper()
	text := "task \"plugin\" {\n driver = \"raw_exec\"\n csi_plugin {\n id = \"fake\"\n type = \"monolith\"\n }\n}\n"
	job, _, err := w.host.Parse(w.ctx(), host.Source{Name: "plugin.hcl", Text: []byte(text)}, host.ParseOptions{})
	must(w.t, err)
	return host.AllocTask{Alloc: host.AllocID(alloc), Task: "plugin", Attempt: 1, Sealed: job.Groups[0].Tasks[0].Sealed}
}

func endpoint(p host.Plan) string {
	for _, e := range p.Env {
		if e.Name == "CSI_ENDPOINT" {
			return e.Value
		}
	}
	return ""
}

// plugin runs a plugin within this process, as a task of the host.
func (w *world) plugin(alloc string) *csifake.Plugin {
	w.t.Helper()
	task := w.task(alloc)
	plan, err := w.host.TaskStarting(w.ctx(), task)
	must(w.t, err)
	p := csifake.Start(w.t, csifake.Config{
		Caps: []string{"CREATE_DELETE_VOLUME"}, Socket: csifake.SocketPath(endpoint(plan)), Blind: true,
		Journal: csifake.NewJournal(w.t, journal.Options{}),
	})
	must(w.t, w.host.TaskStarted(w.ctx(), task.Key(), 1))
	return p
}

// create makes a volume. more is text for its file.
func (w *world) create(id, more string) error {
	text := fmt.Sprintf("id = %q\nplugin_id = \"fake\"\ncapability {\n access_mode = \"single-node-writer\"\n attachment_mode = \"file-system\"\n}\n%s", id, more)
	spec, _, err := w.host.ParseVolume(w.ctx(), host.Source{Name: id, Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		return err
	}
	_, err = w.host.CreateVolume(w.ctx(), spec)
	return err
}

// children are the processes that this one has.
func children() (list []string) {
	tasks, _ := filepath.Glob("/proc/self/task/*/children")
	for _, path := range tasks {
		text, _ := os.ReadFile(path)
		list = append(list, strings.Fields(string(text))...)
	}
	return list
}
