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
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/control"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/internal/proc"
)

// machine is the directories and processes of one holdfast.
type machine struct {
	dir    string   // short: sockets lie below
	env    []string // more variables of its programs
	agent  *exec.Cmd
	etcd   *exec.Cmd    // of a script; nil: it has none
	output bytes.Buffer // of all agents; not to be read while one runs
	exited chan error
}

// newMachine makes the directories. The caller ends it with sweep.
func newMachine() (*machine, error) {
	dir, err := os.MkdirTemp("", "h-")
	m := &machine{dir: dir}
	for _, sub := range []string{"data", "tmp"} {
		if err == nil {
			err = os.Mkdir(m.path(sub), 0o700)
		}
	}
	return m, err
}

func (m *machine) path(name string) string { return filepath.Join(m.dir, name) }
func (m *machine) state() string           { return m.path("s") }
func (m *machine) run() string             { return m.path("r") }
func (m *machine) socket() string          { return m.path("r/agent.sock") }

// environ is the environment of the machine's programs.
func (m *machine) environ() []string {
	return append([]string{
		"PATH=" + bin + ":" + os.Getenv("PATH"), "TMPDIR=" + m.path("tmp"), "HOLDFAST_ADDR=" + m.socket(),
		"GORACE=atexit_sleep_ms=0", "HOME=/nonexistent",
	}, m.env...)
}

// startAgent starts an agent and returns once it answers.
func (m *machine) startAgent(args ...string) error {
	if m.agent != nil {
		return errors.New("an agent runs already")
	}
	args = append([]string{"agent", "--state-dir", m.state(), "--run-dir", m.run(), "--node", "node-1"}, args...)
	cmd := exec.Command(filepath.Join(bin, "holdfast"), args...)
	cmd.Env = m.environ()
	cmd.Stdout, cmd.Stderr = &m.output, &m.output
	if err := cmd.Start(); err != nil {
		return err
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	m.agent, m.exited = cmd, exited
	var failed error
	err := waitFor(context.Background(), "the agent answers", func() bool {
		select {
		case err := <-exited:
			m.agent = nil
			failed = fmt.Errorf("the agent exited at once: %v\n%s", err, m.output.Bytes())
			return true
		default:
		}
		conn, err := net.Dial("unix", m.socket()) // cheaper than a process
		if err != nil {
			return false
		}
		conn.Close()
		_, err = control.NewClient(m.socket()).Shim(context.Background())
		return err == nil
	})
	return errors.Join(err, failed)
}

// endAgent sends the agent a signal and returns how it exited.
func (m *machine) endAgent(sig unix.Signal) error {
	if m.agent == nil {
		return errors.New("no agent runs")
	}
	if err := m.agent.Process.Signal(sig); err != nil {
		return err
	}
	select {
	case err := <-m.exited:
		m.agent = nil
		return err
	case <-time.After(2 * waitLimit):
		return fmt.Errorf("the agent, process %d, does not exit", m.agent.Process.Pid)
	}
}

// agentOutput is the output of agents that have exited.
func (m *machine) agentOutput() string {
	if m.agent != nil {
		return "(an agent runs)"
	}
	return m.output.String()
}

// leftovers returns what the machine left, except for the two mounts that stay with the state directory.
func (m *machine) leftovers() (found []string) {
	add := func(format string, args ...any) { found = append(found, fmt.Sprintf(format, args...)) }
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(m.dir))
	if err != nil {
		add("%v", err)
	}
	roots := []string{m.run(), filepath.Join(m.state(), "mnt")}
	for _, mount := range mounts {
		if !slices.Contains(roots, mount.Mountpoint) {
			add("mounted: %s (%s)", mount.Mountpoint, mount.FSType)
		}
	}
	for _, dev := range loopDevices(m.dir) {
		add("loop device: %s", dev)
	}
	for _, pid := range m.processes() {
		add("process: %d %s", pid, procText(pid, "cmdline"))
	}
	if len(mounts) > len(roots) {
		return found // the mounts hide what lies on disk
	}
	_ = filepath.WalkDir(m.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				add("%v", err)
			}
			return nil
		}
		rel, _ := filepath.Rel(m.state(), path)
		parts := strings.Split(rel, "/")
		switch {
		case d.Type() == fs.ModeSocket:
			add("socket: %s", path)
		case parts[0] == "mnt" && len(parts) > 3: // mnt/PLUGIN/stage and mnt/PLUGIN/publish stay
			add("directory of a volume: %s", path)
		case filepath.Dir(path) == filepath.Join(m.run(), "t"):
			add("directory of a socket: %s", path)
		}
		return nil
	})
	return found
}

