package launch

import (
	"context"
	"errors"
	"fmt"
	"time"

	hclog "github.com/hashicorp/go-hclog"
	plugin "github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"

	"holdfast/proto/bootstrap"
	"holdfast/registry"
)

// Running is one shim process: a *Process, or a substitute in package hosttest. See Process for its methods.
type Running interface {
	Conn() *grpc.ClientConn
	PID() int
	Protocol() int
	LastLines() []string
	Done() <-chan struct{}
	Err() error
	Stop(ctx context.Context, grace time.Duration) error
	Kill(ctx context.Context) error
}

// Starter starts a shim, as Start does.
type Starter func(ctx context.Context, opts Options) (Running, error)

// Process is one shim that runs, or has run. It is safe for concurrent use.
type Process struct {
	runner  *runner
	client  *plugin.Client
	conn    *grpc.ClientConn
	dir     *socketDir
	log     hclog.Logger
	cleaned chan struct{} // closed once it is dead, and its files are removed as far as possible
}

// Start executes the binary of opts.Digest and returns once it answers. ctx bounds the start only. A failed Start
// leaves no process, file or descriptor behind, and its error has the shim's last lines.
func Start(ctx context.Context, opts Options) (*Process, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, opts.StartTimeout,
		registry.Errorf(registry.ErrUnavailable, "no answer within %v", opts.StartTimeout))
	defer cancel()
	binary, err := opts.Store.open(ctx, opts.Digest.SHA256)
	if err != nil {
		return nil, err
	}
	defer binary.Close()
	if err := removeOrphans(opts.RunDir); err != nil {
		opts.Logger.Warn("cannot remove files of an earlier host", "error", err) // this start continues
	}
	dir, err := newSocketDir(opts.RunDir, opts.Generation)
	if err != nil {
		return nil, err
	}
	p := &Process{
		runner: newRunner(ctx, binary, dir.path, opts), dir: dir, log: opts.Logger,
		cleaned: make(chan struct{}),
	}
	if err := p.start(ctx, opts); err != nil {
		return nil, fmt.Errorf("start shim %.12s as generation %d: %w", opts.Digest.SHA256, opts.Generation, err)
	}
	return p, nil
}

// start runs the binary through go-plugin and connects to it. After an error it kills the process.
func (p *Process) start(ctx context.Context, opts Options) error {
	config, cert, err := bootstrap.ClientTLS()
	if err != nil {
		return errors.Join(fmt.Errorf("prepare TLS: %w", err), p.dir.remove())
	}
	p.runner.cert = cert
	p.client = plugin.NewClient(&plugin.ClientConfig{
		HandshakeConfig:  bootstrap.Handshake(),
		VersionedPlugins: bootstrap.Client(),
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC},
		TLSConfig:        config, // instead of AutoMTLS: see bootstrap.ClientTLS
		SkipHostEnv:      true,
		RunnerFunc:       p.runner.prepare,
		UnixSocketConfig: &plugin.UnixSocketConfig{TempDir: p.dir.path},
		StartTimeout:     2 * opts.StartTimeout, // our own timeout ends a start first
		Logger:           hclog.NewNullLogger(), // our errors include what matters of its messages
		GRPCDialOptions:  p.runner.dialOptions(opts),
	})
	_, err = p.client.Start()
	if p.runner.child == nil { // nothing was executed
		p.client.Kill()
		return errors.Join(err, p.dir.remove())
	}
	go p.cleanAfterDeath()
	if err == nil {
		if err = p.connect(ctx); err != nil {
			err = p.runner.explainDeath(err)
		} else if err = checkNamespace(p.PID()); err == nil {
			return nil
		}
	}
	err = p.runner.killFailed(err)
	if p.Err() != nil { // else the process does not die, and the error says so
		<-p.cleaned
	}
	return err
}

// connect gets the connection and one answer. go-plugin's own call has no deadline: a frozen shim would block it for
// ever.
func (p *Process) connect(ctx context.Context) error {
	connected := make(chan error, 1)
	go func() { connected <- p.dispense() }()
	select {
	case err := <-connected:
		if err != nil {
			return fmt.Errorf("connect to the shim: %w", err)
		}
	case <-ctx.Done():
		_ = p.runner.child.kill() // which also ends dispense
		<-connected
		return p.runner.timeoutError("sent a handshake, but did not take a connection")
	}
	service := &grpc_health_v1.HealthCheckRequest{Service: plugin.GRPCServiceName}
	_, err := grpc_health_v1.NewHealthClient(p.conn).Check(ctx, service)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return p.runner.timeoutError("sent a handshake, but did not answer")
	}
	return registry.Errorf(registry.ErrUnavailable, "ask the shim whether it serves: %w", err)
}

// dispense sets p.conn to go-plugin's connection to the shim.
func (p *Process) dispense() error {
	protocol, err := p.client.Client()
	if err != nil {
		return err
	}
	conn, err := protocol.Dispense(bootstrap.PluginName)
	if err != nil {
		return err
	}
	p.conn = conn.(*grpc.ClientConn) // bootstrap.Client promises it
	return nil
}

// cleanAfterDeath waits for the death of the process, and removes its files. It logs what it cannot remove; the next
// start tries again. go-plugin's Kill is safe here, because the process is dead.
func (p *Process) cleanAfterDeath() {
	<-p.runner.child.done
	p.client.Kill()
	if err := p.dir.remove(); err != nil {
		p.log.Warn("cannot remove the files of a dead shim", "pid", p.PID(), "error", err)
	}
	close(p.cleaned)
}

// Conn returns the connection to the shim. It fails all calls once the process is dead. The caller must not close it.
func (p *Process) Conn() *grpc.ClientConn { return p.conn }

// PID returns the process ID. Once Done is closed, another process may have it.
func (p *Process) PID() int { return p.runner.child.pid }

// Protocol returns the version that the shim and this host agreed on: the highest that both speak.
func (p *Process) Protocol() int { return p.client.NegotiatedVersion() }

// Done returns a channel that is closed once the process is dead. Its output is read by then, as far as possible.
func (p *Process) Done() <-chan struct{} { return p.runner.child.done }

// Err returns nil while the process lives, then the *Exit.
func (p *Process) Err() error {
	select {
	case <-p.Done():
		return p.runner.child.exit
	default:
		return nil
	}
}

// LastLines returns the last lines that the shim has written to stderr, oldest first. If it is dead, they are complete,
// unless the logger blocks.
func (p *Process) LastLines() []string { return p.runner.stderr.last() }

// Kill ends the process with SIGKILL and returns once it is dead and its files are removed, at the latest when ctx
// ends, or after 10 s. An error means that the process may still live. Kill may be called again. Calls to the shim end
// in any case.
func (p *Process) Kill(ctx context.Context) error {
	if err := p.runner.child.killAndWait(ctx); err != nil {
		_ = p.conn.Close()
		return err
	}
	p.awaitCleaned(ctx)
	return nil
}

// Stop tells the shim to end, and kills it once grace is over or ctx has ended.
func (p *Process) Stop(ctx context.Context, grace time.Duration) error {
	p.runner.child.closeLife()
	timeout := time.NewTimer(grace)
	defer timeout.Stop()
	select {
	case <-p.Done():
		p.awaitCleaned(ctx)
		return nil
	case <-timeout.C:
	case <-ctx.Done():
	}
	return p.Kill(ctx)
}

func (p *Process) awaitCleaned(ctx context.Context) {
	select {
	case <-p.cleaned:
	case <-ctx.Done():
	}
}
