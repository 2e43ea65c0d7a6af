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
	"sync"
	"time"

	hclog "github.com/hashicorp/go-hclog"
	plugin "github.com/hashicorp/go-plugin"
	goplugin "github.com/hashicorp/go-plugin/runner"

	"holdfast/proto/bootstrap"
	"holdfast/registry"
)

// argv0 is what a shim sees as its own name.
const argv0 = "holdfast-shim"

// runner starts one shim for go-plugin and keeps from it all that would make it panic or wait: go-plugin gets a
// handshake line that was checked already, a stderr without a byte, and a Wait that ends at the real death.
type runner struct {
	ctx    context.Context // bounds the start
	binary *os.File
	args   []string
	env    func(protocol []string) []string
	dir    string

	child   *child // nil until it runs
	greeter *greeter
	scribe  *scribe
	readers sync.WaitGroup
	address string
}

func newRunner(ctx context.Context, binary *os.File, dir string, opts Options) *runner {
	return &runner{
		ctx: ctx, binary: binary, args: append([]string{argv0}, opts.Args...), env: opts.environment, dir: dir,
		greeter: newGreeter(), scribe: newScribe(opts.Logger),
	}
}

// prepare is go-plugin's RunnerFunc. cmd carries the variables of its protocol. The directory that go-plugin has made is removed at once: it would
// remove it at the end, with whatever the shim has mounted in it.
func (r *runner) prepare(_ hclog.Logger, cmd *exec.Cmd, dir string) (goplugin.Runner, error) {
	if err := os.Remove(dir); err != nil {
		return nil, err
	}
	protocol := []string{plugin.EnvUnixSocketDir + "=" + r.dir}
	for _, pair := range cmd.Env {
		if !strings.HasPrefix(pair, plugin.EnvUnixSocketDir+"=") {
			protocol = append(protocol, pair)
		}
	}
	env := r.env
	r.env = func([]string) []string { return env(protocol) }
	return r, nil
}

// Start returns once the shim has sent a handshake that we accept. It leaves no process behind if it fails.
func (r *runner) Start(context.Context) error {
	child, err := startChild(r.binary, r.args, r.env(nil))
	if err != nil {
		return err
	}
	r.child = child
	r.readers.Go(func() { r.greeter.run(child.stdout); child.leave(child.stdout) })
	r.readers.Go(func() { r.scribe.run(child.stderr); child.leave(child.stderr) })
	if err := r.greet(); err != nil {
		return r.fail(err)
	}
	return nil
}

// greet waits for the first line, the death of the shim, or the end of the start's time, whichever comes first.
func (r *runner) greet() error {
	select {
	case err := <-r.greeter.line:
		return r.welcome(err)
	case <-r.child.done:
		r.readers.Wait() // bounded by drainTime; the line may have been its last words
		return r.diedAtStart()
	case <-r.ctx.Done():
		return r.tooLate("sent no handshake, so it hangs or is no shim; there is " + r.greeter.seen())
	}
}

func (r *runner) welcome(err error) error {
	switch {
	case err == nil:
	case errors.Is(err, io.EOF), errors.Is(err, os.ErrDeadlineExceeded):
		return r.closedStdout()
	default:
		return registry.Errorf(registry.ErrInternal, "the shim's stdout has no handshake: %s", r.greeter.seen())
	}
	h, err := parseHandshake(r.greeter.text())
	if err != nil {
		return err
	}
	if err := h.check(r.dir); err != nil {
		return err
	}
	r.address = h.address
	return nil
}

// closedStdout tells a shim that has died from one that lives on without a stdout.
func (r *runner) closedStdout() error {
	select {
	case <-r.child.done:
		return r.diedAtStart()
	case <-r.ctx.Done():
		return r.tooLate("closed its stdout without a handshake; there is " + r.greeter.seen())
	}
}

// giveShim is what to do about a program that is no shim.
const giveShim = "give the path of a shim's binary"

func (r *runner) diedAtStart() error {
	exit := r.child.exit
	text := fmt.Sprintf("the shim died at its start: it %s, with %s", exit.how(), r.greeter.seen())
	if exit.Code == bootstrap.ExitNotAPlugin || r.refusedCookie() {
		text += "; it did not take this host's cookie, so it is a plugin of another program: " + giveShim
	} else if r.greeter.text() == "" && !exit.Outside() {
		text += "; if its last lines do not say why, it may be no shim: " + giveShim
	}
	return &startError{text: text, exit: exit}
}

// DeathNoticed is how long to wait for the exit that explains a broken connection. The kernel closes the connections of a
// process long before its exit if one of its threads waits for a disk.
const DeathNoticed = 5 * time.Second

// explainDeath returns err, of a shim that has sent its handshake, with how the shim died if it did so unasked.
func (r *runner) explainDeath(err error) error {
	if r.ctx.Err() != nil || r.child.asked.Load() {
		return err
	}
	select {
	case <-r.child.done:
		return &startError{text: fmt.Sprintf("the shim died at its start: it %s: %v", r.child.exit.how(), err), exit: r.child.exit}
	case <-time.After(DeathNoticed):
	case <-r.ctx.Done():
	}
	return err
}

// refusedCookie knows the words with which every go-plugin server refuses. Only the hint depends on it.
func (r *runner) refusedCookie() bool {
	return r.child.exit.Code == 1 && strings.Contains(strings.Join(r.scribe.last(), "\n"), "This binary is a plugin")
}

func (r *runner) tooLate(what string) error {
	return registry.Errorf(registry.ErrUnavailable, "the shim %s: gave up starting it: %w", what, context.Cause(r.ctx))
}

// startError is a death at start. Its kind is ErrUnavailable, and errors.AsType finds the Exit.
type startError struct {
	text string
	exit *Exit
}

func (e *startError) Error() string   { return e.text }
func (e *startError) Unwrap() []error { return []error{registry.ErrUnavailable, e.exit} }

// fail ends the process and adds what it said last.
func (r *runner) fail(err error) error {
	killed := r.Kill(context.WithoutCancel(r.ctx))
	if killed == nil {
		r.readers.Wait()
	}
	return errors.Join(&sayingError{err: err, lines: r.scribe.last()}, killed)
}

// sayingError shows the shim's own last lines below an error about it.
type sayingError struct {
	err   error
	lines []string
}

func (e *sayingError) Error() string { return withLines(e.err.Error(), e.lines) }
func (e *sayingError) Unwrap() error { return e.err }

// Stdout is the handshake line, and no more.
func (r *runner) Stdout() io.ReadCloser {
	return io.NopCloser(strings.NewReader(r.greeter.text() + "\n"))
}

// Stderr is empty: our own reader takes the real one.
func (r *runner) Stderr() io.ReadCloser { return io.NopCloser(strings.NewReader("")) }

// Wait ends at the real death.
func (r *runner) Wait(ctx context.Context) error {
	select {
	case <-r.child.done:
		return r.child.exit
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Kill is SIGKILL, and the wait for the death with our own deadline.
func (r *runner) Kill(ctx context.Context) error {
	if r.child == nil {
		return nil
	}
	err := r.child.killAndWait(ctx)
	_ = r.child.life.Close()
	return err
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
