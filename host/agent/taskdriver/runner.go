package taskdriver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
	"holdfast/registry"
)

// runner is what both drivers share: it starts parents and speaks to them. It keeps nothing in memory, so whatever it does for a
// task another process can do after it.
type runner struct {
	name     string
	isolated bool
}

func (r runner) Name() string   { return r.name }
func (r runner) Isolated() bool { return r.isolated }

// start makes the task's directory and a parent, and waits until that has started the task.
func (r runner) start(ctx context.Context, t Task) (_ Handle, err error) {
	defer func() { err = noRoom(err) }()
	if err := t.check(); err != nil {
		return Handle{}, err
	}
	if err := errors.Join(makeDir(t.Dir), makeDir(filepath.Join(t.Dir, "logs"))); err != nil {
		return Handle{}, fmt.Errorf("make the directory of task %s: %w", t.ID, err)
	}
	held, err := lock(t.Dir)
	if err != nil {
		return Handle{}, err
	}
	defer held.Close()
	if err := r.clear(ctx, t); err != nil {
		return Handle{}, err
	}
	h, err := r.order(ctx, t, held)
	if err != nil {
		return Handle{}, fmt.Errorf("start task %s: %w", t.ID, err)
	}
	return h, nil
}

func makeDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// clear removes the records of an earlier attempt, once nothing of it is left.
func (r runner) clear(ctx context.Context, t Task) error {
	var old Handle
	found, err := readRecord(t.Dir, handleFile, &old)
	if err != nil {
		return err
	}
	if found {
		alive, err := r.Adopt(ctx, old)
		if err != nil {
			return err
		}
		if alive {
			return registry.Errorf(registry.ErrConflict, "task %s: attempt %s still runs in %s", t.ID, old.ID, t.Dir)
		}
	}
	for _, name := range []string{handleFile, exitFile, stopFile} {
		if err := os.Remove(filepath.Join(t.Dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// order starts the parent and hands it the task. The parent gets a session of its own and none of our descriptors.
func (r runner) order(ctx context.Context, t Task, held *os.File) (Handle, error) {
	from, to, err := os.Pipe()
	if err != nil {
		return Handle{}, err
	}
	defer to.Close()
	back, forth, err := os.Pipe()
	if err != nil {
		from.Close()
		return Handle{}, err
	}
	defer back.Close()
	p, err := spawn(t, from, forth, held)
	from.Close()
	forth.Close()
	if err != nil {
		return Handle{}, err
	}
	stop := context.AfterFunc(ctx, func() { _ = back.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var a answer
	err = json.NewEncoder(to).Encode(order{r.name, r.isolated, t})
	if err == nil {
		err = json.NewDecoder(back).Decode(&a)
	}
	switch {
	case err != nil:
		return Handle{}, errors.Join(r.abandon(ctx, t, p), errorOf(ctx, t, err))
	case a.Err != "":
		_, _ = unix.Wait4(p.pid, nil, 0, nil)
		return Handle{}, a.err()
	}
	return a.Handle, nil
}

// spawn starts this very binary, even if its file was replaced, as a parent. Its arguments are for Parents.
func spawn(t Task, from, to, held *os.File) (process, error) {
	log, err := os.OpenFile(filepath.Join(t.Dir, "parent.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND|os.O_TRUNC, 0o600)
	if err != nil {
		return process{}, err
	}
	defer log.Close()
	cmd := exec.Cmd{
		Path: "/proc/self/exe", Args: []string{parentName, t.ID, t.Dir}, Dir: "/", Stderr: log, ExtraFiles: []*os.File{from, to, held},
		Env: parentEnv(), SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := cmd.Start(); err != nil {
		return process{}, fmt.Errorf("start the parent of a task: %w", err)
	}
	defer func() { _ = cmd.Process.Release() }() // reaped by whoever waits for the task
	s, err := readStat(cmd.Process.Pid)
	return s.process, err
}

// parentEnv holds what a build for tests needs. The race detector would make every exit a second longer.
func parentEnv() []string {
	env := []string{"GORACE=atexit_sleep_ms=0"}
	if dir := os.Getenv("GOCOVERDIR"); dir != "" {
		env = append(env, "GOCOVERDIR="+dir)
	}
	return env
}

// abandon ends a parent that did not answer, and whatever it has started.
func (r runner) abandon(ctx context.Context, t Task, p process) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	err := p.signal(unix.SIGKILL)
	if err == nil {
		err = p.wait(ctx)
	}
	if err != nil {
		return fmt.Errorf("end the parent of task %s: %w", t.ID, err)
	}
	h := Handle{ID: t.ID, Dir: t.Dir, PID: p.pid, StartTime: p.start}
	if _, err := readRecord(t.Dir, handleFile, &h); err != nil {
		return err
	}
	h.Cgroups = newGroup(t.ID).dirs() // those that it may have made, so that they can be removed
	if err := h.end(ctx, 0); err != nil {
		return err
	}
	_ = os.Remove(filepath.Join(t.Dir, handleFile)) // it may not be there
	return nil
}

func errorOf(ctx context.Context, t Task, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("the parent of task %s ended without an answer, see parent.log in %s: %w", t.ID, t.Dir, err)
}

func (a answer) err() error {
	if a.Kind >= 1 && a.Kind <= len(registry.Kinds) {
		return registry.Errorf(registry.Kinds[a.Kind-1], "%s", a.Err)
	}
	return errors.New(a.Err)
}

func (h Handle) parent() process { return process{h.PID, h.StartTime} }

// thisBoot says whether the handle's processes can be there at all.
func (h Handle) thisBoot() (bool, error) {
	boot, err := mount.BootID()
	return boot == h.Boot, err
}

func (r runner) Adopt(_ context.Context, h Handle) (bool, error) {
	now, err := h.thisBoot()
	if err != nil || !now {
		return false, err
	}
	if h.parent().alive() {
		return true, nil
	}
	if _, ended, err := readExit(h); err == nil && ended {
		return false, nil // it is written when nothing is left
	}
	left, err := h.left()
	return len(left) > 0, err
}

func (r runner) Wait(ctx context.Context, h Handle) (Exit, error) {
	now, err := h.thisBoot()
	if err != nil {
		return Exit{}, err
	}
	lost := "the machine was started anew while the task ran"
	if now {
		lost = "the task's parent process was killed, and the task with it; how it ended is not known"
		if err := h.parent().wait(ctx); err != nil {
			return Exit{}, fmt.Errorf("wait for task %s: %w", h.ID, err)
		}
		if _, found, err := readExit(h); err != nil || !found {
			if err := errors.Join(err, h.end(ctx, 0)); err != nil {
				return Exit{}, fmt.Errorf("end what is left of task %s: %w", h.ID, err)
			}
		}
	}
	exit, found, err := readExit(h)
	if err != nil || found {
		return exit, err
	}
	exit = Exit{Code: -1, At: time.Now().UTC(), Err: lost}
	if err := noteLost(h, exit); err != nil {
		return exit, fmt.Errorf("note the end of task %s: %w", h.ID, err)
	}
	return exit, nil
}

// answerGrace is what a parent has beyond the task's grace before it is taken for stuck.
const answerGrace = 10 * time.Second

func (r runner) Stop(ctx context.Context, h Handle, grace time.Duration) error {
	now, err := h.thisBoot()
	if err != nil || !now {
		return err
	}
	if err := h.stop(ctx, grace); err != nil {
		return fmt.Errorf("stop task %s: %w", h.ID, err)
	}
	return nil
}

// stop asks the parent. One that is gone, or stuck, is not needed for it.
func (h Handle) stop(ctx context.Context, grace time.Duration) error {
	grace = max(grace, 0)
	asked := writeRecord(h.Dir, stopFile, stopping{h.ID, grace})
	if asked == nil {
		asked = h.parent().signal(unix.SIGTERM)
	}
	if asked == nil {
		patience, cancel := context.WithTimeout(ctx, grace+answerGrace)
		asked = h.parent().wait(patience)
		cancel()
	}
	if ctx.Err() != nil && asked != nil {
		return context.Cause(ctx)
	}
	if asked != nil {
		if err := h.parent().signal(unix.SIGKILL); err != nil {
			return errors.Join(asked, err)
		}
		if err := h.parent().wait(ctx); err != nil {
			return errors.Join(asked, err)
		}
	}
	if _, found, err := readExit(h); err == nil && found {
		return nil
	}
	return h.end(ctx, grace)
}

// end ends a task that has no parent any more: all its processes, then its cgroups.
func (h Handle) end(ctx context.Context, grace time.Duration) error {
	if grace > 0 {
		if err := h.endWith(ctx, unix.SIGTERM, grace); err != nil {
			return err
		}
	}
	killAll(h.Cgroups)
	if err := h.endWith(ctx, unix.SIGKILL, 0); err != nil {
		return err
	}
	return removeGroups(h.Cgroups)
}

// endWith sends a signal to each process of the task, and to those that appear meanwhile, until none is left or, if there is a
// grace, that is over.
func (h Handle) endWith(ctx context.Context, sig unix.Signal, grace time.Duration) error {
	patience, cancel := ctx, context.CancelFunc(func() {})
	if grace > 0 {
		patience, cancel = context.WithTimeout(ctx, grace)
	}
	defer cancel()
	told := map[process]bool{}
	defer func() {
		for p := range told {
			_, _ = unix.Wait4(p.pid, nil, unix.WNOHANG, nil) // it may have come to us, if we are a subreaper
		}
	}()
	for {
		left, err := h.left()
		if err != nil || len(left) == 0 {
			return err
		}
		for _, p := range left {
			if !told[p] {
				told[p] = true
				if err := p.signal(sig); err != nil {
					return err
				}
			}
		}
		if err := left[0].wait(patience); err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if patience.Err() != nil {
				return nil
			}
			return err
		}
	}
}

func (r runner) Logs(ctx context.Context, h Handle, s Stream, follow bool, to io.Writer) error {
	if s != Stdout && s != Stderr {
		return registry.Invalid("stream %q: use %q or %q", s, Stdout, Stderr)
	}
	return copyLogs(ctx, h, s, follow, to)
}
