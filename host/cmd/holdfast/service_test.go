package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/host/agent/volumeplugin"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// The self-binds of the shim are unmounted. Mounts of the operator at the same directories stay.
func TestMountsOfTheOperatorStay(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	dir := realPath(t.TempDir())
	l := hooks.Layout{State: filepath.Join(dir, "s"), Run: filepath.Join(dir, "r")}
	volume := filepath.Join(l.MountRoot(), "volume")
	mountAt := func(dir string) {
		must(t, os.MkdirAll(dir, 0o700))
		must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"))
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	}
	mountAt(l.State)
	mountAt(l.Run)
	must(t, os.MkdirAll(l.MountRoot(), 0o700))
	must(t, mount.MakeShared(l.MountRoot(), l.Run))
	mountAt(volume)
	if err := removeSelfMounts(l); err == nil {
		t.Error("a volume that is still mounted is no error")
	}
	must(t, unix.Unmount(volume, 0))
	must(t, removeSelfMounts(l))
	table, err := mount.Table(0)
	must(t, err)
	for at, want := range map[string]bool{l.State: true, l.Run: true, l.MountRoot(): false} {
		if _, mounted := table.At(at); mounted != want {
			t.Errorf("%s is mounted: %v, want %v", at, mounted, want)
		}
	}
}

// A run that a signal ends before its agent is open removes its temporary directory, and leaves no mount at --run-dir.
func TestRunThatDoesNotOpenLeavesNoMount(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	dir := realPath(t.TempDir())
	l := hooks.Layout{State: filepath.Join(dir, "s"), Run: filepath.Join(dir, "r")}
	must(t, errors.Join(os.MkdirAll(l.MountRoot(), 0o700), os.Mkdir(l.Run, 0o700)))
	must(t, mount.MakeShared(l.MountRoot(), l.Run))
	defer func() { _ = unix.Unmount(l.Run, unix.MNT_DETACH) }()
	failed := errors.New("the shim does not start")
	o := &foreground{temporary: l.State}
	if err := o.endUnopened(l, failed); !errors.Is(err, failed) || strings.Contains(err.Error(), "mounted") {
		t.Error(err)
	}
	table, err := mount.Table(0)
	must(t, err)
	if _, mounted := table.At(l.Run); mounted || exists(l.State) {
		t.Errorf("%s is mounted: %v; %s exists: %v", l.Run, mounted, l.State, exists(l.State))
	}
}

// The exit code of the agent is 0 if a signal ends it, even while it waits for its shim to start.
func TestSignalEndsAnAgentThatOpens(t *testing.T) {
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	defer os.RemoveAll(dir)
	shim, started := filepath.Join(dir, "shim"), filepath.Join(dir, "started")
	must(t, os.WriteFile(shim, []byte("#!/bin/sh\ntouch "+started+"\nexec sleep 1000\n"), 0o700))
	go func() {
		for !exists(started) {
			time.Sleep(time.Millisecond)
		}
		_ = unix.Kill(os.Getpid(), unix.SIGTERM)
	}()
	var errs strings.Builder
	if code := run([]string{"agent", "--state-dir", filepath.Join(dir, "s"), "--run-dir", filepath.Join(dir, "r"),
		"--shim", shim, "--log-level", "error"}, io.Discard, &errs); code != exitOK || errs.String() != "" {
		t.Errorf("exit code %d: %s", code, &errs)
	}
}

// A service that ends before it serves, as after an error in a file of holdfast run, leaves no socket for engines.
func TestSocketForEnginesIsRemovedAtTheEnd(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "engine.sock")
	st := &service{}
	must(t, st.openVolumePlugin(&agentFlags{volumePlugin: socket}, volumeplugin.Defaults{}, hclog.NewNullLogger()))
	if !exists(socket) {
		t.Error("the socket is missing")
	}
	must(t, st.close())
	if exists(socket) {
		t.Error("the socket stays")
	}
}

// The shim's callback for file() ends with its context. Otherwise the agent could not end while a file hangs.
func TestFileOfAJobMayHang(t *testing.T) {
	dir := t.TempDir()
	good, hung := filepath.Join(dir, "good"), filepath.Join(dir, "hung")
	must(t, os.WriteFile(good, []byte("text\n"), 0o600))
	if text, err := readForJob(t.Context(), good); err != nil || string(text) != "text\n" {
		t.Errorf("read %q, %v", text, err)
	}
	if _, err := readForJob(t.Context(), hung); !errors.Is(err, registry.ErrNotFound) {
		t.Errorf("a missing file: %v", err)
	}
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil || os.Getuid() != 0 {
		t.Skipf("there is no FUSE for this user: %v", err)
	}
	defer unix.Close(dev)
	must(t, os.Mkdir(hung, 0o700))
	must(t, unix.Mount("hung", hung, "fuse.test", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", dev)))
	defer func() { _ = unix.Unmount(hung, unix.MNT_DETACH) }()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := readForJob(ctx, filepath.Join(hung, "x")); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("a file that hangs: %v", err)
	}
}

// A command that fails after a signal returns the signal as its error. A command that succeeds does not.
func TestSignalIsTheExitCode(t *testing.T) {
	c := &cobra.Command{}
	c.SetContext(t.Context())
	for _, failed := range []bool{true, false} {
		err := repeatable(func(ctx context.Context, _ *cobra.Command, _ []string) error {
			if err := unix.Kill(os.Getpid(), unix.SIGTERM); err != nil {
				return err
			}
			<-ctx.Done()
			if failed {
				return ctx.Err()
			}
			return nil
		})(c, nil)
		by, is := errors.AsType[interrupted](err)
		if is != failed || is && (by.code() != 143 || !strings.Contains(by.Error(), "again")) {
			t.Errorf("failed: %t: %v", failed, err)
		}
	}
}
