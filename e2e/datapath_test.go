package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/host"
	"holdfast/host/agent/control"
	"holdfast/internal/csifake"
)

// lie is how things lie with what a swap must not touch.
type lie struct {
	tasks  string // pid and start time of each task
	mounts string // of the host, and of each task's namespace
	calls  string // that have changed something
}

// lies looks at it.
func (s *station) lies(jobs ...string) (l lie) {
	s.t.Helper()
	l.mounts = s.mountinfo("self")
	for _, job := range jobs {
		a := s.alloc(job)
		if len(a.Tasks) != 1 {
			s.t.Fatalf("%s has the tasks %+v", job, a.Tasks)
		}
		pid := a.Tasks[0].PID
		l.tasks += fmt.Sprintf("%s: attempt %d, process %d, started at %s\n", job, a.Tasks[0].Attempt, pid, startTime(pid))
		l.mounts += job + "\n" + s.mountinfo(fmt.Sprint(pid))
	}
	calls, err := csifake.Calls(s.path("journal"), everyCall...)
	s.must(err)
	l.calls = strings.Join(told(calls), "\n")
	return l
}

// mountinfo is the lines of a process's mount table that are about this machine.
func (s *station) mountinfo(process string) string {
	s.t.Helper()
	text, err := os.ReadFile(filepath.Join("/proc", process, "mountinfo"))
	s.must(err)
	var ours strings.Builder
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, s.dir) {
			ours.WriteString(line)
		}
	}
	return ours.String()
}

// startTime is when the process was started, in ticks since boot: together with the pid it is one process.
func startTime(pid int) string {
	stat := proc(pid, "stat")
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) < 20 {
		return "gone"
	}
	return fields[19]
}

// swapped has the agent replace its shim, again if it took longer than calls may be held.
func (s *station) swapped(n int) (report host.SwapReport) {
	s.t.Helper()
	binaries, err := twins()
	s.must(err)
	s.must(s.insist("swap", func() (err error) {
		report, err = s.client.Swap(s.ctx(), control.Replacement{Path: binaries[n%2].Path, By: "tester"})
		return err
	}))
	return report
}

// Tasks run on while shims are replaced: the plugin's and the user's are the same processes, every mount of the host and of their namespaces is the same
// one, no plugin is asked for anything, and whoever writes through a volume, and has each write reach the disk, is never refused.
func TestDataPathUntouched(t *testing.T) {
	s := newStation(t)
	s.must(s.submit("fake.hcl"))
	s.must(s.create("disk"))
	writer := "while true; do if dd if=/dev/zero of=/disk/block bs=512 count=8 conv=fsync 2>/disk/said; " +
		"then echo good >>/disk/written; else cat /disk/said >>/disk/failed; fi; sleep 0.02; done"
	s.must(s.submit("user.hcl", "while true; do sleep 0.1; done", writer))
	written := func() int { return strings.Count(s.volumeFile("written"), "good") }
	s.wait("the user writes", func() bool { return written() > 0 })
	before := s.lies("fake", "user")
	if before.mounts == "" || !strings.Contains(before.calls, publishOK) {
		t.Fatalf("nothing is mounted: %+v", before)
	}
	for n := range 5 {
		was := written()
		report := s.swapped(n)
		s.wait("the user writes on", func() bool { return written() > was })
		if now := s.lies("fake", "user"); now != before {
			t.Errorf("the swap %+v has touched what runs:\n%+v\nand now\n%+v", report, before, now)
		}
	}
	if failed := s.volumeFile("failed"); failed != "" {
		t.Errorf("writes have failed: %s", failed)
	}
	s.must(s.client.Events(s.ctx(), 0, false, func(e host.Event) error {
		switch e.Kind {
		case "unhealthy", "deregistered", "restart asked", "mount lost", "unpublished", "unstaged", "step failed", "task deregistered":
			t.Errorf("over swaps: %s", e)
		}
		return nil
	}))
	plugin := s.pid("fake")
	s.must(unix.Kill(plugin, unix.SIGKILL))
	s.wait("the plugin's next attempt", func() bool { now := s.pid("fake"); return now != 0 && now != plugin })
	if s.lies("fake", "user") == before {
		t.Error("nobody would notice a plugin that was started anew")
	}
	s.must(s.stop("user"))
	s.must(s.delete("disk"))
	s.must(s.stop("fake"))
}

// volumeFile is a file of the one volume, as the storage has it.
func (s *station) volumeFile(name string) string {
	s.t.Helper()
	found, err := filepath.Glob(s.path(filepath.Join("data", "*", name)))
	s.must(err)
	if len(found) == 0 {
		return ""
	}
	text, err := os.ReadFile(found[0])
	s.must(err)
	return string(text)
}
