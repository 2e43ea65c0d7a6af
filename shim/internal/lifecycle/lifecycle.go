package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"

	"holdfast/internal/tracing"
	"holdfast/internal/tracing/otlp"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/rpc"
	"holdfast/shim/internal/store"
)

// Process is one shim process.
type Process struct {
	version   string
	log       hclog.Logger
	callbacks *rpc.Callbacks
	server    *rpc.Server
	fatal     chan error // buffers the first reason why the process has to end
	metrics   csi.CallMetrics

	// Traces exports the spans of calls; nil: none are made. Set before Register.
	Traces *otlp.Exporter

	// Committing is called with each change of the store before and after its commit, and with each shared one before
	// it is sent to etcd; nil: nothing is called. Tests end the process there. Set before Register.
	Committing func(at CommitPoint, c registry.Change)

	life context.Context // the context of the process; set by Register

	// transition is held while the active state is built, quiesced or closed. It guards releasedAt and rehearsed.
	transition sync.Mutex
	releasedAt registry.Revision // generation and index at the last Release
	rehearsed  *csi.Fleet        // connections that a rehearsal has made, for the next activation; nil: there are none

	mu     sync.Mutex // guards state, hello and active; held for a lookup only
	state  State
	hello  *rpc.Hello
	active *activeState // nil unless the shim is active or quiesced

	closing sync.WaitGroup // connections and files that Release closes later
}

// CommitPoint is a moment before or after a commit.
type CommitPoint int

// The moments of a commit.
const (
	BeforeStore CommitPoint = iota
	AfterStore              // before the caller of the commit, or any other part of the process, sees the change
	BeforeEtcd
)

// committing returns a function that calls Committing for the given point.
func (p *Process) committing(at CommitPoint) func(registry.Change) {
	return func(c registry.Change) {
		if p.Committing != nil {
			p.Committing(at, c)
		}
	}
}

// New returns a Process in the state Candidate.
func New(version string, log hclog.Logger) *Process {
	p := &Process{
		version: version, log: log, callbacks: rpc.NewCallbacks(), fatal: make(chan error, 1),
		state: Candidate,
	}
	p.server = rpc.New(p, p.callbacks, log)
	return p
}

// Register registers the services at g. They serve until life ends.
func (p *Process) Register(life context.Context, g grpc.ServiceRegistrar) {
	p.life = life
	p.server.Register(g)
}

// ServerOptions returns the options of the server that Register is called with.
func (p *Process) ServerOptions() []grpc.ServerOption {
	options := []grpc.ServerOption{
		grpc.UnknownServiceHandler(p.server.PassCSI), grpc.ChainUnaryInterceptor(p.server.PassToExecutor),
	}
	if traces := p.Traces.Provider(); traces != nil {
		options = append(options, grpc.StatsHandler(tracing.NewServerHandler(traces)))
	}
	return options
}

// Run returns when the process has to end: ctx has ended, or the store or a loop has failed. After a failure it closes
// nothing, because closing may block, and nothing durable depends on it.
func (p *Process) Run(ctx context.Context) error {
	select {
	case err := <-p.fatal:
		p.server.Set(nil)
		_, _ = p.move(Gone) // this move is always legal
		return err
	case <-ctx.Done():
		return p.end()
	}
}

// end closes the active state, if there is one.
func (p *Process) end() error {
	p.server.Set(nil)
	p.transition.Lock()
	defer p.transition.Unlock()
	_, _ = p.move(Gone) // this move is always legal
	p.closeRehearsed()
	defer p.closing.Wait()
	r := p.take()
	if r == nil {
		return nil
	}
	return r.close()
}

// fail ends the process because of err.
func (p *Process) fail(err error) {
	select {
	case p.fatal <- err:
	default: // the first reason is enough
	}
}

// current returns the active state, or nil if the shim is neither active nor quiesced.
func (p *Process) current() *activeState {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.active
}

// move changes the state to to, if that is legal. It returns the previous state.
func (p *Process) move(to State) (was State, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	was = p.state
	p.state, err = was.move(to)
	return was, err
}

// take passes the ownership of the active state to the caller. It returns nil if there is none.
func (p *Process) take() *activeState {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.active
	p.active = nil
	return r
}

// Hello stores what the host reports about itself. While the shim owns its state, a report of other directories or
// another node name is an ErrConflict.
func (p *Process) Hello(_ context.Context, h rpc.Hello) (rpc.Status, error) {
	if err := p.setHello(&h); err != nil {
		return rpc.Status{}, err
	}
	return p.Status(), nil
}

func (p *Process) setHello(h *rpc.Hello) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	ownsState := p.state != Candidate && p.state != Released
	if was := p.hello; ownsState && was != nil && (was.StateDir != h.StateDir || was.RunDir != h.RunDir ||
		was.Node != h.Node) {
		return registry.Errorf(registry.ErrConflict,
			"this shim is active for node %s at %s; start another one for node %s at %s",
			was.Node, was.StateDir, h.Node, h.StateDir)
	}
	p.hello = h
	return nil
}

