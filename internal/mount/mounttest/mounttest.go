// Package mounttest runs the tests of a package in a mount namespace of their own. No other process sees their mounts.
// So a namespace that another package's test makes at that moment has no copy of them, which would keep a loop device
// busy after its unmount.
package mounttest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const inside = "HOLDFAST_MOUNTTEST"

// Run is m.Run in a new mount namespace, for which it executes the test binary again. Without the permission to make a
// namespace it is plain m.Run. Call it from TestMain.
func Run(m *testing.M) int {
	if os.Getuid() != 0 {
		return m.Run()
	}
	if os.Getenv(inside) != "" {
		return apart(m)
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return max(exit.ExitCode(), 1)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mounttest:", err)
		return 1
	}
	return 0
}

// apart is m.Run in a namespace of slave mounts. Unmounts outside propagate to it, because it would otherwise keep
// devices busy. Nothing propagates from it, even if / is shared.
func apart(m *testing.M) int {
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		fmt.Fprintln(os.Stderr, "mounttest:", err)
		return 1
	}
	return m.Run()
}
