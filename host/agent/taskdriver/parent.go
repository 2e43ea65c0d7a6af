package taskdriver

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
	"holdfast/registry"
)

// parentName is the name under which this binary is a task's parent.
const parentName = "holdfast-task"

// The descriptors that a parent is started with.
const (
	orderFD  = 3 // the order, until its end
	answerFD = 4 // takes the answer
	lockFD   = 5 // the lock of the task's directory, held while we live
)

// order is what a starter tells the parent. It comes through a pipe: a task's environment may hold secrets.
type order struct {
	Driver   string `json:"driver"`
	Isolated bool   `json:"isolated"`
	Task     Task   `json:"task"`
}

// answer is the handle, or why nothing runs.
type answer struct {
	Handle Handle `json:"handle"`
	Kind   int    `json:"kind,omitempty"` // index in registry.Kinds, from 1
	Err    string `json:"err,omitempty"`
}

// Main has to be the first call of a main that uses a driver: if this process was started to be a task's parent, it is one, and
// Main does not return.
func Main() {
	if len(os.Args) == 0 || os.Args[0] != parentName {
		return
	}
	runtime.LockOSThread() // so that no task's namespace is ever made on the main thread, which could not leave it
	os.Exit(parentMain())
}

func parentMain() int {
	terms := make(chan os.Signal, 1)
	signal.Notify(terms, unix.SIGTERM)
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGINT, unix.SIGQUIT) // ignored here, but not in the task
	unix.Umask(0o022)
	closeInherited()
	from, to := os.NewFile(orderFD, "order"), os.NewFile(answerFD, "answer")
	var o order
	if err := json.NewDecoder(from).Decode(&o); err != nil {
		return 1 // the starter died before it had said everything: nothing was started
	}
	from.Close()
	p := &parent{order: o, terms: terms}
	err := noRoom(p.start())
	reply(to, p.handle, err)
	if err != nil {
		return 1
	}
	if err := p.run(); err != nil {
		fmt.Fprintf(os.Stderr, "%s %s: %v\n", time.Now().UTC().Format(time.RFC3339), o.Task.ID, err)
		return 1
	}
	return 0
}

// closeInherited closes what the orchestrator's own starter let through to us: neither we nor the task are to hold it. What we
// open ourselves is closed on exec, what was inherited is not; so they are told apart.
func closeInherited() {
	for _, fd := range []int{orderFD, answerFD, lockFD} {
		unix.CloseOnExec(fd)
	}
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd < orderFD {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			unix.Close(fd)
		}
	}
}

// reply answers the starter. It may be gone: then the handle is found in the task's directory.
func reply(to *os.File, h Handle, err error) {
	a := answer{Handle: h}
	if err != nil {
		a.Err = err.Error()
		a.Kind = 1 + slices.IndexFunc(registry.Kinds, func(k error) bool { return errors.Is(err, k) })
	}
	_ = json.NewEncoder(to).Encode(a)
	_ = to.Close()
}

// parent runs one task.
type parent struct {
	order  order
	terms  <-chan os.Signal
	group  *group
	handle Handle
	pumps  sync.WaitGroup
	pipes  []*os.File // the reading ends
}

// start starts the task and writes its handle. After an error nothing is left.
func (p *parent) start() error {
	t := p.order.Task
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the reaper of the task's processes: %w", err)
	}
	p.group = newGroup(t.ID)
	err := errors.Join(p.name(), reserveRecord(t.Dir, exitFile), reserveRecord(t.Dir, stopFile))
	if err == nil {
		err = p.confine()
	}
	if err == nil {
		// Before the task is there, so that nothing is lost if we and the starter are killed right then.
		err = writeRecord(t.Dir, handleFile, p.handle)
	}
	if err == nil {
		err = reserveRecord(t.Dir, handleFile) // the task itself may fill the disk
	}
	if err == nil {
		err = p.launch()
	}
	if err == nil {
		p.handle.Notes = p.group.notes
		err = writeRecord(t.Dir, handleFile, p.handle)
	}
	if err != nil {
		p.end()
		_ = os.Remove(filepath.Join(t.Dir, handleFile)) // it may not be there
		return errors.Join(err, removeGroups(p.group.dirs()))
	}
	return nil
}

// confine gives the task's group the plan's devices. Without any in its plan a task keeps all, as one of raw_exec always does.
func (p *parent) confine() error {
	plan := p.order.Task.Plan
	if !p.order.Isolated || len(plan.Devices)+len(plan.Rules) == 0 {
		return nil
	}
	policy, err := newPolicy(plan)
	if err != nil {
		return err
	}
	return p.group.confine(policy)
}

