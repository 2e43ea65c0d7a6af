package secretfile

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func threads(t *testing.T) int {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	must(t, err)
	return len(tasks)
}

// A hanging mount costs one thread for all secrets on it, however often they are read. Other secrets can be read
// meanwhile. Secrets on the mount can be read again once it answers.
func TestHungSecretFileCostsOneThread(t *testing.T) {
	dir := t.TempDir()
	dev, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("there is no FUSE for this user: %v", err)
	}
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=%d,group_id=%d", dev, os.Getuid(), os.Getgid())
	must(t, unix.Mount("hung", dir, "fuse.test", unix.MS_NOSUID|unix.MS_NODEV, options))
	mounted := true
	defer func() {
		if mounted {
			_ = unix.Unmount(dir, unix.MNT_DETACH)
			_ = unix.Close(dev)
		}
	}()
	fine := filepath.Join(t.TempDir(), "fine")
	must(t, os.WriteFile(fine, []byte("v"), 0o600))
	before := threads(t)
	for i := range 100 {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
		_, err := Read(ctx, filepath.Join(dir, fmt.Sprint("secret-", i/2)))
		cancel()
		if !errors.Is(err, registry.ErrUnavailable) {
			t.Fatalf("read %d: %v", i, err)
		}
	}
	if n := threads(t) - before; n > 20 {
		t.Errorf("100 reads keep %d threads", n)
	}
	link := filepath.Join(filepath.Dir(fine), "link")
	must(t, os.Symlink(filepath.Join(dir, "linked"), link))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	if _, err := Read(ctx, link); !errors.Is(err, registry.ErrUnavailable) {
		t.Errorf("a link to the mount that hangs: %v", err)
	}
	if got, err := Read(t.Context(), fine); err != nil || string(got) != "v" {
		t.Errorf("a file on another mount: %q, %v", got, err)
	}
	must(t, unix.Unmount(dir, unix.MNT_DETACH))
	must(t, unix.Close(dev)) // the hanging read ends
	mounted = false
	again := filepath.Join(dir, "secret-0")
	must(t, os.WriteFile(again, []byte("w"), 0o600))
	for deadline := time.Now().Add(time.Minute); ; {
		got, err := Read(t.Context(), again)
		if err == nil && string(got) == "w" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("it answers again: %q, %v", got, err)
		}
	}
}
