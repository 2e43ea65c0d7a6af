package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

// station is an agent on a machine of its own, which runs a scripted plugin.
type station struct {
	*machine
	t      *testing.T
	client *control.Client
	strict bool // also beside what a dead shim has left at a plugin no other call may be made
}

// newStation starts an agent. At the test's end nothing may be left on the real machine, and the plugin's journal must be legal.
func newStation(t *testing.T, args ...string) *station {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	t.Parallel()
	return startStation(t, args...)
}

// startStation starts an agent; args are more arguments of it.
func startStation(t *testing.T, args ...string) *station {
	t.Helper()
	m, err := newMachine()
	if err != nil {
		t.Fatal(err)
	}
	s := &station{machine: m, t: t, client: control.NewClient(m.socket())}
	t.Cleanup(s.leave)
	s.must(s.start(args...))
	return s
}

func (s *station) leave() {
	if !s.t.Failed() {
		s.must(s.end(unix.SIGTERM))
		for _, what := range s.eventuallyLeft() {
			s.t.Error("left behind:", what)
		}
		for _, v := range csifake.Check(s.path("journal"), journal.Options{Settled: true, Strict: s.strict}) {
			s.t.Errorf("journal: %s", v)
			s.before(v)
		}
	}
	if s.t.Failed() && s.agent != nil {
		_ = s.end(unix.SIGKILL)
	}
	if s.t.Failed() {
		s.t.Log(s.said())
		_ = tellCalls(s.t.Output(), s.path("journal"))
	}
	if err := s.sweep(); err != nil {
		s.t.Error(err)
	}
}

// before logs what the journal has of the violation's volume shortly before it: who called what, and who has gone.
func (s *station) before(v journal.Violation) {
	lines, err := journal.Read(s.path("journal"))
	if err != nil || v.Line == 0 {
		return
	}
	for i, l := range lines[max(0, v.Line-40):v.Line] {
		if l.Volume == lines[v.Line-1].Volume {
			s.t.Logf("line %d: %s %s call %d of %d, request %.8s, beside %v: %s", max(0, v.Line-40)+i+1, l.Kind, l.RPC, l.Call, l.Peer, l.Hash, l.Beside, l.Code)
		}
	}
}

func (s *station) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *station) ctx() context.Context { return context.WithoutCancel(s.t.Context()) }

// wait returns when it is so.
func (s *station) wait(what string, so func() bool) {
	s.t.Helper()
	s.must(until(s.ctx(), what, so))
}

// file is a text of testdata/hcl with the values of its variables.
func (s *station) file(name string, replace ...string) (control.Submission, error) {
	text, err := os.ReadFile(filepath.Join("testdata/hcl", name))
	src := control.Submission{Name: name, Text: []byte(strings.NewReplacer(replace...).Replace(string(text)))}
	if name == "fake.hcl" {
		src.Variables = map[string]string{"d": s.dir, "csifake": filepath.Join(bin, "csifake")}
	}
	return src, err
}

// submit runs a job, and waits until its task runs.
func (s *station) submit(name string, replace ...string) error {
	src, err := s.file(name, replace...)
	if err != nil {
		return err
	}
	var id string
	err = s.insist("run "+name, func() error {
		job, err := s.client.RunJob(s.ctx(), src, false)
		id = job.ID
		return err
	})
	if err != nil {
		return err
	}
	return until(s.ctx(), "job "+id+" runs", func() bool { return s.pid(id) != 0 })
}

// create makes a volume of the scripted plugin.
func (s *station) create(id string) error {
	src, err := s.file("disk.volume.hcl", `"disk"`, fmt.Sprintf("%q", id))
	if err != nil {
		return err
	}
	return s.insist("create "+id, func() error {
		_, err := s.client.CreateVolume(s.ctx(), src)
		return err
	})
}

func (s *station) delete(id string) error {
	return s.insist("delete "+id, func() error {
		err := s.client.DeleteVolume(s.ctx(), host.VolumeName{Namespace: "default", ID: host.VolumeID(id)})
		if errors.Is(err, host.ErrNotFound) {
			return nil // an earlier try, whose answer was lost
		}
		return err
	})
}

// insist does what a person would: it asks again while no agent answers or what is asked for is not possible yet.
func (s *station) insist(what string, do func() error) error {
	var last error
	err := until(s.ctx(), what, func() bool { last = do(); return last == nil })
	return errors.Join(err, last)
}