// Status reports the state of the process. It does not wait for a transition.
func (p *Process) Status() rpc.Status {
	p.mu.Lock()
	state, r := p.state, p.active
	p.mu.Unlock()
	st := rpc.Status{
		Version: p.version, Lifecycle: state.proto(), SchemaFrom: store.Oldest, SchemaTo: store.Newest,
		PID: os.Getpid(),
	}
	if r != nil {
		r.describe(&st)
	}
	return st
}

// observer returns the Observer of CSI calls.
func (p *Process) observer() csi.Observer {
	return csi.Observer{Metrics: &p.metrics, Traces: p.Traces.Provider()}
}

// CallMetrics returns the counts of all CSI calls of the process, whatever its state.
func (p *Process) CallMetrics() []registry.CallMetric { return p.metrics.List() }

// Activate makes a candidate the active shim. After a failure the process is in the previous state. A quiesced shim,
// which still owns its state, serves again. An active shim continues if h.Resume is set.
func (p *Process) Activate(ctx context.Context, h rpc.Handover) error {
	p.transition.Lock()
	defer p.transition.Unlock()
	state, hello := p.stateAndHello()
	switch {
	case hello == nil:
		return registry.Errorf(registry.ErrConflict, "the host has not sent Hello to this shim yet")
	case state == Quiesced:
		_, err := p.move(Active)
		p.server.Resume()
		return err
	case state == Active && h.Resume:
		return nil // the host resumes after a Quiesce that has not arrived
	}
	return p.activate(ctx, hello, h)
}

func (p *Process) activate(ctx context.Context, hello *rpc.Hello, h rpc.Handover) error {
	was, err := p.move(Activating)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(p.life, func() { cancel(context.Cause(p.life)) })()
	in := p.handoffOf(h)
	r, err := open(ctx, p, hello, in)
	if err != nil {
		p.closeRehearsed()
		_, _ = p.move(was) // this move is legal
		return fmt.Errorf("activate: %w", err)
	}
	p.rehearsed = nil
	if _, err := p.move(Active); err != nil { // the store has failed already
		return errors.Join(err, r.close())
	}
	p.mu.Lock()
	p.active = r
	p.mu.Unlock()
	p.server.Set(&r.Active)
	p.server.Resume()
	return nil
}

func (p *Process) stateAndHello() (State, *rpc.Hello) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.state, p.hello
}

// Quiesce refuses new mutating calls. It returns the number of open intents. It may be called again.
func (p *Process) Quiesce(ctx context.Context) (openIntents int, err error) {
	p.transition.Lock()
	defer p.transition.Unlock()
	if ctx.Err() != nil { // the caller has given up, and may have sent Activate meanwhile
		return 0, context.Cause(ctx)
	}
	if _, err := p.move(Quiesced); err != nil {
		return 0, err
	}
	p.server.Quiesce()
	return p.Status().OpenIntents, nil
}

// lastCalls bounds how long Release waits for the calls that it has cancelled.
const lastCalls = 2 * time.Second

// Release cancels the calls in flight and closes the store and the connections. From then on this shim writes nothing
// and calls no plugin.
func (p *Process) Release(ctx context.Context) (registry.Revision, error) {
	p.transition.Lock()
	defer p.transition.Unlock()
	if _, err := p.move(Releasing); err != nil {
		return registry.Revision{}, err
	}
	r := p.current()
	r.stopWorkers(errReleased)
	waiting, cancel := context.WithTimeout(ctx, lastCalls)
	defer cancel()
	p.server.Quiesce()
	if err := p.server.AwaitCalls(waiting); err != nil {
		p.log.Warn("calls did not end in time; their intents are stored", "error", err)
	}
	p.server.Set(nil) // reads were served until now
	p.take()
	rest, err := r.release()
	p.closing.Go(func() {
		rest()
		p.Traces.Flush(p.life) // the process may be killed before it ends
	})
	p.releasedAt = registry.Revision{Generation: r.store.Generation(), Index: r.store.Index()}
	_, _ = p.move(Released) // this move is legal
	return p.releasedAt, err
}

// Snapshot writes a consistent copy of the state in chunks, and returns its index.
func (p *Process) Snapshot(ctx context.Context, write func([]byte) error) (registry.Seq, error) {
	r := p.current()
	if r == nil {
		return 0, registry.Errorf(registry.ErrUnavailable, "this shim is not active: it has no state")
	}
	return r.store.Snapshot(ctx, chunks(write))
}

// chunkSize is the size of one chunk in bytes.
const chunkSize = 1 << 20

// chunks is an io.Writer that splits its input into chunks.
type chunks func([]byte) error

func (c chunks) Write(b []byte) (int, error) {
	for at := 0; at < len(b); at += chunkSize {
		if err := c(b[at:min(at+chunkSize, len(b))]); err != nil {
			return at, err
		}
	}
	return len(b), nil
}
