package taskdriver

import (
	"context"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/proc"
	"holdfast/registry"
)

// runner is the part that exec and raw_exec share: it starts parents and talks to them. It has no state in memory, so
// another process can continue any of its work.
type runner struct {
	name     string
	isolated bool
}

func (r runner) Name() string   { return r.name }
func (r runner) Isolated() bool { return r.isolated }

// start starts a parent and waits until it has started the task.
func (r runner) start(ctx context.Context, t Task) (_ Handle, err error) {
	defer func() { err = Exhausted(err) }()
	if err := t.validate(); err != nil {
		return Handle{}, err
	}
	if t.Command == "" {
		return Handle{}, registry.Invalid("task %s: no command", t.ID)
	}
	held, err := t.open(ctx, r.Adopt)
	if err != nil {
		return Handle{}, err
	}
	defer held.Close()
	return r.startParent(ctx, t, held)
}

// makeDir makes a directory, unless it exists.
func makeDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// open makes and locks the task's directory, and removes the records of an earlier attempt.
func (t Task) open(ctx context.Context, adopt adoptFunc) (*os.File, error) {
	if err := errors.Join(makeDir(t.Dir), makeDir(filepath.Join(t.Dir, "logs"))); err != nil {
		return nil, fmt.Errorf("make the directory of task %s: %w", t.ID, err)
	}
	held, err := lock(t.Dir)
	if err != nil {
		return nil, err
	}
	if err := t.removeOldRecords(ctx, adopt); err != nil {
		held.Close()
		return nil, err
	}
	return held, nil
}

