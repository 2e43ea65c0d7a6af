package taskdriver

import (
	"cmp"
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

	"holdfast/internal/proc"
	"holdfast/registry"
)

// parentName is argv[0] of a task's parent process.
const parentName = "holdfast-task"

// Descriptors that a parent, or the helper process of a command, inherits.
const (
	requestFD = 3
	replyFD   = 4
	lockFD    = 5 // keeps a lock in the task's directory while the process lives
)

// request tells the parent which task to start. It is sent through a pipe, because the environment may hold secrets.
type request struct {
	Driver   string `json:"driver"`
	Isolated bool   `json:"isolated"`
	Task     Task   `json:"task"`
}

// reply is the handle of the started task, or the reason why nothing runs.
type reply struct {
	Handle Handle `json:"handle"`
	Kind   int    `json:"kind,omitempty"` // index in registry.Kinds, from 1
	Err    string `json:"err,omitempty"`
}

// err returns the error of a reply whose Err is set, with its kind.
func (r reply) err() error {
	if r.Kind > 0 && r.Kind <= len(registry.Kinds) {
		return registry.Errorf(registry.Kinds[r.Kind-1], "%s", r.Err)
	}
	return errors.New(r.Err)
}

// Main must be the first call in the main function of a program that uses a driver. In a process that was started as
// the parent of a task, it runs the parent and does not return.
func Main() {
	if len(os.Args) == 1 && os.Args[0] == execName {
		runtime.LockOSThread() // the thread that enters a task's namespace must end, and the main thread cannot
		os.Exit(execMain())
	}
	if len(os.Args) != 3 || os.Args[0] != parentName { // the name alone does not suffice: a shell passes it too
		return
	}
	runtime.LockOSThread() // as above, for the thread that makes a task's namespace
	os.Exit(parentMain())
}

func parentMain() int {
	terms := make(chan os.Signal, 1)
	signal.Notify(terms, unix.SIGTERM)
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGINT, unix.SIGQUIT) // ignored here, but not by the task
	unix.Umask(0o022)
	closeInherited()
	requests, replies := os.NewFile(requestFD, "request"), os.NewFile(replyFD, "reply")
	var r request
	if err := json.NewDecoder(requests).Decode(&r); err != nil {
		return 1 // the starter has died, and nothing was started
	}
	requests.Close()
	p := &parent{request: r, terms: terms}
	err := Exhausted(p.start())
	_ = json.NewEncoder(replies).Encode(replyOf(p.handle, err)) // if the starter is gone, Find reads the handle
	replies.Close()
	if err != nil {
		return 1
	}
	if err := p.run(); err != nil {
		fmt.Fprintf(os.Stderr, "%s %s: %v\n", time.Now().UTC().Format(time.RFC3339), r.Task.ID, err)
		return 1
	}
	return 0
}

// closeInherited closes descriptors that the orchestrator has itself inherited from its starter. These are the ones
// without FD_CLOEXEC.
func closeInherited() {
	for _, fd := range []int{requestFD, replyFD, lockFD} {
		unix.CloseOnExec(fd)
	}
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd < requestFD {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			unix.Close(fd)
		}
	}
}

func replyOf(h Handle, err error) reply {
	r := reply{Handle: h}
	if err != nil {
		r.Err = err.Error()
		r.Kind = 1 + slices.IndexFunc(registry.Kinds, func(k error) bool { return errors.Is(err, k) })
	}
	return r
}

// parent runs one task.
type parent struct {
	request request
	terms   <-chan os.Signal
	cgroup  *cgroup
	handle  Handle
	copiers sync.WaitGroup
	pipes   []*os.File // read ends
}

// start starts the task and records its handle. After an error nothing of the task is left.
func (p *parent) start() error {
	t := p.request.Task
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the reaper of the task's processes: %w", err)
	}
	p.cgroup = newCgroup(t.ID, t.Resources, confined(t, p.request.Isolated))
	err := p.prepare()
	if err == nil {
		err = p.launch()
	}
	if err == nil {
		p.handle.Warnings = p.cgroup.warnings
		err = writeVolatile(t.Dir, handleFile, p.handle)
	}
	if err != nil {
		p.killAll()
		_ = os.Remove(filepath.Join(t.Dir, handleFile)) // may not exist
		return errors.Join(err, removeCgroups(p.cgroup.dirs()))
	}
	return nil
}

// prepare sets the device rules and the limits of the cgroup, and records the handle before the task runs. The task can
// then be found even if parent and starter are killed right after the start. prepare also reserves space for all
// records, because the task itself may fill the disk.
func (p *parent) prepare() error {
	self, err := proc.ReadStat(os.Getpid())
	if err != nil {
		return err
	}
	boot, err := proc.BootID()
	if err != nil {
		return err
	}
	t := p.request.Task
	if err := errors.Join(reserveRecord(t.Dir, exitFile), reserveRecord(t.Dir, stopFile)); err != nil {
		return err
	}
	if err := p.confine(); err != nil {
		return err
	}
	p.cgroup.applyLimits(t.Resources)
	p.handle = Handle{
		ID: t.ID, Driver: p.request.Driver, Dir: t.Dir, PID: self.PID, StartTime: self.Start, Boot: boot,
		Cgroups: p.cgroup.dirs(), Warnings: p.cgroup.warnings,
	}
	if err := writeVolatile(t.Dir, handleFile, p.handle); err != nil {
		return err
	}
	return reserveRecord(t.Dir, handleFile)
}

// confined reports whether the plan may limit the devices of the task.
func confined(t Task, isolated bool) bool {
	return isolated && len(t.Plan.Devices)+len(t.Plan.Rules) > 0
}

