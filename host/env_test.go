package host_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
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

// The shim programs that all tests use. faultyShim is for fault.Binary.
var shimBinary, faultyShim string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	flag.Parse()
	if at := flag.Lookup("test.parallel"); at.Value.String() == at.DefValue {
		_ = flag.Set("test.parallel", strconv.Itoa(3*runtime.GOMAXPROCS(0))) // most wait for processes and timers
	}
	dir, err := testbin.Build(testbin.Shim("holdfast-shim"), testbin.FaultyShim("holdfast-shim-faulty"))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	shimBinary, faultyShim = filepath.Join(dir, "holdfast-shim"), filepath.Join(dir, "holdfast-shim-faulty")
	return m.Run()
}

// patience bounds every wait. No test measures it.
const patience = 2 * time.Minute

// logText is a log that a test can read.
type logText struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

// env is a host with a real shim in directories of its own.
type env struct {
	t      *testing.T
	dir    string
	config host.Config
	host   *host.Host
	log    *logText
}

// newEnv returns an env whose host is not open yet. Its swaps may take as long as a slow machine needs.
func newEnv(t *testing.T) *env {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	w := &env{t: t, dir: dir, log: &logText{}}
	w.config = host.Config{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Node: "node-1",
		MaxHold: patience, SwapBudget: patience, StartTimeout: patience / 4, AnswerTimeout: patience,
		Shim: host.Binary{Path: shimBinary}, Logger: hclog.New(&hclog.LoggerOptions{Output: w.log, Level: hclog.Debug}),
	}
	t.Cleanup(w.leave)
	return w
}

func openEnv(t *testing.T) *env {
	t.Helper()
	w := newEnv(t)
	w.open()
	return w
}

// openLongBake is openEnv with a bake that does not end during the test.
func openLongBake(t *testing.T) *env {
	t.Helper()
	w := newEnv(t)
	w.config.Bake = time.Hour
	w.open()
	return w
}

func (w *env) open() {
	w.t.Helper()
	h, err := host.Open(w.ctx(), w.config)
	must(w.t, err)
	w.host = h
}

func (w *env) leave() {
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
		must(w.t, w.unmount(m.Point))
	}
	must(w.t, os.RemoveAll(w.dir))
}

// unmount unmounts a mount that another process may use for a moment: helper processes of other tests' shims inspect
// all mounts.
func (w *env) unmount(point string) error {
	for ctx := w.ctx(); ; time.Sleep(10 * time.Millisecond) {
		if err := unix.Unmount(point, 0); !errors.Is(err, unix.EBUSY) || ctx.Err() != nil {
			return err
		}
	}
}

func (w *env) ctx() context.Context {
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
func (w *env) kill() {
	w.t.Helper()
	st, err := w.host.Status(w.ctx())
	must(w.t, err)
	must(w.t, syscall.Kill(st.PID, syscall.SIGKILL))
}

// awaitCommit waits for the end of the last swap.
func (w *env) awaitCommit() {
	w.t.Helper()
	w.until("committed", func(host.ShimState) bool { return w.host.Swaps()[0].Outcome == host.SwapCommitted })
}

func (w *env) pid() int {
	w.t.Helper()
	st, err := w.host.Status(w.ctx())
	must(w.t, err)
	return st.PID
}

// crash kills the active shim and waits for the next one.
func (w *env) crash() {
	w.t.Helper()
	was := w.pid()
	for w.kill(); w.pid() == was; time.Sleep(time.Millisecond) {
	}
}

// wrapped returns a binary that runs shell commands, and then the shim.
func (w *env) wrapped(name, commands string) host.Binary {
	w.t.Helper()
	path := filepath.Join(w.dir, name)
	must(w.t, os.WriteFile(path, []byte("#!/bin/sh\n"+commands+"\nexec "+shimBinary+" \"$@\"\n"), 0o700))
	return host.Binary{Path: path}
}

// until waits for a state of the shim.
func (w *env) until(what string, is func(host.ShimState) bool) host.ShimState {
	w.t.Helper()
	for ctx := w.ctx(); ctx.Err() == nil; time.Sleep(time.Millisecond) {
		if s := w.host.ShimState(); is(s) {
			return s
		}
	}
	w.t.Fatalf("never %s: %+v", what, w.host.ShimState())
	return host.ShimState{}
}

// task returns a plugin's task as Parse seals it.
func (w *env) task(alloc string) host.AllocTask {
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

// plugin runs a plugin in this process, as a task of the host.
func (w *env) plugin(alloc string) *csifake.Plugin {
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

// create creates a volume. more is added to its file.
func (w *env) create(id, more string) error {
	text := fmt.Sprintf(
		"id = %q\nplugin_id = \"fake\"\ncapability {\n access_mode = \"single-node-writer\"\n"+
			" attachment_mode = \"file-system\"\n}\n%s",
		id, more,
	)
	spec, _, err := w.host.ParseVolume(w.ctx(), host.Source{Name: id, Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		return err
	}
	_, err = w.host.CreateVolume(w.ctx(), spec)
	return err
}

// shims returns the processes that the host has started, by their environment, as they may execute any program.
func (w *env) shims() (pids []string) {
	tasks, _ := filepath.Glob("/proc/self/task/*/children")
	for _, path := range tasks {
		text, _ := os.ReadFile(path)
		for _, pid := range strings.Fields(string(text)) {
			if vars, _ := os.ReadFile("/proc/" + pid + "/environ"); bytes.Contains(vars, []byte(w.config.RunDir+"/")) {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}
