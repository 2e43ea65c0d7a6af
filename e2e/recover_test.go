package e2e

import (
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/host/agent/control"
	"holdfast/internal/csifake"
)

// lossesOf are ways to lose agent.db.
var lossesOf = map[string]func(path string) error{
	"removed": os.Remove,
	"emptied": func(path string) error { return os.Truncate(path, 0) },
	"truncated": func(path string) error {
		return os.Truncate(path, 3*int64(os.Getpagesize()))
	},
}

// loseLedger starts the plugin and a writer on a volume of it, kills the agent, damages agent.db, and has an agent refused.
func (s *station) loseLedger(damage func(path string) error) (before lie) {
	s.t.Helper()
	s.must(s.submit("fake.hcl"))
	s.must(s.create("kept"))
	s.must(s.submit("writer.hcl", "FAILED", s.path("failed")))
	s.wait("the writer writes", func() bool { return s.volumeFile("line") != "" })
	before = s.lies("fake", "writer")
	s.kills()
	s.must(damage(s.path("s/agent/agent.db")))
	err := s.start()
	if err == nil {
		s.t.Fatal("the agent starts, and knows nothing of the writer")
	}
	for _, want := range []string{"agent.db", "--recover=adopt", "--recover=stop"} {
		if !strings.Contains(err.Error(), want) {
			s.t.Errorf("the refusal does not mention %s: %v", want, err)
		}
	}
	return before
}

func (s *station) kills() {
	s.t.Helper()
	if err := s.end(unix.SIGKILL); err == nil {
		s.t.Fatal("the agent ended well before it was killed")
	}
}

// noGap fails if the writer's lines are not 1, 2, 3 and so on, and says how many there are. The last one may be cut.
func (s *station) noGap() int {
	s.t.Helper()
	lines := strings.Split(s.volumeFile("line"), "\n")
	for i, l := range lines[:len(lines)-1] {
		if l != strconv.Itoa(i+1) {
			s.t.Fatalf("line %d is %q", i+1, l)
		}
	}
	if failed, err := os.ReadFile(s.path("failed")); err == nil {
		s.t.Fatalf("writes have failed: %s", failed)
	}
	return len(lines) - 1
}

// An agent that has lost its records refuses to start beneath a writer. One that adopts what runs touches neither writer,
// plugin nor volume.
func TestWriterSurvivesLossOfAgentRecords(t *testing.T) {
	for name, damage := range lossesOf {
		t.Run(name, func(t *testing.T) {
			s := newStation(t)
			before := s.loseLedger(damage)
			s.must(s.start("--recover=adopt"))
			if before.mounts == "" || strings.Contains(before.calls, "Unpublish") || strings.Contains(before.calls, "Unstage") {
				t.Fatalf("the volume was taken away: %+v", before)
			}
			was := s.noGap()
			s.wait("the writer writes on", func() bool { return s.noGap() > was })
			found, err := s.client.Doctor(s.ctx(), control.Consultation{})
			s.must(err)
			if len(found.Findings) > 0 {
				t.Errorf("doctor finds %+v", found.Findings)
			}
			s.kills()
			s.must(s.start()) // the next one needs no help
			if now := s.lies("fake", "writer"); now != before {
				t.Errorf("what runs was touched:\n%+v\nand now\n%+v", before, now)
			}
			s.noGap()
			s.must(s.stop("writer"))
			s.must(s.delete("kept"))
			s.must(s.stop("fake"))
		})
	}
}

// Without them: the writer is stopped and its volume given back before its plugin ends. The journal is judged at the end.
func TestTasksOfLostRecordsAreStoppedInOrder(t *testing.T) {
	s := newStation(t)
	s.loseLedger(lossesOf["emptied"])
	s.must(s.start("--recover=stop"))
	s.wait("all is stopped", func() bool {
		all, err := s.client.Allocs(s.ctx())
		jobs, err2 := s.client.Jobs(s.ctx())
		return err == nil && err2 == nil && len(all)+len(jobs) == 0
	})
	s.noGap()
	s.must(s.submit("fake.hcl"))
	s.must(s.delete("kept"))
	s.must(s.stop("fake"))
}

// The agent's whole directory is removed while a writer runs: no record is left to adopt it by. The agent does not start before the tasks have
// ended, and then gives the volume back.
func TestTasksOfRemovedRecordsKeepTheirVolumes(t *testing.T) {
	s := newStation(t)
	s.must(s.submit("fake.hcl"))
	s.must(s.create("kept"))
	s.must(s.submit("writer.hcl", "FAILED", s.path("failed")))
	s.wait("the writer writes", func() bool { return s.volumeFile("line") != "" })
	before := s.lies("fake", "writer")
	s.kills()
	s.must(os.RemoveAll(s.path("s/agent")))
	var pids []string
	for _, args := range [][]string{nil, {"--recover=adopt"}, {"--recover=stop"}} {
		err := s.start(args...)
		if err == nil {
			t.Fatalf("the agent starts with %v, and knows nothing of the writer", args)
		}
		found := regexp.MustCompile(`kill -TERM ([0-9 ]+),`).FindStringSubmatch(err.Error())
		if found == nil {
			t.Fatalf("the refusal does not say how to go on: %v", err)
		}
		pids = strings.Fields(found[1])
	}
	if said, err := s.cli("doctor", "--state-dir", s.path("s"), "--run-dir", s.path("r")); err == nil ||
		!strings.Contains(said+err.Error(), "running tasks without a record") {
		t.Errorf("doctor: %v\n%s", err, said)
	}
	was := s.noGap()
	s.wait("the writer writes on", func() bool { return s.noGap() > was })
	calls, err := csifake.Calls(s.path("journal"), everyCall...)
	s.must(err)
	if now := strings.Join(told(calls), "\n"); now != before.calls {
		t.Fatalf("what runs was touched:\n%s\nand now\n%s", before.calls, now)
	}
	s.must(exec.Command("kill", append([]string{"-TERM"}, pids...)...).Run())
	s.wait("the agent starts", func() bool { return s.start() == nil })
	s.must(s.submit("fake.hcl"))
	s.must(s.delete("kept"))
	s.must(s.stop("fake"))
}