// finalLeftovers gives processes that are exiting some time.
func (m *machine) finalLeftovers() (found []string) {
	_ = waitFor(context.Background(), "", func() bool { found = m.leftovers(); return len(found) == 0 })
	return found
}

// processes are those whose command line or environment names the machine's directory or one of its allocs.
func (m *machine) processes() (found []int) {
	marks := []string{m.dir}
	allocs, _ := os.ReadDir(filepath.Join(m.state(), "agent", "allocs"))
	for _, a := range allocs {
		marks = append(marks, "HOLDFAST_TASK="+a.Name())
	}
	pids, _ := proc.PIDs()
	for _, pid := range pids {
		if pid == os.Getpid() || !alive(pid) {
			continue
		}
		text := procText(pid, "cmdline") + " " + procText(pid, "environ")
		if slices.ContainsFunc(marks, func(mark string) bool { return strings.Contains(text, mark) }) {
			found = append(found, pid)
		}
	}
	return found
}

// loopDevices returns the loop devices whose files lie below a directory.
func loopDevices(dir string) (names []string) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if text, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(text), dir) {
			names = append(names, "/dev/"+strings.Split(f, "/")[3])
		}
	}
	return names
}

// sweep ends and removes everything that is left.
func (m *machine) sweep() error {
	if m.agent != nil {
		_ = m.endAgent(unix.SIGKILL)
	}
	err := waitFor(context.Background(), "all processes are dead", func() bool {
		pids := m.processes()
		for _, pid := range pids {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		return len(pids) == 0
	})
	if m.etcd != nil {
		_ = m.etcd.Wait()
	}
	mounts, failed := mountinfo.GetMounts(mountinfo.PrefixFilter(m.dir))
	if err := errors.Join(err, failed); err != nil {
		return err
	}
	for _, mount := range slices.Backward(mounts) {
		if err := unmountPath(context.Background(), mount.Mountpoint); err != nil {
			return err
		}
	}
	for _, dev := range loopDevices(m.dir) {
		if out, err := exec.Command("losetup", "-d", dev).CombinedOutput(); err != nil {
			return fmt.Errorf("detach %s: %w: %s", dev, err, out)
		}
	}
	return os.RemoveAll(m.dir)
}

// shimsOf returns the processes that execute a stored shim of the state directory, without helper processes.
func shimsOf(state string) (found []int) {
	store := filepath.Join(state, "shims") + "/"
	pids, _ := proc.PIDs()
	for _, pid := range pids {
		program, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
		if strings.HasPrefix(program, store) && alive(pid) && !strings.Contains(procText(pid, "cmdline"), "-look") {
			found = append(found, pid)
		}
	}
	return found
}

// writers returns the shims that hold a lock on a file of the state directory, as the kernel says.
func (m *machine) writers() (found []int) {
	for _, pid := range shimsOf(m.state()) {
		for _, file := range openFiles(pid) {
			if strings.HasPrefix(file, m.state()+"/") && slices.Contains(proc.FlockHolders(file), pid) {
				found = append(found, pid)
				break
			}
		}
	}
	return found
}

// agentEnv is an agent that runs a scripted plugin.
type agentEnv struct {
	*machine
	t      *testing.T
	client *control.Client
	strict bool // the journal may have no call beside one that a dead shim left at the plugin
	byNode bool // other nodes have the same journal
}

// newAgentEnv starts an agent. When the test ends, nothing may be left and the journal must be legal.
func newAgentEnv(t *testing.T, args ...string) *agentEnv {
	t.Helper()
	return newAgentEnvWith(t, nil, args...)
}

// newAgentEnvWith is newAgentEnv with more variables of the environment.
func newAgentEnvWith(t *testing.T, env []string, args ...string) *agentEnv {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	t.Parallel()
	return newAgentNode(t, env, args...)
}

// newAgentNode is newAgentEnvWith for a test with several nodes.
func newAgentNode(t *testing.T, env []string, args ...string) *agentEnv {
	t.Helper()
	m, err := newMachine()
	if err != nil {
		t.Fatal(err)
	}
	m.env = env
	a := &agentEnv{machine: m, t: t, client: control.NewClient(m.socket())}
	t.Cleanup(a.close)
	a.must(a.startAgent(args...))
	return a
}

func (a *agentEnv) close() {
	if !a.t.Failed() {
		a.must(a.endAgent(unix.SIGTERM))
		for _, what := range a.finalLeftovers() {
			a.t.Error("left behind:", what)
		}
		violations := csifake.Check(a.path("journal"),
			journal.Options{Settled: true, Strict: a.strict, ByNode: a.byNode})
		for _, v := range violations {
			a.t.Errorf("journal: %s", v)
		}
		if lines, err := journal.Read(a.path("journal")); err == nil {
			logViolations(a.t, lines, violations)
		}
	}
	if a.t.Failed() {
		if a.agent != nil {
			_ = a.endAgent(unix.SIGKILL)
		}
		a.t.Log(a.agentOutput())
		_ = printCalls(a.t.Output(), a.path("journal"))
	}
	if err := a.sweep(); err != nil {
		a.t.Error(err)
	}
}

func (a *agentEnv) must(err error) {
	a.t.Helper()
	if err != nil {
		a.t.Fatal(err)
	}
}

func (a *agentEnv) ctx() context.Context { return context.WithoutCancel(a.t.Context()) }

func (a *agentEnv) waitUntil(what string, done func() bool) {
	a.t.Helper()
	a.must(waitFor(a.ctx(), what, done))
}

// result waits for the result of a background call.
func (a *agentEnv) result(what string, done <-chan error) error {
	a.t.Helper()
	return (&env{t: a.t}).result(what, done)
}

// hclFile is a file of testdata/hcl with replacements and the values of its variables.
func (a *agentEnv) hclFile(name string, replace ...string) (control.Submission, error) {
	text, err := os.ReadFile(filepath.Join("testdata/hcl", name))
	for i := 0; i < len(replace); i += 2 {
		if err == nil && !bytes.Contains(text, []byte(replace[i])) {
			err = fmt.Errorf("%s has no %q", name, replace[i])
		}
	}
	src := control.Submission{Name: name, Text: []byte(strings.NewReplacer(replace...).Replace(string(text)))}
	src.Variables = map[string]string{}
	if name == "fake.hcl" {
		src.Variables = map[string]string{"d": a.dir, "csifake": filepath.Join(bin, "csifake"), "attempts": "20"}
	}
	return src, err
}

// jobWith is a job of testdata/hcl with values of its variables, each as NAME=VALUE.
func (a *agentEnv) jobWith(name string, variables ...string) control.Submission {
	a.t.Helper()
	src, err := a.hclFile(name)
	a.must(err)
	for _, v := range variables {
		name, value, _ := strings.Cut(v, "=")
		src.Variables[name] = value
	}
	return src
}

// retry repeats a request, as an operator would, while no agent answers or the request is not possible yet.
func (a *agentEnv) retry(what string, do func() error) error {
	var last error
	err := waitFor(a.ctx(), what, func() bool { last = do(); return last == nil })
	return errors.Join(err, last)
}

// submit submits a job.
func (a *agentEnv) submit(src control.Submission) error {
	return errOf(a.client.RunJob(a.ctx(), src, agent.SubmitOptions{}))
}

// runJob submits a job and waits until its task runs.
func (a *agentEnv) runJob(name string, replace ...string) error {
	src, err := a.hclFile(name, replace...)
	if err != nil {
		return err
	}
	return a.runSubmission(src)
}

func (a *agentEnv) runSubmission(src control.Submission) error {
	var id string
	err := a.retry("run "+src.Name, func() error {
		job, err := a.client.RunJob(a.ctx(), src, agent.SubmitOptions{})
		id = job.ID
		return err
	})
	if err != nil {
		return err
	}
	return waitFor(a.ctx(), "job "+id+" runs", func() bool { return a.pid(id) != 0 })
}

// create creates a volume of the scripted plugin.
func (a *agentEnv) create(id string) error {
	src, err := a.hclFile("disk.volume.hcl", `"disk"`, fmt.Sprintf("%q", id))
	if err != nil {
		return err
	}
	return a.retry("create "+id, func() error { return errOf(a.client.CreateVolume(a.ctx(), src)) })
}

func (a *agentEnv) delete(id string) error {
	return a.retry("delete "+id, func() error {
		err := a.client.DeleteVolume(a.ctx(), volumeName(id))
		if errors.Is(err, host.ErrNotFound) {
			return nil // deleted by an earlier try, whose answer was lost
		}
		return err
	})
}

// stopJob stops and removes a job, and waits until nothing of it is left.
func (a *agentEnv) stopJob(id string) error {
	err := a.retry("stop "+id, func() error {
		err := a.client.StopJob(a.ctx(), id, agent.StopOptions{Purge: true})
		if errors.Is(err, host.ErrNotFound) {
			return nil
		}
		return err
	})
	return errors.Join(err, waitFor(a.ctx(), id+" is gone", func() bool {
		all, err := a.client.Allocs(a.ctx())
		return err == nil && !slices.ContainsFunc(all, func(alloc control.Alloc) bool { return alloc.Job == id })
	}))
}

// alloc returns the newest alloc of the job.
func (a *agentEnv) alloc(job string) control.Alloc {
	all, err := a.client.Allocs(a.ctx())
	if err != nil {
		return control.Alloc{}
	}
	for _, alloc := range slices.Backward(all) {
		if alloc.Job == job {
			return alloc
		}
	}
	return control.Alloc{}
}

// pid returns the process of the job's task, 0 if none runs.
func (a *agentEnv) pid(job string) int {
	if alloc := a.alloc(job); len(alloc.Tasks) == 1 {
		return alloc.Tasks[0].PID
	}
	return 0
}

// waitNewTask waits until the job's task is another process.
func (a *agentEnv) waitNewTask(job string, old int) {
	a.t.Helper()
	a.waitUntil(job+" has been started again", func() bool { now := a.pid(job); return now != 0 && now != old })
}

// runBatch runs the job batch on a volume until it is complete, and removes it.
func (a *agentEnv) runBatch(volume, finish string) error {
	if err := a.runJob("batch.hcl", `source          = "disk"`, fmt.Sprintf("source = %q", volume), "FINISH",
		finish); err != nil {
		return err
	}
	if err := os.WriteFile(finish, nil, 0o600); err != nil {
		return err
	}
	err := waitFor(a.ctx(), "the job batch is complete", func() bool { return a.alloc("batch").State == "complete" })
	if err != nil {
		return fmt.Errorf("%w; it is %+v", err, a.alloc("batch"))
	}
	return a.stopJob("batch")
}

// scenario is the whole life of the volume "disk", with a job that uses it.
func (a *agentEnv) scenario() error {
	if err := a.create("disk"); err != nil {
		return err
	}
	return errors.Join(a.runBatch("disk", a.path("finish")), a.delete("disk"))
}

// startBystander starts the plugin, and a job whose volume no test touches.
func (a *agentEnv) startBystander() {
	a.t.Helper()
	a.must(a.runJob("fake.hcl"))
	a.must(a.create("kept"))
	a.must(a.runSubmission(a.jobWith("user.hcl", "volume=kept")))
}

// stopBystander takes down what startBystander started.
func (a *agentEnv) stopBystander() {
	a.t.Helper()
	a.must(a.stopJob("user"))
	a.must(a.delete("kept"))
	a.must(a.stopJob("fake"))
}

// snapshot is what a swap or an agent's restart must not change.
type snapshot struct {
	tasks  string // pid and start time of each task
	mounts string // of the host and of each task's namespace
	calls  string // mutating calls
}

func (a *agentEnv) snapshot(jobs ...string) (s snapshot) {
	a.t.Helper()
	s.mounts = mountLines(a.t, "self", a.dir)
	for _, job := range jobs {
		alloc := a.alloc(job)
		if len(alloc.Tasks) != 1 {
			a.t.Fatalf("%s has the tasks %+v", job, alloc.Tasks)
		}
		task := alloc.Tasks[0]
		stat, err := proc.ReadStat(task.PID)
		a.must(err)
		s.tasks += fmt.Sprintf("%s: attempt %d, process %d, started at %v\n", job, task.Attempt, task.PID, stat.Start)
		s.mounts += job + "\n" + mountLines(a.t, fmt.Sprint(task.PID), a.dir)
	}
	calls, err := csifake.Calls(a.path("journal"), everyCall...)
	a.must(err)
	s.calls = strings.Join(answers(calls), "\n")
	return s
}

// volumeFile returns a file that begins with a text from the storage of any volume.
func (a *agentEnv) volumeFile(name, begin string) string {
	a.t.Helper()
	found, err := filepath.Glob(a.path(filepath.Join("data", "*", name)))
	a.must(err)
	for _, path := range found {
		if text, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(text), begin) {
			return string(text)
		}
	}
	return ""
}

