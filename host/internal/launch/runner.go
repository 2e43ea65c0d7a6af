package launch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	hclog "github.com/hashicorp/go-hclog"
	plugin "github.com/hashicorp/go-plugin"
	goplugin "github.com/hashicorp/go-plugin/runner"

	"holdfast/proto/bootstrap"
	"holdfast/registry"
)

// argv0 is the shim's argv[0], and the name that bootstrap.Serve gives to its process.
const argv0 = "holdfast-shim"

// runner starts one shim for go-plugin, and protects go-plugin from input that would make it panic or hang. go-plugin
// gets a handshake line that was checked already, an empty stderr, and a Wait that ends when the process dies.
type runner struct {
	ctx    context.Context // bounds the start
	binary *os.File
	args   []string
	cert   string   // environment variable with the host's certificate, as NAME=PEM
	env    []string // set by prepare
	dir    string

	child   *child // nil until it runs
	stdout  *handshakeWriter
	stderr  *logWriter
	address string
}

func newRunner(ctx context.Context, binary *os.File, dir string, opts Options) *runner {
	return &runner{
		ctx: ctx, binary: binary, args: append([]string{argv0}, opts.Args...), dir: dir,
		stdout: newHandshakeWriter(), stderr: &logWriter{log: opts.Logger},
	}
}

// prepare is go-plugin's RunnerFunc. cmd carries the variables of its protocol. prepare removes the directory that
// go-plugin has created. Otherwise go-plugin would remove it at the end, with whatever the shim has mounted in it.
func (r *runner) prepare(_ hclog.Logger, cmd *exec.Cmd, dir string) (goplugin.Runner, error) {
	if err := os.Remove(dir); err != nil {
		return nil, err
	}
	protocol := []string{r.cert, plugin.EnvUnixSocketDir + "=" + r.dir}
	for _, pair := range cmd.Env {
		if !strings.HasPrefix(pair, plugin.EnvUnixSocketDir+"=") {
			protocol = append(protocol, pair)
		}
	}
	r.env = environment(protocol)
	return r, nil
}

// Start returns once the shim has sent an acceptable handshake. After an error the process may run.
func (r *runner) Start(context.Context) error {
	child, err := startChild(r.binary, r.args, r.env, r.stdout, r.stderr)
	if err != nil {
		return err
	}
	r.child = child
	select {
	case <-r.stdout.ended:
	case <-r.child.done:
		return r.diedAtStart()
	case <-r.ctx.Done():
		return r.timeoutError("sent no handshake; there is " + r.stdout.describe())
	}
	h, err := parseHandshake(r.stdout.text())
	if err != nil {
		return err
	}
	r.address = h.address
	return h.check(r.dir)
}

// giveShim says what to do about a program that is no shim.
const giveShim = "give the path of a shim's binary"

func (r *runner) diedAtStart() error {
	exit, hint := r.child.exit, ""
	if exit.Code == bootstrap.ExitNotAPlugin || r.refusedCookie() {
		hint = "; it did not accept this host's cookie, so it is a plugin of another program: " + giveShim
	} else if r.stdout.text() == "" && !exit.Outside() {
		hint = "; if its last lines do not say why, it may be no shim: " + giveShim
	}
	return registry.Errorf(registry.ErrUnavailable, "the shim did not start: %w, with %s%s", exit, r.stdout.describe(),
		hint)
}

// ExitWait is how long to wait for the exit that explains a broken connection. The kernel closes the connections
// of a process long before its exit if one of its threads waits for a disk.
const ExitWait = 5 * time.Second

// explainDeath adds to an error how the shim died after its handshake. It waits up to ExitWait for the death. If the
// shim lives, or this host ended it, explainDeath returns err as it is.
func (r *runner) explainDeath(err error) error {
	if r.ctx.Err() != nil { // then this host has killed it
		return err
	}
	select {
	case <-r.child.done:
		if !r.child.exit.Asked {
			return registry.Errorf(registry.ErrUnavailable, "the shim did not start: %w: %v", r.child.exit, err)
		}
	case <-time.After(ExitWait):
	case <-r.ctx.Done():
	}
	return err
}

// refusedCookie reports whether the shim exited with go-plugin's message about a wrong cookie. Only the hint of
// diedAtStart depends on it.
func (r *runner) refusedCookie() bool {
	return r.child.exit.Code == 1 && strings.Contains(strings.Join(r.stderr.last(), "\n"), "This binary is a plugin")
}

// timeoutError returns the error of a start that took too long. what says how far the shim has come.
func (r *runner) timeoutError(what string) error {
	return registry.Errorf(registry.ErrUnavailable, "the shim %s: gave up starting it: %w", what, context.Cause(r.ctx))
}

// killFailed kills the process after a failed start, and returns err with the last lines of its stderr.
func (r *runner) killFailed(err error) error {
	killed := r.Kill(context.WithoutCancel(r.ctx))
	return errors.Join(withLines(err, r.stderr.last()), killed)
}

// withLines adds the shim's last lines to an error.
func withLines(err error, lines []string) error {
	if len(lines) == 0 {
		return fmt.Errorf("%w; it wrote nothing to stderr", err)
	}
	return fmt.Errorf("%w; its last lines on stderr:\n  %s", err, strings.Join(lines, "\n  "))
}

// Stdout returns the handshake line alone.
func (r *runner) Stdout() io.ReadCloser {
	return io.NopCloser(strings.NewReader(r.stdout.text() + "\n"))
}

// Stderr returns an empty stream: logWriter gets the real one.
func (r *runner) Stderr() io.ReadCloser { return io.NopCloser(strings.NewReader("")) }

// Wait returns when the process dies.
func (r *runner) Wait(ctx context.Context) error {
	select {
	case <-r.child.done:
		return r.child.exit
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Kill sends SIGKILL and waits for the death, with a deadline.
func (r *runner) Kill(ctx context.Context) error {
	if r.child == nil {
		return nil
	}
	return r.child.killAndWait(ctx)
}

func (r *runner) Diagnose(context.Context) string { return "" }
func (r *runner) Name() string                    { return argv0 }

// ID is empty for a shim that never ran: go-plugin then has nothing to kill.
func (r *runner) ID() string {
	if r.child == nil {
		return ""
	}
	return strconv.Itoa(r.child.pid)
}

func (r *runner) PluginToHost(network, address string) (string, string, error) {
	return network, address, nil
}

func (r *runner) HostToPlugin(network, address string) (string, string, error) {
	return network, address, nil
}
