package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
)

// The self-binds of the shim are unmounted. Mounts of the operator at the same directories stay.
func TestMountsOfTheOperatorStay(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	err = mount.OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		l := hooks.Layout{State: filepath.Join(dir, "s"), Run: filepath.Join(dir, "r")}
		for _, at := range []string{l.State, l.Run} {
			if err := os.Mkdir(at, 0o700); err != nil {
				return err
			}
			if err := unix.Mount("tmpfs", at, "tmpfs", 0, "size=64k"); err != nil {
				return err
			}
		}
		volume := filepath.Join(l.MountRoot(), "volume")
		if err := os.MkdirAll(volume, 0o700); err != nil {
			return err
		}
		if err := mount.MakeShared(l.MountRoot(), l.Run); err != nil {
			return err
		}
		if err := unix.Mount("tmpfs", volume, "tmpfs", 0, "size=64k"); err != nil {
			return err
		}
		if err := removeSelfMounts(l); err == nil {
			t.Error("a volume that is still mounted is no error")
		}
		if err := unix.Unmount(volume, 0); err != nil {
			return err
		}
		if err := removeSelfMounts(l); err != nil {
			t.Errorf("fold: %v", err)
		}
		table, err := mount.Table(0)
		if err != nil {
			return err
		}
		for at, want := range map[string]bool{l.State: true, l.Run: true, l.MountRoot(): false} {
			if _, mounted := table.At(at); mounted != want {
				t.Errorf("%s is mounted: %v, want %v", at, mounted, want)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestSignalIsTheExitCode sends a signal to a command that fails then, and to one that succeeds nevertheless. Only the
// first one returns the signal as its error.
func TestSignalIsTheExitCode(t *testing.T) {
	c := &cobra.Command{}
	c.SetContext(t.Context())
	for _, failed := range []bool{true, false} {
		err := untilInterrupted(func(_ *cobra.Command, ctx context.Context) error {
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
