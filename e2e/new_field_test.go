package e2e

import (
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/host/agent"
)

// programOf returns a process and the digest of the program that it runs.
func (s *agentEnv) programOf(pid int) string {
	s.t.Helper()
	program, err := os.Open(fmt.Sprintf("/proc/%d/exe", pid))
	s.must(err)
	defer program.Close()
	sum := sha256.New()
	_, err = io.Copy(sum, program)
	s.must(err)
	return fmt.Sprintf("%d %x", pid, sum.Sum(nil))
}

// scratch returns what the process's environment says of a scratch directory, and the source of the mount there.
func (s *agentEnv) scratch(pid int) (env, from string) {
	s.t.Helper()
	variables := strings.Fields(procText(pid, "environ"))
	if at := slices.IndexFunc(variables, func(v string) bool {
		return strings.HasPrefix(v, "HOLDFAST_SCRATCH_DIR=")
	}); at >= 0 {
		env = variables[at]
	}
	for line := range strings.Lines(procText(pid, "mountinfo")) {
		if f := strings.Fields(line); f[4] == "/scratch" { // ID PARENT MAJOR:MINOR ROOT POINT
			from = f[3]
		}
	}
	return env, from
}

// withScratch checks that the job's task has its scratch directory on this machine's disk. It returns the task's
// process.
func (s *agentEnv) withScratch(job string) int {
	s.t.Helper()
	pid := s.pid(job)
	env, from := s.scratch(pid)
	if env != "HOLDFAST_SCRATCH_DIR=/scratch" || !strings.HasSuffix(from, "/scratch") {
		s.t.Fatalf("process %d has %q in its environment, and at /scratch is %q", pid, env, from)
	}
	s.must(os.WriteFile(fmt.Sprintf("/proc/%d/root/scratch/f", pid), []byte("x"), 0o600))
	found, err := filepath.Glob(filepath.Join(s.run(), "t", "*", "scratch", "f"))
	s.must(err)
	if len(found) != 1 || !strings.HasSuffix(found[0], from[strings.Index(from, "/t/"):]+"/f") {
		s.t.Errorf("what was written lies at %q; the mount is of %s", found, from)
	}
	return pid
}

// A new attribute of a job file, with a mount and a variable for the task, comes with the shim alone: neither the agent
// nor the job file changes. While a task has what only the new shim knows, a swap to the old one is refused, and the
// task is never started without it.
func TestSwapAddsAField(t *testing.T) {
	slow(t)
	s := newAgentEnv(t, "--shim-swap-budget", waitLimit.String())
	now, next := releases()
	was := s.programOf(s.agent.Process.Pid)
	text, err := os.ReadFile("testdata/hcl/fake.hcl")
	s.must(err)
	text = []byte(strings.Replace(string(text), `= "monolith"`, "= \"monolith\"\n        scratch_dir    = \"/scratch\"",
		1))
	job := s.path("scratch.hcl")
	s.must(os.WriteFile(job, text, 0o600))
	vars := []string{"--var", "d=" + s.dir, "--var", "csifake=" + filepath.Join(bin, "csifake"), job}
	run, unknown := append([]string{"job", "run"}, vars...), []string{`csi_plugin has no attribute "scratch_dir"`,
		"known here: "}

	s.wantOutput(false, unknown, append([]string{"validate"}, vars...)...)
	s.wantOutput(false, unknown, run...)
	if all, err := s.client.Allocs(s.ctx()); err != nil || len(all) != 0 {
		t.Errorf("of a job that was refused there is %+v, %v", all, err)
	}
	s.wantOutput(true, nil, "shim", "swap", next.binary.Path)
	s.wantOutput(true, []string{"valid job file"}, append([]string{"validate", "--shim", next.binary.Path}, vars...)...)
	s.wantOutput(true, nil, run...)
	s.waitUntil("the job runs", func() bool { return s.pid("fake") != 0 })
	pid := s.withScratch("fake")
	s.must(s.create("disk")) // the plugin serves

	s.wantOutput(false, []string{"prepare", "/fake", "could not restart task", "stop its job"}, "shim", "swap",
		now.binary.Path)
	s.must(unix.Kill(pid, unix.SIGKILL))
	s.waitUntil("the task is started again", func() bool {
		another := s.pid("fake")
		return another != 0 && another != pid
	})
	s.withScratch("fake")

	if is := s.programOf(s.agent.Process.Pid); is != was {
		t.Errorf("the agent was process and program %s, and is %s", was, is)
	}
	s.must(s.delete("disk"))
	s.must(s.stopJob("fake"))
	s.wantOutput(true, nil, "shim", "swap", now.binary.Path)
	s.wantOutput(false, unknown, run...)
	plain, err := s.hclFile("fake.hcl")
	s.must(err)
	s.must(s.retry("run without the field", func() error {
		_, err := s.client.RunJob(s.ctx(), plain, agent.SubmitOptions{})
		return err
	}))
	s.waitUntil("the job runs", func() bool { return s.pid("fake") != 0 })
	if env, from := s.scratch(s.pid("fake")); env != "" || from != "" {
		t.Errorf("without the field a task has %q, and at /scratch is %q", env, from)
	}
	s.must(s.stopJob("fake"))
}
