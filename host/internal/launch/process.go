package launch

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	hclog "github.com/hashicorp/go-hclog"
	plugin "github.com/hashicorp/go-plugin"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"

	"holdfast/proto/bootstrap"
	"holdfast/registry"
)

// Process is one shim that runs, or has run. It is safe for concurrent use.
type Process struct {
	runner     *runner
	client     *plugin.Client
	conn       *grpc.ClientConn
	dir        *socketDir
	generation uint64
	release    func()
	store      *Store
	database   string
	log        hclog.Logger
	tidied     chan struct{} // closed once it is dead, and what can be removed of it is
}

// Start executes the binary of opts.Digest and returns once it answers. ctx bounds the start only. A failed Start leaves
// no process, file or descriptor behind, and its error says what the shim said last.
func Start(ctx context.Context, opts Options) (*Process, error) {
	if err := opts.complete(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, opts.StartTimeout,
		registry.Errorf(registry.ErrUnavailable, "no answer within %v", opts.StartTimeout))
	defer cancel()
	binary, err := opts.Store.acquire(ctx, opts.Digest)
	if err != nil {
		return nil, err
	}
	defer binary.Close()
	release := sync.OnceFunc(func() { opts.Store.release(opts.Digest.SHA256) })
	if err := removeOrphans(opts.RunDir); err != nil {
		opts.Logger.Warn("cannot remove what an earlier host has left", "error", err) // it does not hinder this start
	}
	dir, err := newSocketDir(opts.RunDir, opts.Generation)
	if err != nil {
		release()
		return nil, err
	}
	p := &Process{
		runner: newRunner(ctx, binary, dir.path, opts), dir: dir, generation: opts.Generation, release: release,
		store: opts.Store, database: opts.Database, log: opts.Logger, tidied: make(chan struct{}),
	}
	if err := p.start(ctx, opts); err != nil {
		return nil, fmt.Errorf("start shim %.12s as generation %d: %w", opts.Digest.SHA256, opts.Generation, err)
	}
	return p, nil
}

func (p *Process) start(ctx context.Context, opts Options) error {
	p.client = plugin.NewClient(&plugin.ClientConfig{
		HandshakeConfig:  bootstrap.Handshake(),
		VersionedPlugins: bootstrap.Client(),
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC},
		AutoMTLS:         true,
		SkipHostEnv:      true,
		RunnerFunc:       p.runner.prepare,
		UnixSocketConfig: &plugin.UnixSocketConfig{TempDir: p.dir.path},
		StartTimeout:     2 * opts.StartTimeout, // ours is the one that ends a start
		Logger:           quiet{opts.Logger.Named("go-plugin")},
		GRPCDialOptions:  p.runner.dialOptions(opts.StartTimeout),
	})
	if _, err := p.client.Start(); err != nil {
		return errors.Join(err, p.abandon())
	}
	go p.tidyAfterDeath()
	err := p.connect(ctx)
	if err == nil {
		err = checkNamespace(p.PID())
	}
	if err != nil {
		err = p.runner.fail(p.runner.explainDeath(err))
		if p.Err() == nil { // it does not die: the error says so
			return err
		}
		<-p.tidied
		return err
	}
	return nil
}

// abandon removes what is left of a start that go-plugin has given up. A process that does not die keeps what it has.
func (p *Process) abandon() error {
	if err := p.runner.Kill(context.WithoutCancel(p.runner.ctx)); err != nil {
		return err
	}
	p.runner.readers.Wait()
	p.client.Kill()
	p.endHeirs()
	p.release()
	return p.dir.remove()
}

// connect gets the connection and one answer. go-plugin's own call has no deadline: a frozen shim would hold it for ever.
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
		return p.runner.tooLate("sent a handshake, but did not take a connection")
	}
	service := &grpc_health_v1.HealthCheckRequest{Service: plugin.GRPCServiceName}
	_, err := grpc_health_v1.NewHealthClient(p.conn).Check(ctx, service)
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return p.runner.tooLate("sent a handshake, but did not answer")
	}
	return registry.Errorf(registry.ErrUnavailable, "ask the shim whether it serves: %w", err)
}

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