// holdfast runs the program with arguments.
func (a *agentEnv) holdfast(args ...string) (output string, err error) {
	cmd := exec.CommandContext(a.ctx(), filepath.Join(bin, "holdfast"), args...)
	cmd.Env = a.environ()
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// wantOutput fails the test unless the command succeeds, or fails, as wanted and prints all words.
func (a *agentEnv) wantOutput(success bool, words []string, args ...string) {
	a.t.Helper()
	output, err := a.holdfast(args...)
	if (err == nil) != success {
		a.t.Fatalf("holdfast %s: %v\n%s", strings.Join(args, " "), err, output)
	}
	for _, word := range words {
		if !strings.Contains(output, word) {
			a.t.Errorf("holdfast %s does not print %q:\n%s", strings.Join(args, " "), word, output)
		}
	}
}

// TestWhatIsLeftIsFound is a negative control of leftovers and sweep.
func TestWhatIsLeftIsFound(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	t.Parallel()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	m, err := newMachine()
	must(err)
	target := filepath.Join(m.state(), "mnt/plugin/publish/alloc/v")
	socketDir := filepath.Join(m.run(), "t/task")
	must(errors.Join(os.MkdirAll(target, 0o700), os.MkdirAll(socketDir, 0o700)))
	want := func(text string) {
		t.Helper()
		if all := strings.Join(m.leftovers(), "\n"); !strings.Contains(all, text) {
			t.Errorf("%s is not found: %q", text, all)
		}
	}
	want("directory of a volume: " + target)
	want("directory of a socket: " + socketDir)
	socket, err := net.Listen("unix", filepath.Join(socketDir, "csi.sock"))
	must(err)
	defer socket.Close()
	want("socket: " + socketDir)
	sleeper := exec.Command("sleep", "600")
	sleeper.Env = []string{"MARK=" + m.dir}
	must(sleeper.Start())
	go func() { _ = sleeper.Wait() }()
	want("process: ")
	must(unix.Mount("leak", target, "tmpfs", 0, "size=64k"))
	want("mounted: " + target)
	image := m.path("data/image")
	must(errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 1<<20)))
	if out, err := exec.Command("losetup", "-f", image).CombinedOutput(); err != nil {
		t.Logf("no loop devices here: %v: %s", err, out)
	} else {
		want("loop device: ")
	}
	must(m.sweep())
	if all := m.leftovers(); len(all) > 0 {
		t.Errorf("left after sweep: %q", all)
	}
}
