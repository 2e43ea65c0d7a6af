package priority

import (
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

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