// stop has a job end and be forgotten, and waits until nothing of it is there.
func (s *station) stop(id string) error {
	err := s.insist("stop "+id, func() error {
		err := s.client.StopJob(s.ctx(), id, true, false)
		if errors.Is(err, host.ErrNotFound) {
			return nil
		}
		return err
	})
	return errors.Join(err, until(s.ctx(), id+" is gone", func() bool {
		all, err := s.client.Allocs(s.ctx())
		return err == nil && !slices.ContainsFunc(all, func(a control.Alloc) bool { return a.Job == id })
	}))
}

// alloc is the newest of the job.
func (s *station) alloc(job string) control.Alloc {
	all, err := s.client.Allocs(s.ctx())
	if err != nil {
		return control.Alloc{}
	}
	slices.Reverse(all)
	if i := slices.IndexFunc(all, func(a control.Alloc) bool { return a.Job == job }); i >= 0 {
		return all[i]
	}
	return control.Alloc{}
}

// pid is the process of the job's one task.
func (s *station) pid(job string) int {
	if a := s.alloc(job); len(a.Tasks) == 1 {
		return a.Tasks[0].PID
	}
	return 0
}

// hold has the plugin stop in the middle of a call for the volume "disk", once, before or after its effect, until it may go on.
func (s *station) hold(rpc, when string) {
	volume := string(csifake.VolumeID("disk"))
	if !journal.Mutates(rpc) || rpc == "CreateVolume" {
		volume = ""
	}
	rule := fmt.Sprintf(`[{"rpc": %q, "volume": %q, "times": 1, "when": %q, "until": %q}]`, rpc, volume, when, s.path("go"))
	s.must(os.WriteFile(s.path("script"), []byte(rule), 0o600))
}

func (s *station) goOn() { s.must(os.WriteFile(s.path("go"), nil, 0o600)) }

// inTheMiddle returns when the plugin has begun such a call and not answered it.
func (s *station) inTheMiddle(rpc, when string, done <-chan error) {
	s.t.Helper()
	backend := csifake.NewBackend(s.path("backend"))
	s.wait("the plugin is in the middle of "+rpc, func() bool {
		select {
		case err := <-done:
			s.t.Fatalf("%s was never called: %v", rpc, err)
		default:
		}
		calls, err := csifake.Calls(s.path("journal"), rpc)
		if err != nil || len(calls) == 0 || calls[len(calls)-1].End != nil {
			return false
		}
		return when == "before" || rpc == "GetPluginInfo" || s.effective(backend, rpc)
	})
}

// effective says whether the backend has the effect of a call for "disk".
func (s *station) effective(b *csifake.Backend, rpc string) bool {
	all, err := b.Volumes()
	if err != nil {
		return false
	}
	v, there := all[csifake.VolumeID("disk")]
	switch rpc {
	case "CreateVolume":
		return there
	case "DeleteVolume":
		return !there
	case "ControllerPublishVolume":
		return len(v.Attached) > 0
	case "ControllerUnpublishVolume":
		return len(v.Attached) == 0
	case "NodeStageVolume":
		return len(v.Staged) > 0
	case "NodeUnstageVolume":
		return len(v.Staged) == 0
	case "NodePublishVolume":
		return len(v.Published) > 0
	case "NodeUnpublishVolume":
		return len(v.Published) == 0
	}
	return true
}

// story is a volume's whole life, with a job that uses it and ends.
func (s *station) story() error {
	if err := s.create("disk"); err != nil {
		return err
	}
	if err := s.submit("batch.hcl", "FINISH", s.path("finish")); err != nil {
		return err
	}
	if err := os.WriteFile(s.path("finish"), nil, 0o600); err != nil {
		return err
	}
	err := until(s.ctx(), "the job batch is complete", func() bool { return s.alloc("batch").State == "complete" })
	if err != nil {
		return fmt.Errorf("%w; it is %+v", err, s.alloc("batch"))
	}
	return errors.Join(s.stop("batch"), s.delete("disk"))
}

// bystand starts the plugin, and a job whose volume nobody is going to touch.
func (s *station) bystand() {
	s.t.Helper()
	s.must(s.submit("fake.hcl"))
	s.must(s.create("kept"))
	s.must(s.submit("user.hcl", "source          = \"disk\"", "source          = \"kept\""))
}

// settle takes down what bystand has set up.
func (s *station) settle() {
	s.t.Helper()
	s.must(s.stop("user"))
	s.must(s.delete("kept"))
	s.must(s.stop("fake"))
}

var everyCall = []string{
	"CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume",
	"NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume",
}

