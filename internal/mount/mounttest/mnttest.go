// Package mnttest gives the tests of a package a mount namespace of their own. What they mount is seen by no other
// process, so a namespace that some other package's test makes at that moment holds no copy of it, which would keep a
// loop device busy after its unmount.
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

const inside = "HOLDFAST_MNTTEST"

// Run is m.Run in a new mount namespace: the test binary is executed again. Without the right to make one it is m.Run.
// Call it from TestMain.
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
		fmt.Fprintln(os.Stderr, "mnttest:", err)
		return 1
	}
	return 0
}

// apart is m.Run in a namespace that learns what is unmounted outside, which would be kept busy here, and tells
// nothing: where / is shared, as systemd makes it, a new namespace does tell.
func apart(m *testing.M) int {
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		fmt.Fprintln(os.Stderr, "mnttest:", err)
		return 1
	}
	return m.Run()
}
