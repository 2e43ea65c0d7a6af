package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host"
)

const shimName = "holdfast-shim"

// findShim finds the shim binary: the flag's, the one beside this program, or the one in PATH, in this order.
func findShim(flag string) (host.Binary, error) {
	if flag != "" {
		return host.Binary{Path: flag}, nil
	}
	self, err := os.Executable()
	if err != nil {
		return host.Binary{}, err
	}
	beside := filepath.Join(filepath.Dir(self), shimName)
	if _, err = exec.LookPath(beside); err == nil {
		return host.Binary{Path: beside}, nil
	}
	if path, err := exec.LookPath(shimName); err == nil {
		return host.Binary{Path: path}, nil
	}
	if errors.Is(err, os.ErrPermission) {
		return host.Binary{}, fmt.Errorf("%s is not executable; run chmod +x, or set --shim", beside)
	}
	return host.Binary{}, fmt.Errorf("%s not found beside this program or in PATH; run make build, or set --shim",
		shimName)
}

// shimExitTimeout bounds the exit of a shim after SIGTERM.
const shimExitTimeout = 5 * time.Second

// shimCommand returns a command that runs the shim binary until ctx ends. explain returns the error that the shim has
// printed, in place of the error of the command.
func shimCommand(ctx context.Context, shim string, args []string) (cmd *exec.Cmd, explain func(error) error) {
	var errs bytes.Buffer
	cmd = exec.CommandContext(ctx, shim, args...)
	cmd.Stderr, cmd.WaitDelay = &errs, shimExitTimeout
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	return cmd, func(err error) error {
		text := strings.TrimSpace(strings.TrimPrefix(errs.String(), "holdfast-shim: "))
		return errors.New(cmp.Or(text, err.Error()))
	}
}