// middle is a story during which someone is killed in the middle of a call.
func middle(t *testing.T, rpc, when string, kill func(*station)) {
	t.Run(rpc+"/"+when, func(t *testing.T) {
		s := newStation(t)
		s.bystand()
		s.hold(rpc, when)
		done := make(chan error, 1)
		go func() { done <- s.story() }()
		s.inTheMiddle(rpc, when, done)
		kill(s)
		s.goOn()
		s.must(<-done)
		s.settle()
	})
}

// killAgent kills it with no chance to say anything, and starts the next one once its shim has gone too.
func killAgent(s *station) {
	plugin, user := s.pid("fake"), s.pid("user")
	_ = s.end(unix.SIGKILL)
	s.must(s.start())
	if s.pid("fake") != plugin || s.pid("user") != user || !alive(plugin) || !alive(user) {
		s.t.Errorf("plugin and user were processes %d and %d, and are %d and %d", plugin, user, s.pid("fake"), s.pid("user"))
	}
}

// The agent is killed in the middle of each call, before and after its effect. The next one adopts the tasks, and the job goes on.
func TestAgentKilledInTheMiddle(t *testing.T) {
	slow(t)
	for _, rpc := range everyCall {
		for _, when := range []string{"before", "after"} {
			middle(t, rpc, when, killAgent)
		}
	}
}

// The plugin's task is killed in the middle of a call: it is started again under its restart policy, and the call goes on there.
func TestPluginTaskKilledInTheMiddle(t *testing.T) {
	slow(t)
	for _, rpc := range []string{"NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"} {
		middle(t, rpc, "after", func(s *station) {
			plugin := s.pid("fake")
			s.must(unix.Kill(plugin, unix.SIGKILL))
			s.wait("the plugin's next attempt", func() bool { now := s.pid("fake"); return now != 0 && now != plugin })
		})
	}
}

// Agent, shim and plugin are killed together, as by a machine that runs out of memory. What was mounted is taken up and taken down.
func TestAllKilledInTheMiddle(t *testing.T) {
	slow(t)
	for rpc, when := range map[string]string{"NodeStageVolume": "after", "NodePublishVolume": "after", "NodeUnpublishVolume": "before", "NodeUnstageVolume": "after"} {
		middle(t, rpc, when, func(s *station) {
			shim, err := s.client.Shim(s.ctx())
			s.must(err)
			plugin, user := s.pid("fake"), s.pid("user")
			for _, pid := range []int{shim.PID, plugin} {
				s.must(unix.Kill(pid, unix.SIGKILL))
			}
			_ = s.end(unix.SIGKILL)
			s.must(s.start())
			if s.pid("user") != user || !alive(user) {
				s.t.Errorf("the user was process %d, and is %d", user, s.pid("user"))
			}
			s.wait("the plugin's next attempt", func() bool { now := s.pid("fake"); return now != 0 && now != plugin })
		})
	}
}

// A task ends while nobody is there to see it. The next agent learns how, gives its volume back, and starts a plugin that died meanwhile.
func TestTasksEndWhileNoAgentRuns(t *testing.T) {
	s := newStation(t)
	s.bystand()
	s.must(s.create("disk"))
	s.must(s.submit("batch.hcl", "FINISH", s.path("finish")))
	batch, plugin, user := s.pid("batch"), s.pid("fake"), s.pid("user")
	shim, err := s.client.Shim(s.ctx())
	s.must(err)
	_ = s.end(unix.SIGKILL)
	s.wait("the shim ends with its host", func() bool { return !alive(shim.PID) })
	s.must(os.WriteFile(s.path("finish"), nil, 0o600))
	s.must(unix.Kill(plugin, unix.SIGKILL))
	s.wait("the tasks have ended", func() bool { return !alive(batch) && !alive(plugin) })
	s.must(s.start())
	s.wait("the job batch is complete", func() bool { return s.alloc("batch").State == "complete" })
	if code := s.alloc("batch").Tasks[0].ExitCode; code == nil || *code != 0 {
		t.Errorf("the task's exit code is %v", code)
	}
	if a := s.alloc("fake"); a.Tasks[0].Attempt != 2 {
		t.Errorf("the plugin's task is at attempt %d", a.Tasks[0].Attempt)
	}
	if s.pid("user") != user || !alive(user) {
		t.Errorf("the user was process %d, and is %d", user, s.pid("user"))
	}
	s.must(s.stop("batch"))
	s.must(s.delete("disk"))
	s.settle()
}
