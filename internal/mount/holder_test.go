package mount

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount/mounttest"
)

func TestMain(m *testing.M) {
	BecomeHelper()
	switch {
	case len(os.Args) > 1 && os.Args[1] == "-hold":
		hold(os.Args[2:])
	default:
		os.Exit(mounttest.Run(m))
	}
}

// holder is a process that has done some steps and waits for its end.
type holder struct {
	pid int
	end func()
}

// holdOn starts a holder. If apart is set, it runs in a new mount namespace.
func holdOn(t *testing.T, apart bool, steps ...string) holder {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", append([]string{"-hold"}, steps...)...)
	if apart {
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	}
	return begin(t, cmd)
}

func begin(t *testing.T, cmd *exec.Cmd) holder {
	t.Helper()
	cmd.Stderr, cmd.Env = os.Stderr, append(os.Environ(), "GORACE=atexit_sleep_ms=0")
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	h := holder{cmd.Process.Pid, func() { in.Close(); _ = cmd.Wait() }}
	t.Cleanup(h.end)
	if err != nil || line != "ready\n" {
		t.Fatalf("%q: it said %q, %v", cmd.Args, line, err)
	}
	return h
}

// hold does the steps, each "what:path" or "what:path:path", and waits until its input ends.
func hold(steps []string) {
	runtime.LockOSThread() // the main thread has the namespace and directory of the process
	for _, step := range steps {
		if err := do(step); err != nil {
			fmt.Println(step, err)
			os.Exit(1)
		}
	}
	fmt.Println("ready")
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

func do(step string) error {
	words := append(strings.Split(step, ":"), "", "")
	what, a, b := words[0], words[1], words[2]
	switch what {
	case "cwd":
		return unix.Chdir(a)
	case "root":
		return unix.Chroot(a)
	case "open":
		_, err := unix.Open(a, unix.O_RDWR, 0)
		return err
	case "remove":
		return unix.Unlink(a)
	case "map":
		fd, err := unix.Open(a, unix.O_RDWR, 0)
		if err != nil {
			return err
		}
		_, err = unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
		unix.Close(fd)
		return err
	case "private", "slave", "shared":
		flag := map[string]uintptr{"private": unix.MS_PRIVATE, "slave": unix.MS_SLAVE, "shared": unix.MS_SHARED}[what]
		return unix.Mount("", a, "", unix.MS_REC|flag, "")
	case "bind", "rbind":
		flag := map[string]uintptr{"bind": unix.MS_BIND, "rbind": unix.MS_BIND | unix.MS_REC}[what]
		return unix.Mount(a, b, "", flag, "")
	case "umount":
		return unix.Unmount(a, 0)
	case "inspect":
		found, err := inspectHung(newHelper(), a)
		if found[a].Hung {
			fmt.Println("hung")
		}
		return err
	case "dir":
		return os.MkdirAll(a, 0o755)
	}
	return fmt.Errorf("no step is called %q", what)
}
