package e2e

import (
	"fmt"
	"os"
	"os/exec"
	gosignal "os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// openTerminal opens a pseudo terminal: the operator's side and that of the programs.
func openTerminal(t *testing.T) (operator, programs *os.File) {
	t.Helper()
	operator, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no pseudo terminals here: %v", err)
	}
	if err := unix.IoctlSetPointerInt(int(operator.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(operator.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	programs, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return operator, programs
}

// A run whose terminal is closed, or whose reader is gone, takes everything down.
func TestRunTakesEverythingDownWithoutItsTerminal(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	for name, signal := range map[string]syscall.Signal{"terminal closed": 0, "pipe closed": unix.SIGTERM} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m, err := newMachine()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := m.sweep(); err != nil {
					t.Error(err)
				}
			})
			var operator, programs *os.File
			if signal == 0 && gosignal.Ignored(unix.SIGHUP) {
				t.Skip("this test was started with nohup")
			} else if signal == 0 {
				operator, programs = openTerminal(t)
			} else if operator, programs, err = os.Pipe(); err != nil {
				t.Fatal(err)
			}
			hcl, err := filepath.Abs("testdata/hcl")
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(filepath.Join(bin, "holdfast"), "run", "--delete-volumes", "--state-dir", m.state(),
				"--run-dir", m.run(),
				"--var", "d="+m.dir, "--var", "csifake="+filepath.Join(bin, "csifake"), hcl+"/user.hcl",
				hcl+"/disk.volume.hcl", hcl+"/fake.hcl")
			cmd.Env = m.environ()
			cmd.Stdout, cmd.Stderr = programs, programs
			if signal == 0 {
				cmd.Stdin, cmd.SysProcAttr = programs, &syscall.SysProcAttr{Setsid: true, Setctty: true}
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			programs.Close()
			kill := time.AfterFunc(2*waitLimit, func() { _ = cmd.Process.Kill() })
			defer kill.Stop()
			var output strings.Builder
			for buf := make([]byte, 4096); !strings.Contains(output.String(), "task use of user started"); {
				n, err := operator.Read(buf)
				output.Write(buf[:n])
				if err != nil {
					t.Errorf("the job does not run: %v\n%s", err, output.String())
					break
				}
			}
			operator.Close()
			want := 128 + int(unix.SIGHUP)
			if signal != 0 {
				want = 128 + int(signal)
				if err := cmd.Process.Signal(signal); err != nil {
					t.Fatal(err)
				}
			}
			err = cmd.Wait()
			if got := cmd.ProcessState.ExitCode(); got != want {
				t.Errorf("exit code %d, not %d: %v", got, want, err)
			}
			for _, what := range m.finalLeftovers() {
				t.Error("left behind:", what)
			}
			journal, err := os.ReadFile(m.path("journal"))
			if err != nil || !strings.Contains(string(journal), "DeleteVolume") {
				t.Errorf("the volume was not deleted: %v", err)
			}
		})
	}
}