// tidyAfterDeath removes what the process leaves. What cannot be removed is no reason to take it for alive: the next start tries again. go-plugin's
// Kill is safe by then: it has nobody left to wait for.
func (p *Process) tidyAfterDeath() {
	<-p.runner.child.done
	p.runner.readers.Wait()
	p.client.Kill()
	p.endHeirs()
	if err := p.dir.remove(); err != nil {
		p.log.Warn("a dead shim has left something that cannot be removed", "pid", p.PID(), "error", err)
	}
	p.release()
	close(p.tidied)
}

// Conn is the connection to the shim. It fails all calls once the process is dead; it is not the caller's to close.
func (p *Process) Conn() *grpc.ClientConn { return p.conn }

// PID is the number of the process, which is another's once Done is closed.
func (p *Process) PID() int { return p.runner.child.pid }

// Protocol is the version that the shim and this host have agreed on: the highest that both speak.
func (p *Process) Protocol() int { return p.client.NegotiatedVersion() }

// Generation is what Start was given.
func (p *Process) Generation() uint64 { return p.generation }

// Done is closed at the real death of the process.
func (p *Process) Done() <-chan struct{} { return p.runner.child.done }

// Err is nil while the process lives; afterwards it is the *Exit.
func (p *Process) Err() error {
	select {
	case <-p.Done():
		return p.runner.child.exit
	default:
		return nil
	}
}

// LastLines are the last lines that the shim has written to stderr, oldest first. Of a dead one they are all there: it waits until they are read.
func (p *Process) LastLines() []string {
	if p.Err() != nil {
		p.runner.readers.Wait()
	}
	return p.runner.scribe.last()
}

// Kill ends the process with SIGKILL and returns once it is dead and what it had is removed, at the latest when ctx ends, or
// after 10 s. An error means that it may still live, and nothing else; Done tells when it does not. It may be called again. The calls that it has
// end in any case.
func (p *Process) Kill(ctx context.Context) error {
	if err := p.runner.child.killAndWait(ctx); err != nil {
		_ = p.conn.Close()
		return err
	}
	p.awaitTidied(ctx)
	return nil
}

// Stop tells the shim to end and returns like Kill, which it becomes once grace is over or ctx has ended.
func (p *Process) Stop(ctx context.Context, grace time.Duration) error {
	p.runner.child.letGo()
	timeout := time.NewTimer(grace)
	defer timeout.Stop()
	select {
	case <-p.Done():
		p.awaitTidied(ctx)
		return nil
	case <-timeout.C:
	case <-ctx.Done():
	}
	return p.Kill(ctx)
}

func (p *Process) awaitTidied(ctx context.Context) {
	select {
	case <-p.tidied:
	case <-ctx.Done():
	}
}

// quiet makes all of go-plugin's talk trace: what matters in it, our errors say.
type quiet struct{ hclog.Logger }

func (q quiet) Log(_ hclog.Level, msg string, args ...any) { q.Logger.Trace(msg, args...) }
func (q quiet) Debug(msg string, args ...any)              { q.Logger.Trace(msg, args...) }
func (q quiet) Info(msg string, args ...any)               { q.Logger.Trace(msg, args...) }
func (q quiet) Warn(msg string, args ...any)               { q.Logger.Trace(msg, args...) }
func (q quiet) Error(msg string, args ...any)              { q.Logger.Trace(msg, args...) }
func (q quiet) With(args ...any) hclog.Logger              { return quiet{q.Logger.With(args...)} }
func (q quiet) Named(name string) hclog.Logger             { return quiet{q.Logger.Named(name)} }
func (q quiet) ResetNamed(name string) hclog.Logger        { return quiet{q.Logger.ResetNamed(name)} }
