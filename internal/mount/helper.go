package mount

import (
	"context"
	"encoding/gob"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrHung means that an operation had no result in time. It may still take effect.
var ErrHung = errors.New("no answer in time")

// Helper runs operations that may hang in the kernel in helper processes: it inspects paths, unmounts, and mounts parts
// of volumes. A helper process that misses its deadline is killed. While the kernel does not let it exit, the same
// operation is not started again, so that a hanging operation has one process, however often it is called. A hanging
// process keeps its mount in use. A helper process has no files or environment of this process. Calls may be
// concurrent. A context without a deadline gets one of 10 seconds.
type Helper struct {
	Command []string // see HelperCommand

	mu     sync.Mutex
	killed []*process // not reaped yet
}

const (
	helperLimit = 10 * time.Second
	killLimit   = 100 * time.Millisecond // for a killed process to exit, before it counts as hanging
)

// Inspect inspects each path. A path without an answer at the deadline is Hung, which is no error. An error means that
// some paths are not in the result. Inspect follows no links and opens no devices. While it runs, it uses the mounts of
// the paths.
func (h *Helper) Inspect(ctx context.Context, paths []string) (map[string]Info, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	paths = slices.Compact(slices.Sorted(slices.Values(paths)))
	found := make(map[string]Info, len(paths))
	var ask []string
	for _, p := range paths {
		if h.hangsIn("inspect " + p) {
			found[p] = Info{Hung: true}
		} else {
			ask = append(ask, p)
		}
	}
	var err error
	if len(ask) > 0 {
		err = h.inspect(ctx, ask, found)
	}
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return nil, context.Cause(ctx)
	case len(found) == len(paths):
		return found, nil
	}
	return found, fmt.Errorf("inspect %d of %d paths: %w", len(paths)-len(found), len(paths), err)
}

func (h *Helper) inspect(ctx context.Context, paths []string, found map[string]Info) error {
	begun := map[int]string{} // by thread
	err := h.askProcess(ctx, question{Inspect: paths}, func(p *process, a answer) {
		if path := paths[a.Path]; a.Found {
			found[path] = a.Info
			delete(p.busy, a.TID)
			delete(begun, a.TID)
		} else {
			p.busy[a.TID] = "inspect " + path
			begun[a.TID] = path
		}
	})
	if errors.Is(err, ErrHung) {
		for _, path := range begun {
			found[path] = Info{Hung: true}
		}
	}
	return err
}

// Unmount calls the function Unmount. After ErrHung the unmount is still in progress.
func (h *Helper) Unmount(ctx context.Context, root, rel string) error {
	at := filepath.Join(root, rel)
	return h.do(ctx, "unmount "+at, "unmount "+at, question{Unmount: &Part{Root: root, At: rel}})
}

// MountPart calls the function MountPart. After ErrHung the part may still be mounted. Until the outcome is certain, no
// other operation starts at p.At.
func (h *Helper) MountPart(ctx context.Context, p Part) error {
	at := filepath.Join(p.Root, p.At)
	return h.do(ctx, "part at "+at, "mount a part at "+at, question{MountPart: &p})
}

// UnmountPart calls the function UnmountPart. After ErrHung the unmount is still in progress.
func (h *Helper) UnmountPart(ctx context.Context, root, at string) error {
	path := filepath.Join(root, at)
	return h.do(ctx, "part at "+path, "unmount the part at "+path, question{UnmountPart: &Part{Root: root, At: at}})
}

// SetOwnership calls the function SetOwnership. After ErrHung it may still go on.
func (h *Helper) SetOwnership(ctx context.Context, o Ownership) error {
	at := filepath.Join(o.Root, o.Volume)
	return h.do(ctx, "ownership of "+at, "set the owner of "+at, question{Ownership: &o})
}

// do runs an operation in a helper process, unless an earlier one hangs at the same place. what is for errors.
func (h *Helper) do(ctx context.Context, place, what string, q question) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if h.hangsIn(place) {
		return fmt.Errorf("%s: %w: an earlier attempt still hangs", what, ErrHung)
	}
	err := h.askProcess(ctx, q, func(p *process, a answer) { p.busy[a.TID] = place })
	if remote := (*remoteError)(nil); err == nil || errors.As(err, &remote) {
		return err // the helper process has named its operation in the error
	}
	return fmt.Errorf("%s: %w", what, err)
}

