package taskdriver

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"reflect"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
	"holdfast/registry"
)

// execName is argv[0] of the helper process that runs one program in a task.
const execName = "holdfast-exec"

// execMain runs the command with the standard streams of this process.
func execMain() int {
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGTERM) // ignored here
	unix.Umask(0o022)
	closeInherited()
	control, replies := json.NewDecoder(os.NewFile(requestFD, "control")), os.NewFile(replyFD, "reply")
	var r execRequest
	if err := control.Decode(&r); err != nil {
		return 1 // the starter died; nothing was started
	}
	code, err := r.run(control)
	_ = json.NewEncoder(replies).Encode(execReply{replyOf(Handle{}, err), code})
	return 0
}

// run runs the program. When the task ends or the starter closes the control pipe, it kills the program and all its
// descendants. If the starter dies, the pipe is closed too.
func (r execRequest) run(control *json.Decoder) (code int, err error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 0, fmt.Errorf("become the reaper of the command's processes: %w", err)
	}
	task := process{r.Handle.TaskPID, r.Handle.TaskStart}
	child, err := r.start(task)
	if err != nil && !task.alive() {
		err = errTaskEnded
	}
	if err != nil {
		return 0, err
	}
	p := &parent{cgroup: &cgroup{}} // an empty cgroup, so that killAll spares the task
	p.handle.TaskPID = child.Pid
	ended, taskEnded, signals := make(chan struct{}), make(chan struct{}), make(chan unix.Signal)
	go func() {
		reapUntil(child.Pid)
		close(ended)
	}()
	go func() {
		_ = task.wait(context.Background()) // nothing else ends this wait
		close(taskEnded)
	}()
	go func() {
		defer close(signals)
		for s := unix.Signal(0); control.Decode(&s) == nil; {
			signals <- s
		}
	}()
	for running := true; running; {
		select {
		case <-ended:
			running = false
		case <-taskEnded:
			running, err = false, errTaskEnded
		case s, more := <-signals:
			if running = more; more {
				_ = unix.Kill(-child.Pid, s) // not reaped yet, so the pid is its own
			}
		}
	}
	status := p.killAll()
	if status.Signaled() {
		return 128 + int(status.Signal()), err
	}
	return status.ExitStatus(), err
}

var errTaskEnded = registry.Errorf(registry.ErrConflict, "the task has ended, and the command with it")

// start starts the program with the user, environment, mount namespace, root and directory of the process that leads
// the task, and in the task's cgroups. A terminal gets the user as its owner.
func (r execRequest) start(task process) (child *os.Process, err error) {
	pidfd, found, err := task.open()
	if err != nil || !found {
		return nil, cmp.Or(err, errTaskEnded)
	}
	defer pidfd.Close()
	leader := fmt.Sprintf("/proc/%d/", task.pid)
	environ, err := os.ReadFile(leader + "environ")
	if err != nil {
		return nil, err
	}
	cred, err := credentialOfProcess(leader)
	if err != nil {
		return nil, err
	}
	own, err := credentialOfProcess("/proc/self/")
	if err != nil {
		return nil, err
	}
	if reflect.DeepEqual(cred, own) {
		cred = nil // only root may set it
	}
	c := &command{path: r.Command[0], argv: r.Command}
	c.attr.Files = []*os.File{os.Stdin, os.Stdout, os.Stderr}
	c.attr.Sys = &syscall.SysProcAttr{Setsid: true, Credential: cred}
	for e := range bytes.SplitSeq(bytes.TrimSuffix(environ, []byte{0}), []byte{0}) {
		c.attr.Env = append(c.attr.Env, string(e))
	}
	c.attr.Env = withDefault(c.attr.Env, taskEnv, r.Handle.ID)
	if r.Term != "" {
		c.attr.Sys.Setctty = true // descriptor 0
		c.attr.Env = withDefault(c.attr.Env, "TERM", r.Term)
		if cred != nil {
			if err := os.Stdin.Chown(int(cred.Uid), -1); err != nil {
				return nil, err
			}
		}
	}
	if c.files, err = openCgroups(r.Handle.Cgroups); err != nil {
		return nil, err
	}
	defer c.files.close()
	if c.files.unified != nil {
		c.attr.Sys.UseCgroupFD, c.attr.Sys.CgroupFD = true, int(c.files.unified.Fd())
	}
	err = mount.OnThread(func() error {
		if err := c.files.enter(); err != nil {
			return err
		}
		if err := enterFileSystem(leader); err != nil {
			return fmt.Errorf("enter the file system of the task: %w", err)
		}
		if err := unix.PidfdSendSignal(int(pidfd.Fd()), 0, nil, 0); err != nil {
			return errTaskEnded // another process may have its pid now, and what was read may be that process's
		}
		path, err := c.lookPath()
		if err == nil {
			child, err = os.StartProcess(path, c.argv, &c.attr)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.path, classifyStartError(err))
	}
	return child, nil
}

// enterFileSystem moves the calling thread to the mount namespace, root and working directory of a process, which is
// given by its directory in /proc.
func enterFileSystem(process string) error {
	namespace, err := os.Open(process + "ns/mnt")
	if err != nil {
		return err
	}
	defer namespace.Close()
	var dirs [2]int // root and working directory
	for i, name := range []string{"root", "cwd"} {
		if dirs[i], err = unix.Open(process+name, unix.O_PATH|unix.O_CLOEXEC, 0); err != nil {
			return err
		}
		defer unix.Close(dirs[i])
	}
	inNamespace, err := sameFile("/proc/self/ns/mnt", process+"ns/mnt")
	if err != nil {
		return err
	}
	inRoot, err := sameFile("/", process+"root")
	if err != nil {
		return err
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	if !inNamespace {
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNS); err != nil {
			return err
		}
	}
	if !inNamespace || !inRoot {
		if err := errors.Join(unix.Fchdir(dirs[0]), unix.Chroot(".")); err != nil {
			return err
		}
	}
	return unix.Fchdir(dirs[1])
}

func sameFile(x, y string) (bool, error) {
	var at, other unix.Stat_t
	err := errors.Join(unix.Stat(x, &at), unix.Stat(y, &other))
	return at.Dev == other.Dev && at.Ino == other.Ino, err
}

// credentialOfProcess returns the real user and the groups of a process. The effective user of a program with the
// setuid bit differs from its task's user.
func credentialOfProcess(process string) (*syscall.Credential, error) {
	status, err := os.ReadFile(process + "status")
	if err != nil {
		return nil, err
	}
	ids := map[string][]uint32{}
	for line := range strings.Lines(string(status)) {
		name, list, _ := strings.Cut(line, ":")
		if name != "Uid" && name != "Gid" && name != "Groups" {
			continue
		}
		for field := range strings.FieldsSeq(list) {
			id, err := strconv.ParseUint(field, 10, 32)
			if err != nil {
				return nil, err
			}
			ids[name] = append(ids[name], uint32(id))
		}
	}
	if len(ids["Uid"]) == 0 || len(ids["Gid"]) == 0 {
		return nil, fmt.Errorf("%sstatus has no user", process)
	}
	return &syscall.Credential{Uid: ids["Uid"][0], Gid: ids["Gid"][0], Groups: ids["Groups"]}, nil
}