// launch starts the program, its output going to log files.
func (p *parent) launch() error {
	t := p.order.Task
	out, err := p.pipe(newRotation(t, Stdout))
	if err != nil {
		return err
	}
	defer out.Close()
	errs, err := p.pipe(newRotation(t, Stderr))
	if err != nil {
		return err
	}
	defer errs.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	in, err := p.group.open()
	if err != nil {
		return err
	}
	defer in.close()
	c, err := newCommand(p.order, in)
	if err != nil {
		return err
	}
	c.attr.Files = []*os.File{null, out, errs}
	child, err := c.start(p.order)
	if err != nil {
		return err
	}
	defer func() { _ = child.Release() }() // reaped by wait4 below
	task, err := readStat(child.Pid)       // at worst a zombie: nobody has reaped it
	p.handle.TaskPID, p.handle.TaskStart = task.pid, task.start
	return err
}

// name fills the handle with what is known before the task runs.
func (p *parent) name() error {
	self, err := readStat(os.Getpid())
	if err != nil {
		return err
	}
	boot, err := mount.BootID()
	p.handle = Handle{
		ID: p.order.Task.ID, Driver: p.order.Driver, Dir: p.order.Task.Dir, PID: self.pid, StartTime: self.start,
		Boot: boot, Cgroups: p.group.dirs(), Notes: p.group.notes,
	}
	return err
}

// pipe gives the end of a pipe that the task writes to.
func (p *parent) pipe(to *rotation) (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	p.pipes = append(p.pipes, r)
	p.pumps.Go(func() {
		_, _ = io.Copy(to, r)
		to.close()
		r.Close()
	})
	return w, nil
}

// run follows the task to its end: a SIGTERM of ours stops it, and what it leaves behind is ended before its exit is written.
func (p *parent) run() error {
	ended := make(chan struct{})
	go func() {
		reapUntil(p.handle.TaskPID)
		close(ended)
	}()
	var kill <-chan time.Time
	for running := true; running; {
		select {
		case <-ended:
			running = false
		case <-p.terms:
			_ = unix.Kill(-p.handle.TaskPID, unix.SIGTERM) // the task is not reaped yet, so the number is its own
			kill = time.After(p.grace())
		case <-kill:
			kill = nil
			p.killTree()
		}
	}
	status := p.end()
	exit := Exit{At: time.Now().UTC(), OOM: p.group.oom(), Code: status.ExitStatus()}
	if status.Signaled() {
		exit.Signal, exit.Code = int(status.Signal()), 128+int(status.Signal())
	}
	p.drain()
	gone := removeGroups(p.group.dirs())
	return errors.Join(gone, writeRecord(p.handle.Dir, exitFile, ending{p.handle.ID, exit}))
}

// grace is what the stopper allows, or the task's own.
func (p *parent) grace() time.Duration {
	var s stopping
	if found, err := readRecord(p.handle.Dir, stopFile, &s); err == nil && found && s.ID == p.handle.ID {
		return s.Grace
	}
	if p.order.Task.KillGrace > 0 {
		return p.order.Task.KillGrace
	}
	return DefaultKillGrace
}

// reapUntil reaps what the task's processes leave to us, until the task itself has ended, which stays unreaped: while it is there
// its number belongs to its process group.
func reapUntil(task int) {
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOWAIT, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		pid := childOf(&info)
		if err != nil || pid == task {
			return
		}
		_, _ = unix.Wait4(pid, nil, 0, nil)
	}
}

// childOf is si_pid, the first field of siginfo's union, which x/sys does not name.
func childOf(info *unix.Siginfo) int {
	fields := (*[unsafe.Sizeof(*info) / 4]int32)(unsafe.Pointer(info))
	return int(fields[siginfoPID])
}

// siginfoPID counts int32 fields: signo, errno, code, on 64 bits a gap, then the union.
const siginfoPID = 3 + (unsafe.Sizeof(uintptr(0))-4)/4

// end kills whatever is left of the task and reaps it all. We are the reaper of all its processes, so what is alive is below us,
// and it is over when we have no child.
func (p *parent) end() syscall.WaitStatus {
	var status syscall.WaitStatus
	for options := unix.WNOHANG; ; {
		pid, s, err := reap(options)
		options = unix.WNOHANG
		switch {
		case errors.Is(err, unix.ECHILD):
			return status
		case pid != 0 && pid == p.handle.TaskPID:
			status = s
		case pid != 0:
		case p.killTree():
			options = 0
		default: // a child was born behind the back of the search
			time.Sleep(time.Millisecond)
		}
	}
}

// killTree kills all that is alive below us and says whether there was anything. One that looks dead may have living threads.
func (p *parent) killTree() (found bool) {
	killAll(p.group.dirs())
	below, err := descendants(os.Getpid())
	for _, s := range below {
		_ = s.signal(unix.SIGKILL)
		found = found || !s.dead()
	}
	return found && err == nil
}

// reap takes one dead child; pid 0: there is none, and the options say not to wait for one.
func reap(options int) (int, syscall.WaitStatus, error) {
	for {
		var s syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &s, options, nil)
		if !errors.Is(err, unix.EINTR) {
			return pid, s, err
		}
	}
}

// drain lets the logs take what is still in the pipes. A writer outside the task, to which it has handed its output, is not
// waited for.
func (p *parent) drain() {
	for _, r := range p.pipes {
		_ = r.SetReadDeadline(time.Now().Add(time.Second))
	}
	p.pumps.Wait()
}