// askProcess starts a helper process for one question. It passes all answers but the last to take.
func (h *Helper) askProcess(ctx context.Context, q question, take func(*process, answer)) error {
	until, limited := ctx.Deadline()
	if !limited {
		until = time.Now().Add(helperLimit)
	}
	p, err := start(h.Command, until)
	if err != nil {
		return err
	}
	defer h.end(p)
	defer context.AfterFunc(ctx, p.interrupt)()
	err = gob.NewEncoder(p.in).Encode(q)
	for answers := gob.NewDecoder(p.out); err == nil; {
		var a answer
		if err = answers.Decode(&a); err == nil && a.Done {
			p.done = true
			return a.err()
		}
		if err == nil {
			take(p, a)
		}
	}
	switch {
	case errors.Is(ctx.Err(), context.Canceled):
		return context.Cause(ctx)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ErrHung
	}
	return fmt.Errorf("helper process ended without an answer: %w", err)
}

// end kills a helper process. If the process does not exit, end keeps it in killed.
func (h *Helper) end(p *process) {
	p.in.Close()
	p.out.Close()
	limit := killLimit
	if p.done {
		limit = helperLimit // no operation delays the exit
	}
	if p.kill(limit) {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.killed = append(h.killed, p)
}

// hangsIn reports whether an earlier helper process hangs in an operation. It reaps helper processes that have exited.
func (h *Helper) hangsIn(what string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.killed = slices.DeleteFunc(h.killed, (*process).reap)
	return slices.ContainsFunc(h.killed, func(p *process) bool { return p.hangsIn(what) })
}

// process is a helper process with its standard input and output.
type process struct {
	pid   int
	pidfd int
	in    *os.File
	out   *os.File
	busy  map[int]string // current operation of each thread
	done  bool           // it has answered its question
}

// start starts a helper process without environment and files of this process, because both may hold secrets or locks.
func start(command []string, until time.Time) (*process, error) {
	if len(command) == 0 {
		return nil, errors.New("no helper program is configured")
	}
	stdin, in, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer stdin.Close()
	out, stdout, err := os.Pipe()
	if err != nil {
		in.Close()
		return nil, err
	}
	defer stdout.Close()
	p := &process{in: in, out: out, busy: map[int]string{}}
	p.pid, _, err = syscall.StartProcess(command[0], command, &syscall.ProcAttr{
		Dir: "/", Files: []uintptr{stdin.Fd(), stdout.Fd(), stdout.Fd()}, Sys: &syscall.SysProcAttr{PidFD: &p.pidfd},
	})
	if err != nil {
		in.Close()
		out.Close()
		return nil, fmt.Errorf("start helper process %s: %w", strings.Join(command, " "), err)
	}
	return p, errors.Join(in.SetDeadline(until), out.SetDeadline(until))
}

// interrupt ends reads from the process and writes to it.
func (p *process) interrupt() {
	past := time.Unix(0, 1)
	_ = p.in.SetDeadline(past)
	_ = p.out.SetDeadline(past)
}

// kill kills the process and reports whether it has exited. It waits no longer than limit, because the process may hang
// in the kernel.
func (p *process) kill(limit time.Duration) bool {
	_ = unix.Kill(p.pid, unix.SIGKILL) // the pid is not reused before the process is reaped
	for end := time.Now().Add(limit); time.Now().Before(end); {
		poll := []unix.PollFd{{Fd: int32(p.pidfd), Events: unix.POLLIN}}
		n, err := unix.Poll(poll, int(time.Until(end).Milliseconds())+1)
		if n == 1 || err != nil && !errors.Is(err, unix.EINTR) {
			break
		}
	}
	return p.reap()
}

// reap reports whether the process has exited. If it has, reap releases it.
func (p *process) reap() bool {
	pid, err := unix.Wait4(p.pid, nil, unix.WNOHANG, nil)
	if pid == 0 || errors.Is(err, unix.EINTR) {
		return false
	}
	unix.Close(p.pidfd)
	return true
}

// hangsIn reports whether a thread of the process is in an operation.
func (p *process) hangsIn(what string) bool {
	for tid, busy := range p.busy {
		if busy != what {
			continue
		}
		if _, err := os.Lstat(filepath.Join("/proc", strconv.Itoa(p.pid), "task", strconv.Itoa(tid))); err == nil {
			return true
		}
	}
	return false
}
