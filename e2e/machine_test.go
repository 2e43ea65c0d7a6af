package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// machine is a place of its own for one holdfast: its directories, the agent's process, and whatever they may leave behind.
type machine struct {
	dir    string // short: sockets lie below
	agent  *exec.Cmd
	output bytes.Buffer // of all agents; to be read when none runs
	ended  chan error
}

// newMachine makes the place. Whoever made it ends it with sweep.
func newMachine() (*machine, error) {
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		return nil, err
	}
	m := &machine{dir: dir}
	for _, sub := range []string{"data", "tmp"} {
		if err := os.Mkdir(m.path(sub), 0o700); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *machine) path(name string) string { return filepath.Join(m.dir, name) }
func (m *machine) state() string           { return m.path("s") }
func (m *machine) run() string             { return m.path("r") }
func (m *machine) socket() string          { return m.path("r/agent.sock") }

// environ is what programs of this machine see.
func (m *machine) environ() []string {
	return []string{
		"PATH=" + bin + ":" + os.Getenv("PATH"), "TMPDIR=" + m.path("tmp"), "HOLDFAST_ADDR=" + m.socket(), "GORACE=atexit_sleep_ms=0", "HOME=/nonexistent",
	}
}

// start starts an agent and returns when it answers.
func (m *machine) start(args ...string) error {
	if m.agent != nil {
		return errors.New("an agent runs already")
	}
	m.agent = exec.Command(filepath.Join(bin, "holdfast"), append([]string{"agent", "--state-dir", m.state(), "--run-dir", m.run(), "--node", "node-1"}, args...)...)
	m.agent.Env = m.environ()
	m.agent.Stdout, m.agent.Stderr = &m.output, &m.output
	if err := m.agent.Start(); err != nil {
		m.agent = nil
		return err
	}
	m.ended = make(chan error, 1)
	go func(cmd *exec.Cmd, ended chan<- error) { ended <- cmd.Wait() }(m.agent, m.ended)
	for limit := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if m.listens() && exec.Command(filepath.Join(bin, "holdfast"), "--address", m.socket(), "shim", "status").Run() == nil {
			return nil
		}
		select {
		case err := <-m.ended:
			m.agent = nil
			return fmt.Errorf("the agent ends at once: %v\n%s", err, m.output.Bytes())
		default:
		}
		if time.Now().After(limit) {
			return fmt.Errorf("the agent does not answer")
		}
	}
}

// listens says whether somebody takes calls at the control socket: to ask that costs no process.
func (m *machine) listens() bool {
	c, err := net.Dial("unix", m.socket())
	if err != nil {
		return false
	}
	return c.Close() == nil
}

// end sends the agent a signal and returns, when it is gone, how it ended.
func (m *machine) end(sig unix.Signal) error {
	if m.agent == nil {
		return errors.New("no agent runs")
	}
	pid := m.agent.Process.Pid
	if err := unix.Kill(pid, sig); err != nil {
		return err
	}
	select {
	case err := <-m.ended:
		m.agent = nil
		return err
	case <-time.After(2 * patience):
		return fmt.Errorf("the agent, process %d, does not end", pid)
	}
}

// left says what of this machine is left on the real one, but for the two mounts of the state directory itself, which stay as long as it does.
func (m *machine) left() (found []string) {
	say := func(format string, args ...any) { found = append(found, fmt.Sprintf(format, args...)) }
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(m.dir))
	if err != nil {
		say("%v", err)
	}
	roots := []string{m.run(), filepath.Join(m.state(), "mnt")}
	for _, at := range mounts {
		if !slices.Contains(roots, at.Mountpoint) {
			say("mounted: %s (%s)", at.Mountpoint, at.FSType)
		}
	}
	for _, dev := range loopDevices(m.dir) {
		say("loop device: %s", dev)
	}
	for _, pid := range m.processes() {
		say("process: %d %s", pid, proc(pid, "cmdline"))
	}
	if len(mounts) > len(roots) {
		return found // what lies on disk is hidden
	}
	_ = filepath.WalkDir(m.dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				say("%v", err)
			}
			return nil
		}
		rel, _ := filepath.Rel(m.state(), path)
		parts := strings.Split(rel, "/")
		switch {
		case e.Type() == fs.ModeSocket:
			say("socket: %s", path)
		case parts[0] == "mnt" && len(parts) > 3: // mnt/PLUGIN/stage and mnt/PLUGIN/publish stay as long as the state directory
			say("directory of a volume: %s", path)
		case filepath.Dir(path) == filepath.Join(m.run(), "t"):
			say("directory of a socket: %s", path)
		}
		return nil
	})
	return found
}

// processes are those that name this machine's directory or one of its allocs.
func (m *machine) processes() (pids []int) {
	marks := []string{m.dir}
	allocs, _ := os.ReadDir(filepath.Join(m.state(), "agent", "allocs"))
	for _, a := range allocs {
		marks = append(marks, "HOLDFAST_TASK="+a.Name())
	}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() || !alive(pid) {
			continue
		}
		text := proc(pid, "cmdline") + " " + proc(pid, "environ")
		if slices.ContainsFunc(marks, func(mark string) bool { return strings.Contains(text, mark) }) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func proc(pid int, file string) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	return strings.ReplaceAll(string(text), "\x00", " ")
}

// alive says whether the process is there and is more than an entry in a table.
func alive(pid int) bool {
	stat := proc(pid, "stat")
	at := strings.LastIndexByte(stat, ')')
	return at > 0 && !strings.HasPrefix(stat[at:], ") Z") && !strings.HasPrefix(stat[at:], ") X")
}

func loopDevices(below string) (names []string) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if text, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(text), below) {
			names = append(names, "/dev/"+strings.Split(f, "/")[3])
		}
	}
	return names
}

// eventuallyLeft is what is left when a moment has been given to processes that are on their way out.
func (m *machine) eventuallyLeft() []string {
	for limit := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if found := m.left(); len(found) == 0 || time.Now().After(limit) {
			return found
		}
	}
}

// sweep ends and removes whatever is left.
func (m *machine) sweep() error {
	if m.agent != nil {
		_ = m.end(unix.SIGKILL)
	}
	for range 20 {
		pids := m.processes()
		if len(pids) == 0 {
			break
		}
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		time.Sleep(50 * time.Millisecond)
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(m.dir))
	if err != nil {
		return err
	}
	slices.Reverse(mounts)
	for _, at := range mounts {
		if err := unix.Unmount(at.Mountpoint, unix.UMOUNT_NOFOLLOW); err != nil {
			return fmt.Errorf("unmount %s: %w", at.Mountpoint, err)
		}
	}
	for _, dev := range loopDevices(m.dir) {
		if out, err := exec.Command("losetup", "-d", dev).CombinedOutput(); err != nil {
			return fmt.Errorf("detach %s: %w: %s", dev, err, out)
		}
	}
	return os.RemoveAll(m.dir)
}

// until calls ok until it says so; the error says what was waited for.
func until(ctx context.Context, what string, ok func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for !ok() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("waited in vain for: %s", what)
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}

// said is what agents that have ended have said.
func (m *machine) said() string {
	if m.agent != nil {
		return "(an agent runs)"
	}
	return m.output.String()
}