// removeOldRecords removes the records of an earlier attempt. It fails if that attempt still runs.
func (t Task) removeOldRecords(ctx context.Context, adopt adoptFunc) error {
	var old Handle
	found, err := readRecord(t.Dir, handleFile, &old)
	if err != nil {
		return err
	}
	if found {
		alive, err := adopt(ctx, old)
		if err != nil {
			return err
		}
		if alive {
			return registry.Errorf(registry.ErrConflict, "task %s: attempt %s still runs in %s", t.ID, old.ID, t.Dir)
		}
	}
	for _, name := range []string{handleFile, exitFile, stopFile, execFile} {
		if err := os.Remove(filepath.Join(t.Dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// startParent starts the parent, sends it the task and reads its reply.
func (r runner) startParent(ctx context.Context, t Task, held *os.File) (Handle, error) {
	requestOut, requestIn, err := os.Pipe()
	if err != nil {
		return Handle{}, err
	}
	defer requestIn.Close()
	replyOut, replyIn, err := os.Pipe()
	if err != nil {
		requestOut.Close()
		return Handle{}, err
	}
	defer replyOut.Close()
	program := parentBinary()
	if confined(t, r.isolated) {
		program = ownBinary // holdfast-task has no device programs, because linking them makes each start slower
	}
	p, err := execParent(program, t, requestOut, replyIn, held)
	requestOut.Close()
	replyIn.Close()
	if err != nil {
		return Handle{}, err
	}
	stop := context.AfterFunc(ctx, func() { _ = replyOut.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var answer reply
	err = json.NewEncoder(requestIn).Encode(request{r.name, r.isolated, t})
	if err == nil {
		err = json.NewDecoder(replyOut).Decode(&answer)
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return Handle{}, errors.Join(r.killParent(ctx, t, p), context.Cause(ctx))
	case err != nil:
		return Handle{}, errors.Join(r.killParent(ctx, t, p),
			fmt.Errorf("parent process exited without a reply; see parent.log in %s: %w", t.Dir, err))
	case answer.Err != "":
		_, _ = unix.Wait4(p.pid, nil, 0, nil)
		return Handle{}, answer.err()
	}
	return answer.Handle, nil
}

// ownBinary is the path of this process's program.
const ownBinary = "/proc/self/exe"

// parentBinary is the program for parents. If holdfast-task lies beside this program, it is used, because it starts
// faster and needs less memory; else it is this program itself. It is opened once, because a package upgrade may
// replace the file while this process runs.
var parentBinary = sync.OnceValue(func() string {
	own, found := debug.ReadBuildInfo()
	path, err := os.Executable()
	if err != nil || !found {
		return ownBinary
	}
	path = filepath.Join(filepath.Dir(path), parentName)
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0) // never closed if it is used
	if err != nil {
		return ownBinary
	}
	// Name this process in the path: in the child, /proc/self/fd would name another file, because its descriptors from
	// 3 on are replaced.
	program := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd)
	beside, err := buildinfo.ReadFile(program)
	if err != nil || versionOf(beside) != versionOf(own) || unix.Access(program, unix.X_OK) != nil {
		unix.Close(fd)
		return ownBinary
	}
	return program
})

// versionOf returns a text that is equal for programs of the same build.
func versionOf(b *debug.BuildInfo) string {
	version := b.Main.Path + " " + b.Main.Version
	for _, s := range b.Settings {
		if strings.HasPrefix(s.Key, "vcs.") || s.Key == "-race" {
			version += " " + s.Key + "=" + s.Value
		}
	}
	return version
}

// execParent starts a parent in a session of its own. Parents finds the process by its arguments.
func execParent(program string, t Task, requests, replies, held *os.File) (process, error) {
	log, err := os.OpenFile(filepath.Join(t.Dir, "parent.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND|os.O_TRUNC, 0o600)
	if err != nil {
		return process{}, err
	}
	defer log.Close()
	cmd := helperCommand(program, parentName, t.ID, t.Dir)
	cmd.Stderr, cmd.ExtraFiles = log, []*os.File{requests, replies, held}
	if err := cmd.Start(); err != nil {
		return process{}, fmt.Errorf("start the task's parent process: %w", err)
	}
	defer func() { _ = cmd.Process.Release() }() // process.wait reaps it
	s, err := proc.ReadStat(cmd.Process.Pid)
	return processOf(s), err
}

// helperCommand returns a command in a session of its own. The function Main recognizes it by its name.
func helperCommand(program string, args ...string) *exec.Cmd {
	cmd := &exec.Cmd{
		Path: program, Args: args, Dir: "/",
		// GOMAXPROCS=1: the process mostly waits, and needs fewer threads. GORACE: a process with the race detector
		// would sleep for a second before it exits.
		Env:         []string{"GOMAXPROCS=1", "GORACE=atexit_sleep_ms=0"},
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if dir := os.Getenv("GOCOVERDIR"); dir != "" {
		cmd.Env = append(cmd.Env, "GOCOVERDIR="+dir)
	}
	return cmd
}

// killParent kills a parent that did not reply, and all processes that it has started.
func (r runner) killParent(ctx context.Context, t Task, p process) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	err := p.signal(unix.SIGKILL)
	if err == nil {
		err = p.wait(ctx)
	}
	if err != nil {
		return fmt.Errorf("kill the parent process of task %s: %w", t.ID, err)
	}
	h := Handle{ID: t.ID, Dir: t.Dir, PID: p.pid, StartTime: p.start}
	if _, err := readRecord(t.Dir, handleFile, &h); err != nil {
		return err
	}
	// newCgroup returns the cgroups that the parent has made, or else makes them. killRemaining removes them.
	h.Cgroups = newCgroup(t.ID, t.Resources, confined(t, r.isolated)).dirs()
	if err := h.killRemaining(ctx, 0); err != nil {
		return err
	}
	_ = os.Remove(filepath.Join(t.Dir, handleFile)) // may not exist
	return nil
}

func (h Handle) parent() process { return process{h.PID, h.StartTime} }

// isCurrentBoot reports whether the task was started during the current boot.
func (h Handle) isCurrentBoot() (bool, error) {
	boot, err := proc.BootID()
	return boot == h.Boot, err
}

func (r runner) Adopt(_ context.Context, h Handle) (bool, error) {
	current, err := h.isCurrentBoot()
	if err != nil || !current {
		return false, err
	}
	if h.parent().alive() {
		return true, nil
	}
	if _, ended, err := readExit(h); err == nil && ended {
		return false, nil // the parent writes the exit when no process is left
	}
	processes, err := h.remaining()
	return len(processes) > 0, err
}

func (r runner) Wait(ctx context.Context, h Handle) (Exit, error) {
	current, err := h.isCurrentBoot()
	if err != nil {
		return Exit{}, err
	}
	unknown := "exit status unknown: the node rebooted while the task ran"
	if current {
		unknown = "exit status unknown: the task's parent process was killed, and the task was killed with it"
		if err := h.awaitEnd(ctx); err != nil {
			return Exit{}, err
		}
	}
	exit, recorded, err := readExit(h)
	if err != nil || recorded {
		return exit, err
	}
	exit = Exit{Code: -1, At: time.Now().UTC(), Err: unknown}
	if err := recordLostExit(h, exit); err != nil {
		return exit, fmt.Errorf("record the exit of task %s: %w", h.ID, err)
	}
	return exit, nil
}

// awaitEnd waits for the parent to exit, and kills what a parent that was killed has left.
func (h Handle) awaitEnd(ctx context.Context) error {
	if err := h.parent().wait(ctx); err != nil {
		return fmt.Errorf("wait for task %s: %w", h.ID, err)
	}
	if _, recorded, err := readExit(h); err != nil || !recorded {
		if err := errors.Join(err, h.killRemaining(ctx, 0)); err != nil {
			return fmt.Errorf("kill the remaining processes of task %s: %w", h.ID, err)
		}
	}
	if err := h.endExecs(ctx); err != nil {
		return fmt.Errorf("end the commands in task %s: %w", h.ID, err)
	}
	return nil
}

// parentTimeout is the time after the grace at which the parent counts as stuck.
const parentTimeout = 30 * time.Second

func (r runner) Stop(ctx context.Context, h Handle, grace time.Duration) error {
	current, err := h.isCurrentBoot()
	if err != nil || !current {
		return err
	}
	if err := h.stop(ctx, max(grace, 0)); err != nil {
		return fmt.Errorf("stop task %s: %w", h.ID, err)
	}
	return nil
}

// stop asks the parent to stop the task. If the parent is gone or stuck, stop stops the task itself.
func (h Handle) stop(ctx context.Context, grace time.Duration) error {
	err := h.askParent(ctx, grace)
	if ctx.Err() != nil && err != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		if killErr := h.parent().signal(unix.SIGKILL); killErr != nil {
			return errors.Join(err, killErr)
		}
		if waitErr := h.parent().wait(ctx); waitErr != nil {
			return errors.Join(err, waitErr)
		}
	}
	if _, recorded, err := readExit(h); err != nil || !recorded {
		if err := h.killRemaining(ctx, grace); err != nil {
			return err
		}
	}
	return h.endExecs(ctx)
}

// askParent has the parent stop the task, and waits until the parent has exited.
func (h Handle) askParent(ctx context.Context, grace time.Duration) error {
	if err := writeVolatile(h.Dir, stopFile, stopRequest{h.ID, grace}); err != nil {
		return err
	}
	if err := h.parent().signal(unix.SIGTERM); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, grace+parentTimeout)
	defer cancel()
	return h.parent().wait(ctx)
}

// endExecs returns when no command of Exec is left in a task that has ended. First it waits until no helper process
// holds its lock on execFile, because a helper process kills its command before it ends. Then it kills the commands of
// helper processes that were killed.
func (h Handle) endExecs(ctx context.Context) error {
	f, err := os.Open(filepath.Join(h.Dir, execFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	locked := func() (bool, error) { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil, nil }
	if err := poll(ctx, pollInterval, locked); err != nil {
		return err
	}
	return h.killRemaining(ctx, 0)
}

// killRemaining ends a task that has no parent: first its processes, then its cgroups.
func (h Handle) killRemaining(ctx context.Context, grace time.Duration) error {
	if grace > 0 {
		if err := h.signalRemaining(ctx, unix.SIGTERM, grace); err != nil {
			return err
		}
	}
	killCgroups(h.Cgroups)
	if err := h.signalRemaining(ctx, unix.SIGKILL, 0); err != nil {
		return err
	}
	return removeCgroups(h.Cgroups)
}

// signalRemaining sends sig once to each process of the task, including processes that appear meanwhile. It returns
// when all of them have exited or when grace is over. With grace 0 it has no time limit. It waits for each of them,
// because remaining does not find a process that is about to exit and has no environment any more.
func (h Handle) signalRemaining(ctx context.Context, sig unix.Signal, grace time.Duration) error {
	limit, cancel := ctx, context.CancelFunc(func() {})
	if grace > 0 {
		limit, cancel = context.WithTimeout(ctx, grace)
	}
	defer cancel()
	signalled := map[process]bool{}
	defer func() {
		for p := range signalled {
			_, _ = unix.Wait4(p.pid, nil, unix.WNOHANG, nil) // it is a child if this process is a subreaper
		}
	}()
	for {
		processes, err := h.remaining()
		if err != nil || len(processes) == 0 {
			return err
		}
		for _, p := range processes {
			if !signalled[p] {
				signalled[p] = true
				if err := p.signal(sig); err != nil {
					return err
				}
			}
		}
		for _, p := range processes {
			err := p.wait(limit)
			switch {
			case err == nil:
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case limit.Err() != nil:
				return nil
			default:
				return err
			}
		}
	}
}

func (r runner) Logs(ctx context.Context, h Handle, s Stream, follow bool, to io.Writer) error {
	if s != Stdout && s != Stderr {
		return registry.Invalid("stream %q: use %q or %q", s, Stdout, Stderr)
	}
	return copyLogs(ctx, h, s, follow, to)
}

// adoptFunc is the type of Driver.Adopt.
type adoptFunc func(context.Context, Handle) (alive bool, err error)
