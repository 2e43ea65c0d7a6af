package priority

import (
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
		nicer := Nicer(base, 5)
		for _, a := range []*unix.SchedAttr{nicer, base} {
			if err := Set(pid, a); err != nil {
				t.Error(err)
			}
			if is, err := unix.SchedGetAttr(pid, 0); err != nil || is.Nice != a.Nice || is.Policy != a.Policy {
				t.Errorf("it is %+v (%v), not %+v", is, err, a)
			}
		}
		if most := Nicer(base, 100).Nice; most != 19 {
			t.Errorf("the nicest value is %d", most)
		}
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if Set(pid, &unix.SchedAttr{}) == nil {
		t.Error("a process that has ended was set")
	}
	if base == nil {
		t.Skip("who may not take a priority back, without root nobody, never gives it up")
	}
}
