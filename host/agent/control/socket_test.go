package control

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// dialEnv is the variable with the socket that this test binary dials instead of running tests.
const dialEnv = "CONTROL_TEST_DIAL"

// dialAndExit prints the agent's answer.
func dialAndExit(socket string) {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		os.Stdout.WriteString("cannot connect: " + err.Error())
		os.Exit(0)
	}
	_, _ = conn.Write([]byte("GET /v1/agent/self HTTP/1.0\r\n\r\n"))
	answer, _ := io.ReadAll(conn)
	os.Stdout.WriteString("answer: " + string(answer))
	os.Exit(0)
}

func TestOtherUsersAreRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can run a program as another user")
	}
	socket, _ := serve(t, &fakeHost{})
	dial := func(uid uint32) string {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = []string{dialEnv + "=" + socket}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Skipf("cannot run a program as user %d here: %v %s", uid, err, out)
		}
		return string(out)
	}
	if got := dial(65534); !strings.Contains(got, "permission denied") {
		t.Errorf("the file modes let another user connect: %s", got)
	}
	// SO_PEERCRED refuses other users even if the file modes do not.
	must(t, errors.Join(os.Chmod(filepath.Dir(socket), 0o755), os.Chmod(socket, 0o666)))
	if got := dial(65534); got != "answer: " {
		t.Errorf("another user gets %s", got)
	}
	if got := dial(0); !strings.Contains(got, `"drivers":"raw_exec"`) {
		t.Errorf("root gets %s", got)
	}
}

func TestControlSocketIsPrivateAndExclusive(t *testing.T) {
	path := Socket(shortDir(t))
	must(t, deadSocket(path))
	if _, err := NewClient(path).Self(t.Context()); !errors.Is(err, ErrNoAgent) {
		t.Errorf("the socket of a dead agent: %v", err)
	}
	l, err := Listen(path, hclog.NewNullLogger())
	must(t, err)
	defer l.Close()
	if info, err := os.Lstat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := Listen(path, hclog.NewNullLogger()); !errors.Is(err, registry.ErrConflict) {
		t.Errorf("a second agent: %v", err)
	}
}

// Whenever and however the socket is removed, the agent answers at the same path again.
func TestRemovedControlSocketIsMadeAgain(t *testing.T) {
	for name, sweep := range map[string]func(socket string) error{
		"socket":    os.Remove,
		"directory": func(socket string) error { return os.RemoveAll(filepath.Dir(socket)) },
		"replaced by a dead one": func(socket string) error {
			return errors.Join(os.Remove(socket), deadSocket(socket))
		},
		"renamed directory": func(socket string) error {
			return os.Rename(filepath.Dir(socket), filepath.Dir(socket)+".old")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := Socket(filepath.Join(shortDir(t), "r"))
			l, err := Listen(path, hclog.NewNullLogger())
			must(t, err)
			web := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}
			served := make(chan error, 1)
			go func() { served <- web.Serve(l) }()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			for range 2 {
				before, err := os.Lstat(path)
				must(t, err)
				must(t, sweep(path))
				_ = os.RemoveAll(filepath.Dir(path) + ".old")
				tick := time.NewTicker(10 * time.Millisecond)
				for {
					now, err := os.Lstat(path)
					if err == nil && !os.SameFile(now, before) && answers(ctx, path) {
						break
					}
					select {
					case <-tick.C:
					case err := <-served:
						t.Fatalf("the server ended: %v", err)
					case <-ctx.Done():
						t.Fatal("the socket is not created again")
					}
				}
				if now, err := os.Lstat(path); err != nil || now.Mode().Perm() != 0o600 {
					t.Errorf("the new socket: %v, %v", now, err)
				}
			}
			if err := web.Close(); err != nil {
				t.Error(err)
			}
			if err := <-served; !errors.Is(err, http.ErrServerClosed) {
				t.Errorf("the server ended with %v", err)
			}
			if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("a closed socket is left: %v", err)
			}
		})
	}
}

// answers reports whether a request is answered.
func answers(ctx context.Context, path string) bool {
	_, err := NewClient(path).open(ctx, http.MethodGet, "/", nil)
	return err == nil
}

// deadSocket creates a socket file without a listener.
func deadSocket(path string) error {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		return err
	}
	l.SetUnlinkOnClose(false)
	return l.Close()
}

// A socket of systemd is found by its path. Its file stays when the agent ends, so that requests wait for the next
// agent.
func TestSocketOfSystemdIsUsed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p.sock")
	unit, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	must(t, err)
	defer unit.Close()
	f, err := unit.File()
	must(t, err)
	defer f.Close()
	fd, err := unix.Dup(int(f.Fd())) // findPassedListener closes it
	must(t, err)
	l, err := findPassedListener(path, fd, 1)
	if err != nil || l == nil {
		t.Fatalf("%v, %v", l, err)
	}
	c, err := net.Dial("unix", path)
	must(t, err)
	defer c.Close()
	accepted, err := l.Accept()
	must(t, err)
	must(t, errors.Join(accepted.Close(), l.Close()))
	if _, err := os.Stat(path); err != nil {
		t.Error(err)
	}
	if l, err := findPassedListener(filepath.Join(t.TempDir(), "other.sock"), int(f.Fd()), 1); l != nil || err != nil {
		t.Errorf("%v, %v for another path", l, err)
	}
}
