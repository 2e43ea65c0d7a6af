package e2e

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/moby/sys/mountinfo"

	"holdfast/hooks"
)

// The example of a foreign orchestrator, a module of its own, runs a real plugin.
func TestEmbed(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("its mount root needs root")
	}
	dir, err := os.MkdirTemp("", "h-")
	if err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(dir, "state")
	run := hooks.DefaultRun(state, os.Getuid(), "")
	cmd := exec.Command(filepath.Join(dir, "embed"), state, filepath.Join(bin, "holdfast-shim"),
		"../examples/embed/plugin.hcl",
		filepath.Join(bin, "loopfs"), "--backend", "dir", "--data", filepath.Join(dir, "data"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	t.Cleanup(func() {
		if t.Failed() && cmd.Process != nil {
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // its plugin may live
		}
		for _, root := range []string{filepath.Join(state, "mnt"), run} {
			if mounted, _ := mountinfo.Mounted(root); mounted {
				unmount(t, root)
			}
		}
		if err := errors.Join(os.RemoveAll(run), os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	build := exec.Command("go", "build", "-o", cmd.Path, ".")
	build.Dir = "../examples/embed"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the example: %v\n%s", err, out)
	}
	out, err := cmd.Output()
	if exit, ok := err.(*exec.ExitError); ok {
		t.Fatalf("embed: %v\n%s", err, exit.Stderr)
	} else if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(out), "loopfs: loopfs.holdfast.dev 0.1.0\n") {
		t.Errorf("it says %q", out)
	}
}
