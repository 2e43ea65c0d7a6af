package e2e

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"holdfast/internal/enginetest"
)

// pull has the engine pull images from a registry with a login. Each failure says what it is. The progress of a slow
// pull is visible. If the agent is killed during a pull, the next one pulls again, and job run waits for it. The
// password is in no file of the agent and in no output.
func (e *engineEnv) pull() {
	r := enginetest.NewRegistry(e.t)
	e.must(os.WriteFile(e.path("password"), []byte(r.Password+"\n"), 0o600))
	e.must(os.WriteFile(e.path("wrong"), []byte("wrong"), 0o600))
	var said []byte
	for _, c := range []struct{ image, password, want string }{
		{r.Host + "/box", "wrong", "unauthorized"},
		{r.Host + "/none", "password", "manifest unknown"},
		{"127.0.0.1:1/box", "password", "connection refused"},
		{r.Host + "/box", "missing", "password of auth: open"},
	} {
		out, err := e.holdfast("job", "run", "--wait", e.pullJob(c.image, c.password))
		said = append(said, out...)
		if err == nil || !strings.Contains(out, c.want) || !strings.Contains(out, "failed") {
			e.t.Errorf("%s with %s: %v, want %q:\n%s", c.image, c.password, err, c.want, out)
		}
	}
	said = append(said, e.pullSlowly(r)...)
	for _, command := range [][]string{
		{"job", "inspect", "pulled"}, {"alloc", "status", e.alloc("pulled").ID}, {"events"},
	} {
		out, err := e.holdfast(command...)
		e.must(err)
		said = append(said, out...)
	}
	e.must(e.stopJob("pulled"))
	e.must(e.endAgent(unix.SIGTERM))
	said = append(said, e.agentOutput()...)
	e.wantNowhere(r.Password, said)
	e.must(e.startAgent(e.flags...))
	e.waitUntil("the plugins are healthy", e.healthy)
}

// pullJob writes the file of a job whose image is pulled.
func (e *engineEnv) pullJob(image, password string) string {
	e.t.Helper()
	src, err := e.hclFile("engine_pull.hcl", "DRIVER", e.engine.Name, "IMAGE", image, "PASSWORD", e.path(password))
	e.must(err)
	file := e.path("pulled.hcl")
	e.must(os.WriteFile(file, src.Text, 0o600))
	return file
}

// pullSlowly kills the agent during a pull, and returns what job run printed meanwhile.
func (e *engineEnv) pullSlowly(r *enginetest.Registry) []byte {
	e.t.Helper()
	out := &lockedBuffer{}
	cmd := exec.Command(filepath.Join(bin, "holdfast"), "job", "run", "--wait", e.pullJob(r.Host+"/box", "password"))
	cmd.Env, cmd.Stdout, cmd.Stderr = e.environ(), out, out
	e.must(cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	e.waitUntil("job run shows the progress of the pull", func() bool {
		return strings.Contains(out.String(), "pulling image "+r.Host+"/box: ")
	})
	pulls := r.Pulls.Load()
	_ = e.endAgent(unix.SIGKILL)
	e.must(e.startAgent(e.flags...))
	e.waitUntil("the next agent pulls", func() bool { return r.Pulls.Load() > pulls })
	select {
	case err := <-ended:
		e.t.Fatalf("job run has ended before the task runs: %v\n%s", err, out)
	default:
	}
	r.Release()
	if err := e.result("job run waits for the next agent, and then for the task", ended); err != nil {
		e.t.Errorf("job run: %v\n%s", err, out)
	}
	if e.pid("pulled") == 0 {
		e.t.Error("the task does not run")
	}
	return []byte(out.String())
}

// wantNowhere fails the test if a secret is in a text, or in a file of the agent.
func (e *engineEnv) wantNowhere(secret string, text []byte) {
	e.t.Helper()
	if bytes.Contains(text, []byte(secret)) {
		e.t.Errorf("the password was printed:\n%s", text)
	}
	e.must(filepath.WalkDir(e.state(), func(path string, d fs.DirEntry, err error) error {
		if path == filepath.Join(e.state(), "mnt") {
			return fs.SkipDir
		}
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		text, err := os.ReadFile(path)
		if bytes.Contains(text, []byte(secret)) {
			e.t.Errorf("the password is in %s", path)
		}
		return err
	}))
}

// lockedBuffer is read while a process writes to it.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
