package launch_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
)

// A shim that has mounted something in its socket directory is dead all the same once it was killed, or has ended: that the directory cannot be
// removed is logged. What is mounted keeps its content, and once it is unmounted the next start removes the rest.
func TestDeadWhateverItLeaves(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("to mount something needs root")
	}
	for what, end := range map[string]func(*launch.Process) error{
		"killed":  func(p *launch.Process) error { return p.Kill(t.Context()) },
		"stopped": func(p *launch.Process) error { return p.Stop(t.Context(), patience) },
	} {
		log := newLog()
		opts := options(t, "plain")
		opts.Logger = log
		p := start(t, opts)
		dirs, err := filepath.Glob(filepath.Join(opts.RunDir, "shim-*"))
		if err != nil || len(dirs) != 1 {
			t.Fatal(dirs, err)
		}
		point := filepath.Join(dirs[0], "volume")
		if err := os.Mkdir(point, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", point, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		defer unix.Unmount(point, unix.MNT_DETACH)
		data := filepath.Join(point, "data")
		writeFile(t, data, "somebody's", 0o600)
		if err := end(p); err != nil {
			t.Errorf("%s: the shim is dead, and its end says %v", what, err)
		}
		if p.Err() == nil || alive(p.PID()) {
			t.Errorf("%s: it lives", what)
		}
		if text := log.text(); !strings.Contains(text, "cannot be removed") || !strings.Contains(text, point+" is mounted") {
			t.Errorf("%s: nothing tells of the mount: %s", what, text)
		}
		if text, err := os.ReadFile(data); err != nil || string(text) != "somebody's" {
			t.Errorf("%s: what was mounted holds %q, %v", what, text, err)
		}
		unmount(t, point)
		kill(t, start(t, opts))
		checkEmpty(t, opts.RunDir)
	}
}

// unmount waits for processes that other tests fork in this moment: they hold what is open here until they execute their program.
func unmount(t *testing.T, point string) {
	t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		err := unix.Unmount(point, 0)
		if err == nil {
			return
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// The same for a directory that is not ours to change for another reason.
func TestDeadWhateverCannotBeRemoved(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("the test makes a directory read-only by a mount")
	}
	opts := options(t, "plain")
	p := start(t, opts)
	if err := unix.Mount(opts.RunDir, opts.RunDir, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(opts.RunDir, unix.MNT_DETACH)
	if err := unix.Mount("", opts.RunDir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	kill(t, p)
	if alive(p.PID()) {
		t.Error("it lives")
	}
	unmount(t, opts.RunDir)
	kill(t, start(t, opts))
	checkEmpty(t, opts.RunDir)
}
