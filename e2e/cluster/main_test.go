package cluster

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// Environment variables that tell this program which part it plays: a node (the path of its nodeConfig), the first
// process of the namespaces, or the test inside them.
const (
	nodeVariable   = "HOLDFAST_CLUSTER_NODE"
	insideVariable = "HOLDFAST_CLUSTER_INSIDE"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(nodeVariable); path != "" {
		os.Exit(nodeMain(path))
	}
	switch os.Getenv(insideVariable) {
	case "":
		if os.Getuid() != 0 {
			fmt.Println("skipped: namespaces and mounts need root")
			return
		}
		os.Exit(namespaces())
	case "init":
		os.Exit(initMain())
	}
	os.Exit(m.Run())
}

// namespaces runs the tests in new namespaces. If this process dies, all processes inside die.
func namespaces() int {
	self, err := os.Executable()
	if err != nil {
		return exitCode(err)
	}
	cmd := exec.Command("unshare",
		append([]string{"--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", self},
			os.Args[1:]...)...)
	cmd.Env = append(os.Environ(), insideVariable+"=init")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return exitCode(cmd.Run())
}

// initMain is the first process of the namespace. It runs the test, and reaps orphans.
func initMain() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideVariable+"=test")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return exitCode(err)
	}
	for {
		var status syscall.WaitStatus
		switch pid, err := syscall.Wait4(-1, &status, 0, nil); {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return exitCode(err)
		case pid == cmd.Process.Pid && status.Signaled():
			return 1
		case pid == cmd.Process.Pid:
			return status.ExitStatus()
		}
	}
}

func exitCode(err error) int {
	if exit, is := errors.AsType[*exec.ExitError](err); is {
		return max(exit.ExitCode(), 1)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
