package e2e

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// What judges the end of each story finds whatever is left: a mount, a loop device, a directory, a socket, a process.
func TestWhatIsLeftIsFound(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("real mounts need root")
	}
	t.Parallel()
	m, err := newMachine()
	if err != nil {
		t.Fatal(err)
	}
	target := filepath.Join(m.state(), "mnt/plugin/publish/alloc/v")
	own := filepath.Join(m.run(), "t/task")
	for _, dir := range []string{target, own} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	found := func(want string) {
		t.Helper()
		if all := strings.Join(m.left(), "\n"); !strings.Contains(all, want) {
			t.Errorf("%s is not found: %q", want, all)
		}
	}
	found("directory of a volume: " + target)
	found("directory of a socket: " + own)
	socket, err := net.Listen("unix", filepath.Join(own, "csi.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer socket.Close()
	found("socket: " + own)
	sleeper := exec.Command("sleep", "600")
	sleeper.Env = []string{"MARK=" + m.dir}
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { _ = sleeper.Wait() }()
	found("process: ")
	if err := unix.Mount("leak", target, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	found("mounted: " + target)
	image := m.path("data/image")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 1<<20)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("losetup", "-f", image).CombinedOutput(); err != nil {
		t.Logf("no loop devices here: %v: %s", err, out)
	} else {
		found("loop device: ")
	}
	if err := m.sweep(); err != nil {
		t.Error(err)
	}
	if all := m.left(); len(all) > 0 {
		t.Errorf("swept, and yet: %q", all)
	}
}
