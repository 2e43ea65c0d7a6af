package launch_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/host/internal/launch"
	"holdfast/internal/priority"
)

// niceValues are those of the threads of a process, as the kernel has them.
func niceValues(t *testing.T, pid int) map[int32]int {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	if err != nil || len(threads) == 0 {
		t.Fatalf("threads of %d: %v, %v", pid, threads, err)
	}
	values := map[int32]int{}
	for _, path := range threads {
		thread, _ := strconv.Atoi(filepath.Base(path))
		if a, err := unix.SchedGetAttr(thread, 0); err == nil {
			values[a.Nice]++
		}
	}
	return values
}

func checkNice(t *testing.T, pid int, want int32) {
	t.Helper()
	if values := niceValues(t, pid); len(values) != 1 || values[want] == 0 {
		t.Errorf("threads by nice value: %v, all should have %d", values, want)
	}
}

func needPriority(t *testing.T) (usual int32) {
	t.Helper()
	base := priority.Usual(0)
	if base == nil {
		t.Skip("who may not take a priority back, without root nobody, never gives it up")
	}
	return base.Nice
}

func checkLives(t *testing.T, file string, want int) {
	t.Helper()
	if lives, err := os.ReadFile(file); err != nil || len(lives) != want {
		t.Errorf("it was started %d times, not %d (%v)", len(lives), want, err)
	}
}

// A shim that starts gently is slowed before it answers, and none of its threads is any more once Start returns. The host is what it was.
func TestGentleStart(t *testing.T) {
	t.Parallel()
	usual := needPriority(t)
	opts := options(t, "slowed")
	lives := filepath.Join(opts.RunDir, "lives")
	opts.Gently, opts.Env = true, append(opts.Env, livesFile+"="+lives)
	p := start(t, opts)
	checkNice(t, p.PID(), usual)
	checkNice(t, os.Getpid(), usual)
	checkLives(t, lives, 1)
}

// A shim that nobody waits for any more yields, and ends all the same.
func TestYield(t *testing.T) {
	t.Parallel()
	usual := needPriority(t)
	p := start(t, options(t, "plain"))
	checkNice(t, p.PID(), usual)
	p.Yield()
	checkNice(t, p.PID(), usual+10)
	if err := p.Stop(t.Context(), time.Minute); err != nil {
		t.Error(err)
	}
	p.Yield() // and one that has ended does nothing
}

// One that nobody wants to be gentle is left alone: it waits to be slowed until its time is up.
func TestStartIsNotGentleByItself(t *testing.T) {
	t.Parallel()
	opts := options(t, "slowed")
	opts.Env = append(opts.Env, livesFile+"="+filepath.Join(opts.RunDir, "lives"))
	opts.StartTimeout = time.Second
	_, err := launch.Start(t.Context(), opts)
	checkText(t, err, "sent no handshake")
}

// A shim that stays slow after its gentle start is of no use: it is ended, and started again in haste. Here whoever starts it loses the privilege
// after it was found that there is one.
func TestGentleStartThatStaysSlow(t *testing.T) {
	t.Parallel()
	usual := needPriority(t)
	opts := options(t, "slowed once")
	lives := filepath.Join(opts.RunDir, "lives")
	opts.Gently, opts.Env = true, append(opts.Env, livesFile+"="+lives)
	var p *launch.Process
	err := unprivileged(func() (err error) {
		p, err = launch.Start(t.Context(), opts)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kill(t, p) })
	checkNice(t, p.PID(), usual)
	checkLives(t, lives, 2)
}

// unprivileged runs f on a thread that may not take a priority back. Other threads may.
func unprivileged(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var sets [2]unix.CapUserData
		err := unix.Capget(&head, &sets[0])
		sets[0].Effective &^= 1 << unix.CAP_SYS_NICE
		if err == nil {
			err = unix.Capset(&head, &sets[0])
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

// A host that could not take the priority back, as without the privilege, does not give it up: the shim is started once, and is not slow.
func TestGentleStartWithoutPrivilege(t *testing.T) {
	t.Parallel()
	usual := needPriority(t)
	dir := shortDir(t)
	lives := filepath.Join(dir, "lives")
	dirs, _ := json.Marshal([2]string{shared.dir, dir})
	cmd := exec.Command(shared.self)
	cmd.Env = append(os.Environ(), shimMode+"=host", "LAUNCH_TEST_SHIM=counted", "LAUNCH_TEST_DIRS="+string(dirs),
		"LAUNCH_TEST_DIGEST="+shared.digest.SHA256, "LAUNCH_TEST_GENTLY=1", livesFile+"="+lives)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	begun := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine, and has no privilege any more
		err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_SYS_NICE, 0, 0, 0)
		if err == nil {
			err = cmd.Start()
		}
		begun <- err
	}()
	if err := <-begun; err != nil {
		t.Fatal(err)
	}
	defer func() { cmd.Process.Kill(); cmd.Wait() }()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	checkNice(t, pid, usual)
	checkLives(t, lives, 1)
}
