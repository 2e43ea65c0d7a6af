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
	"holdfast/internal/proc"
)

// env is a host with its shim and with plugins that make real mounts and write one journal.
type env struct {
	t            testing.TB
	dir          string
	config       host.Config
	host         *host.Host
	pids         []int          // of the shims that were active, in order
	alternates   [2]host.Binary // that swap uses in turn
	swapCount    int
	journal      string
	backend      *csifake.Backend
	caps         []string              // of plugins to be started
	nodeID       string                // of plugins; "": that of csifake
	spec         string                // version of CSI that they are built on; "": the newest
	onStart      func(*csifake.Plugin) // called before a plugin's task counts as started
	heartbeat    string                // content of plugins' heartbeat blocks
	pluginBlocks string                // further lines of plugins' csi_plugin blocks
}

// waitLimit bounds every wait and every call. No test measures it.
const waitLimit = 2 * time.Minute

// newEnv opens a host. When the test ends, everything must be taken down and the journal must be legal.
func newEnv(t testing.TB, caps ...string) *env {
	t.Helper()
	e := unopenedEnv(t, caps...)
	e.open()
	return e
}

// unopenedEnv returns an env whose host is still to be opened.
func unopenedEnv(t testing.TB, caps ...string) *env {
	t.Helper()
	return unopenedNode(t, csifake.NewJournal(t, journal.Options{Settled: true}), caps...)
}

// unopenedNode is unopenedEnv with a journal that other nodes may write as well.
func unopenedNode(t testing.TB, path string, caps ...string) *env {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		t.Fatal(err)
	}
	e := &env{t: t, dir: dir, backend: csifake.NewBackend(""), caps: caps}
	e.heartbeat = "interval = \"1s\"\n timeout = \"30s\"" // a slow answer is no failure
	e.journal = path
	level := hclog.Warn
	if testing.Verbose() {
		level = hclog.Debug
	}
	e.config = host.Config{
		StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"), Node: "node-1", MaxHold: waitLimit,
		Shim:       host.Binary{Path: filepath.Join(bin, "holdfast-shim")},
		SwapBudget: waitLimit, Bake: 50 * time.Millisecond, // benchswap measures how long calls are held
		Logger: hclog.New(&hclog.LoggerOptions{Output: t.Output(), Level: level}),
	}
	t.Cleanup(e.close)
	return e
}

func (e *env) open() {
	e.t.Helper()
	h, err := host.Open(e.ctx(), e.config)
	if err != nil {
		e.t.Fatalf("open: %v", err)
	}
	e.host = h
	e.activeShim()
}

// reopen opens a new host on the state of the last one. It names the plugins' tasks and the allocs that still run.
func (e *env) reopen(plugins []*pluginTask, allocs ...host.AllocGroup) {
	e.t.Helper()
	e.must(e.host.Close())
	e.config.Workload = host.Workload{Allocs: allocs}
	for _, p := range plugins {
		e.config.Workload.Tasks = append(e.config.Workload.Tasks, e.running(p.task))
	}
	e.open()
}

// running is a task that runs, as a host names it that does not know since when.
func (e *env) running(task host.AllocTask) host.WorkloadTask {
	e.t.Helper()
	boot, err := proc.BootID()
	e.must(err)
	return host.WorkloadTask{AllocTask: task, Running: true, Started: host.BootTime{Boot: boot}}
}

// close closes the host and checks that nothing is left: no mount but our two roots, no directory of a volume, no
// socket.
func (e *env) close() {
	if e.host == nil {
		return
	}
	if err := e.host.Close(); err != nil {
		e.t.Errorf("close: %v", err)
	}
	db := filepath.Join(e.config.StateDir, "shim.db")
	if out, err := exec.Command(e.config.Shim.Path, "-check", db).CombinedOutput(); err != nil {
		e.t.Errorf("the state is not sound: %v\n%s", err, out)
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(e.dir))
	if err != nil {
		e.t.Error(err)
	}
	root := filepath.Join(e.config.StateDir, "mnt")
	for _, m := range mounts {
		if m.Mountpoint != e.config.RunDir && m.Mountpoint != root {
			e.t.Errorf("left mounted: %s", m.Mountpoint)
		}
	}
	_ = filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		// the root has a hash per plugin
		if err == nil && strings.HasPrefix(d.Name(), "v") && filepath.Dir(path) != root {
			e.t.Errorf("left on disk: %s", path)
		}
		return err
	})
	if left, _ := os.ReadDir(filepath.Join(e.config.RunDir, "t")); len(left) > 0 {
		e.t.Errorf("socket directories left: %v", left)
	}
	for _, m := range slices.Backward(mounts) {
		unmount(e.t, m.Mountpoint)
	}
	if err := os.RemoveAll(e.dir); err != nil {
		e.t.Error(err)
	}
}

func unmount(t testing.TB, path string) {
	t.Helper()
	if err := unmountPath(t.Context(), path); err != nil {
		t.Error(err)
	}
}

