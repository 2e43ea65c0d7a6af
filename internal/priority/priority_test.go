package priority

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

// Who is said to be able to take a priority back can, and who is said not to cannot: of those that cannot nothing else here is tested.
func TestUsualIsToldOfWhoMayReturn(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	base, err := unix.SchedGetAttr(cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	said := Usual(cmd.Process.Pid)
	if err := unix.Setpriority(unix.PRIO_PROCESS, cmd.Process.Pid, int(base.Nice)+1); err != nil {
		t.Fatal(err)
	}
	back := unix.Setpriority(unix.PRIO_PROCESS, cmd.Process.Pid, int(base.Nice))
	if (said != nil) != (back == nil) {
		t.Errorf("the usual priority is %+v, and to go back to it: %v", said, back)
	}
}

// Another process is set, and set back; one that has ended is an error, as nobody can say how it is scheduled.
func TestSetOfAnotherProcess(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	base := Usual(pid)
	if base != nil {
		for _, a := range []*Schedule{base.Nicer(5), base} {
			if err := Set(pid, a); err != nil {
				t.Error(err)
			}
			if is, err := unix.SchedGetAttr(pid, 0); err != nil || is.Nice != a.Nice || is.Policy != a.Policy {
				t.Errorf("it is %+v (%v), not %+v", is, err, a)
			}
		}
		if most := base.Nicer(100).Nice; most != 19 {
			t.Errorf("the nicest value is %d", most)
		}
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if Set(pid, &Schedule{}) == nil {
		t.Error("a process that has ended was set")
	}
	if base == nil {
		t.Skip("who may not take a priority back, without root nobody, never gives it up")
	}
}

// A process with a session of its own gives up what that has of the processors, and takes it back; one without touches no session, which would be that of
// others.
func TestSessions(t *testing.T) {
	for what, own := range map[string]bool{"its own session": true, "that of others": false} {
		cmd := exec.Command("sleep", "1000")
		cmd.SysProcAttr = &unix.SysProcAttr{Setsid: own}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
		path := fmt.Sprintf("/proc/%d/autogroup", cmd.Process.Pid)
		nice := func() string {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			return string(bytes.TrimSpace(text[bytes.LastIndexByte(text, ' ')+1:]))
		}
		if text, err := os.ReadFile(path); err != nil || len(text) == 0 { // empty in a control group with a share of its own
			t.Skipf("the kernel does not share processors among sessions here: %q, %v", text, err)
		}
		base := Usual(cmd.Process.Pid)
		if base == nil {
			t.Skip("who may not take a priority back, without root nobody, never gives it up")
		}
		usual := nice()
		for _, s := range []*Schedule{base.Idle(), base.Nicer(3), base} {
			if err := Set(cmd.Process.Pid, s); err != nil {
				t.Error(err)
			}
			want := usual
			if own {
				want = fmt.Sprint(*s.Session)
			}
			if got := nice(); got != want {
				t.Errorf("%s: its nice value is %s, not %s", what, got, want)
			}
		}
		if nice() != usual {
			t.Errorf("%s: its nice value was %s and is %s", what, usual, nice())
		}
	}
}