// confine limits the cgroup to the devices of the plan. There is no such limit for a task of raw_exec, and for a plan
// that has no devices or binds the host's /dev.
func (p *parent) confine() error {
	if !confined(p.request.Task, p.request.Isolated) {
		return nil
	}
	plan := p.request.Task.Plan
	policy, err := newDevicePolicy(plan)
	if err != nil || hasHostDevices(plan) {
		return err
	}
	return p.cgroup.confine(policy)
}

// launch starts the program and connects its output to the log files.
func (p *parent) launch() error {
	t := p.request.Task
	stdout, err := p.pipe(openLogs(t.Dir, Stdout, t.LogSize, t.LogFiles))
	if err != nil {
		return err
	}
	defer stdout.Close()
	stderr, err := p.pipe(openLogs(t.Dir, Stderr, t.LogSize, t.LogFiles))
	if err != nil {
		return err
	}
	defer stderr.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		return err
	}
	defer null.Close()
	files, err := openCgroups(p.cgroup.dirs())
	if err != nil {
		return err
	}
	defer files.close()
	c, err := newCommand(p.request, files)
	if err != nil {
		return err
	}
	c.attr.Files = []*os.File{null, stdout, stderr}
	child, err := c.start(p.request)
	if err != nil {
		return err
	}
	defer func() { _ = child.Release() }() // reap reaps it
	task, err := proc.ReadStat(child.Pid)  // at worst a zombie, because only this process reaps it
	p.handle.TaskPID, p.handle.TaskStart = task.PID, task.Start
	return err
}

// pipe returns the write end of a pipe whose content is copied to the logs.
func (p *parent) pipe(to *logWriter) (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	p.pipes = append(p.pipes, r)
	p.copiers.Go(func() {
		_, _ = io.Copy(to, r)
		to.close()
		r.Close()
	})
	return w, nil
}

// run waits for the end of the task, and stops the task on SIGTERM. Then it kills all processes that are left, and
// records the exit.
func (p *parent) run() error {
	ended := make(chan struct{})
	go func() {
		reapUntil(p.handle.TaskPID)
		close(ended)
	}()
	var graceOver <-chan time.Time
	writeExit := writeRecord
	for running := true; running; {
		select {
		case <-ended:
			running = false
		case <-p.terms:
			_ = unix.Kill(-p.handle.TaskPID, unix.SIGTERM) // the task is not reaped yet, so the pid is its own
			graceOver = time.After(p.grace())
			writeExit = writeVolatile // the stop is recorded, so after a power cut the exit is not needed
		case <-graceOver:
			graceOver = nil
			p.killTree()
		}
	}
	status := p.killAll()
	exit := Exit{At: time.Now().UTC(), Code: status.ExitStatus()}
	if status.Signaled() {
		exit.Signal, exit.Code = int(status.Signal()), 128+int(status.Signal())
	}
	if limit, _ := p.request.Task.Resources.hardMemory(); limit > 0 && exit.Code != 0 && p.cgroup.memoryKills() > 0 {
		exit.Err = memoryExit
	}
	p.drainOutput()
	err := removeCgroups(p.cgroup.dirs())
	return errors.Join(err, writeExit(p.handle.Dir, exitFile, exitRecord{p.handle.ID, p.handle.Driver, exit}))
}

// grace returns the grace of the stop request or, without one, the task's own.
func (p *parent) grace() time.Duration {
	var s stopRequest
	if found, err := readRecord(p.handle.Dir, stopFile, &s); err == nil && found && s.ID == p.handle.ID {
		return s.Grace
	}
	return cmp.Or(p.request.Task.KillGrace, DefaultKillGrace)
}

// reapUntil reaps orphans of the task until the task itself has ended. It does not reap the task. The task's pid, which
// is also the number of its process group, is therefore not reused.
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

// childOf returns si_pid, the first field of siginfo's union, which x/sys does not name.
func childOf(info *unix.Siginfo) int {
	fields := (*[unsafe.Sizeof(*info) / 4]int32)(unsafe.Pointer(info))
	return int(fields[siginfoPID])
}

// siginfoPID counts int32 fields: signo, errno, code, padding on 64-bit machines, then the union.
const siginfoPID = 3 + (unsafe.Sizeof(uintptr(0))-4)/4

// killAll kills and reaps all that is left of the task, and returns the task's status. The parent is a subreaper, so
// all these processes are below it. killAll is therefore done when the parent has no child.
func (p *parent) killAll() syscall.WaitStatus {
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
			options = 0 // wait for the death of one of them
		default: // a process was forked while killTree searched
			time.Sleep(time.Millisecond)
		}
	}
}

// killTree kills all processes below this one. found is true if at least one of them was certainly alive.
// It also signals zombies, because other threads of the same process may still live.
func (p *parent) killTree() (found bool) {
	killCgroups(p.cgroup.dirs())
	below, err := descendants(os.Getpid())
	for _, s := range below {
		_ = processOf(s).signal(unix.SIGKILL)
		found = found || !s.Exited()
	}
	return found && err == nil
}

// reap reaps one child. With WNOHANG it returns pid 0 if none has exited.
func reap(options int) (int, syscall.WaitStatus, error) {
	for {
		var s syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &s, options, nil)
		if !errors.Is(err, unix.EINTR) {
			return pid, s, err
		}
	}
}

// drainOutput copies the rest of the pipes to the logs. It does not wait for processes outside the task that still have
// the pipes open.
func (p *parent) drainOutput() {
	for _, r := range p.pipes {
		_ = r.SetReadDeadline(time.Now().Add(time.Second))
	}
	p.copiers.Wait()
}