// unmountPath retries while a process that another test is just forking holds the mount.
func unmountPath(ctx context.Context, path string) (err error) {
	waited := waitFor(ctx, "unmount "+path, func() bool {
		err = os.NewSyscallError("unmount", syscall.Unmount(path, 0))
		return !errors.Is(err, syscall.EBUSY)
	})
	if err = errors.Join(waited, err); err != nil {
		err = fmt.Errorf("%s: %w", path, err)
	}
	return err
}

// mountTable returns the lines of the kernel's mount table that name this env's directory.
func (e *env) mountTable() string {
	e.t.Helper()
	return mountLines(e.t, "self", e.dir)
}

// mountLines returns the lines of a process's mount table that contain a text.
func mountLines(t testing.TB, process, text string) string {
	t.Helper()
	table, err := os.ReadFile(filepath.Join("/proc", process, "mountinfo"))
	if err != nil {
		t.Fatal(err)
	}
	var found strings.Builder
	for line := range strings.Lines(string(table)) {
		if strings.Contains(line, text) {
			found.WriteString(line)
		}
	}
	return found.String()
}

// mounted returns what the kernel mounted at the path last.
func (e *env) mounted(path string) (*mountinfo.Info, bool) {
	e.t.Helper()
	found, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(path))
	e.must(err)
	if len(found) == 0 {
		return nil, false
	}
	return found[len(found)-1], true
}

// ctx returns a context for one call. It outlives the test's own, so that cleanups can use it.
func (e *env) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.t.Context()), waitLimit)
	e.t.Cleanup(cancel)
	return ctx
}

// must ends the test on an error.
func (e *env) must(err error) {
	e.t.Helper()
	if err != nil {
		e.t.Fatal(err)
	}
}

// errOf drops the value of a call.
func errOf[T any](_ T, err error) error { return err }

// wantWords fails the test unless the error contains all words.
func (e *env) wantWords(what string, err error, words ...string) {
	e.t.Helper()
	for _, word := range words {
		if err == nil || !strings.Contains(err.Error(), word) {
			e.t.Errorf("%s: the error is %v and does not contain %q", what, err, word)
		}
	}
}

// wantConflict fails the test unless the error is a conflict that contains all words.
func (e *env) wantConflict(err error, words ...string) {
	e.t.Helper()
	if !errors.Is(err, host.ErrConflict) {
		e.t.Errorf("not a conflict: %v", err)
	}
	e.wantWords("conflict", err, words...)
}

// waitFor calls done until it returns true. The error says what was waited for.
func waitFor(ctx context.Context, what string, done func() bool) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), waitLimit)
	defer cancel()
	for wait := time.Millisecond; !done(); wait = min(2*wait, 10*time.Millisecond) {
		if !sleep(ctx, wait) {
			return fmt.Errorf("timed out waiting for: %s", what)
		}
	}
	return nil
}

// waitUntil ends the test if done does not become true.
func (e *env) waitUntil(what string, done func() bool) {
	e.t.Helper()
	e.must(waitFor(e.ctx(), what, done))
}

// sleep returns false if the context ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// background starts a call that takes long.
func background(call func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- call() }()
	return done
}

// waitHeld waits until a CSI call is held at the gate. done is the result of the call that causes it.
func (e *env) waitHeld(g *csifake.Gate, done <-chan error) {
	e.t.Helper()
	select {
	case <-g.Arrived():
	case err := <-done:
		e.t.Fatalf("the CSI call to be held was never sent: %v", err)
	case <-time.After(waitLimit):
		e.t.Fatal("the CSI call to be held was not sent in time")
	}
}

// result waits for the result of a background call.
func (e *env) result(what string, done <-chan error) error {
	e.t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(2 * waitLimit):
		e.t.Fatalf("%s does not end", what)
		return nil
	}
}

// isClosed reports whether a channel is closed.
func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// waitEvent reads events from the first one until one is wanted.
func (e *env) waitEvent(wanted func(host.Event) bool) host.Event {
	e.t.Helper()
	var found host.Event
	err := e.host.Watch(e.ctx(), host.WatchOptions{}, func(event host.Event) error {
		if wanted(event) {
			found = event
			return io.EOF
		}
		return nil
	})
	if !errors.Is(err, io.EOF) {
		e.t.Fatalf("wait for an event: %v", err)
	}
	return found
}

// eventsUntil returns all events up to the first that is last.
func (e *env) eventsUntil(last func(host.Event) bool) (list []host.Event) {
	e.t.Helper()
	e.waitEvent(func(event host.Event) bool {
		list = append(list, event)
		return last(event)
	})
	return list
}

// alive reports whether the process has not exited.
func alive(pid int) bool {
	stat, err := proc.ReadStat(pid)
	return err == nil && !stat.Exited()
}

// procText returns a file of /proc/PID with spaces for NUL bytes.
func procText(pid int, file string) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	return strings.ReplaceAll(string(text), "\x00", " ")
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// openFiles returns the files that a process has open.
func openFiles(pid int) (files []string) {
	links, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, link := range links {
		if to, err := os.Readlink(link); err == nil {
			files = append(files, to)
		}
	}
	return files
}
