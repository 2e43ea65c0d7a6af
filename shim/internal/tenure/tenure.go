package tenure

import (
	"context"
	"fmt"
	"os"
	"sync"

	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"

	"holdfast/registry"
	"holdfast/shim/internal/serve"
	"holdfast/shim/internal/store"
)

// Tenure is one shim process.
type Tenure struct {
	version   string
	log       hclog.Logger
	callbacks *serve.Callbacks
	server    *serve.Server
	fatal     chan error // takes the first reason why the process has to end

	mu    sync.Mutex // guards all below; held while a reign is built or taken down: those are one at a time
	state State
	hello *serve.Hello
	reign *reign
	life  context.Context // of the process
}

// New is a candidate.
func New(version string, log hclog.Logger) *Tenure {
	t := &Tenure{version: version, log: log, callbacks: &serve.Callbacks{}, fatal: make(chan error, 1), state: Candidate}
	t.server = serve.New(t, t.callbacks, log)
	return t
}

// Register puts the services on g. They are called for as long as life lasts.
func (t *Tenure) Register(life context.Context, g grpc.ServiceRegistrar) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.life = life
	t.server.Register(g)
}

// Run returns when the process has to end: its context has ended, or the store has failed.
func (t *Tenure) Run(ctx context.Context) error {
	select {
	case err := <-t.fatal:
		return err
	case <-ctx.Done():
		return t.end()
	}
}

// end takes the reign down, if there is one. What it cannot do in time, the end of the process does.
func (t *Tenure) end() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.state = Gone
	t.server.Set(nil)
	if t.reign == nil {
		return nil
	}
	err := t.reign.close()
	t.reign = nil
	return err
}

// fail has the process end for err.
func (t *Tenure) fail(err error) {
	select {
	case t.fatal <- err:
	default: // one reason is enough
	}
}

// Hello takes down what the host says of itself. The directories of an active shim do not change.
func (t *Tenure) Hello(_ context.Context, h serve.Hello) (serve.Status, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.reign != nil && (t.hello.StateDir != h.StateDir || t.hello.RunDir != h.RunDir || t.hello.Node != h.Node) {
		return serve.Status{}, registry.Errorf(registry.ErrConflict, "this shim is active for %s at %s", t.hello.Node, t.hello.StateDir)
	}
	t.hello = &h
	return t.status(), nil
}

// Status is what the shim says of itself.
func (t *Tenure) Status() serve.Status {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.status()
}

func (t *Tenure) status() serve.Status {
	st := serve.Status{
		Version: t.version, Tenure: t.state.proto(), SchemaFrom: store.Oldest, SchemaTo: store.Newest, PID: os.Getpid(),
	}
	if t.reign != nil {
		t.reign.describe(t.life, &st)
	}
	return st
}

// Activate makes a candidate the active shim.
func (t *Tenure) Activate(ctx context.Context) (err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.hello == nil {
		return registry.Errorf(registry.ErrConflict, "nobody has said Hello to this shim yet")
	}
	was := t.state
	if t.state, err = t.state.move(Activating); err != nil {
		return err
	}
	r, err := open(ctx, t)
	if err != nil {
		t.state = was
		return fmt.Errorf("activate: %w", err)
	}
	t.reign, t.state = r, Active
	t.server.Set(r.active())
	t.server.Resume()
	return nil
}

// Quiesce refuses new mutating calls and waits for those under way, until ctx ends. What is still open then has its intent stored.
func (t *Tenure) Quiesce(ctx context.Context) (openIntents int, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state, err = t.state.move(Quiesced); err != nil {
		return 0, err
	}
	waited := t.server.Quiesce(ctx)
	st := t.status()
	if waited != nil {
		t.log.Info("calls are still under way", "intents", st.OpenIntents)
	}
	return st.OpenIntents, nil
}

// Release closes the store and the connections: from now on this shim writes nothing and calls nobody.
func (t *Tenure) Release(context.Context) (err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.state, err = t.state.move(Releasing); err != nil {
		return err
	}
	t.server.Set(nil)
	err = t.reign.close()
	t.reign, t.state = nil, Released
	return err
}

// Snapshot writes a consistent copy of the state, in pieces.
func (t *Tenure) Snapshot(ctx context.Context, write func([]byte) error) (registry.Seq, error) {
	t.mu.Lock()
	r := t.reign
	t.mu.Unlock()
	if r == nil {
		return 0, registry.Errorf(registry.ErrUnavailable, "this shim is not active: it has no state")
	}
	return r.store.Snapshot(ctx, pieces(write))
}

// piece is how much of a copy goes into one message, in bytes.
const piece = 1 << 20

// pieces is a writer that cuts what it is given into messages.
type pieces func([]byte) error

func (p pieces) Write(b []byte) (int, error) {
	for at := 0; at < len(b); at += piece {
		if err := p(b[at:min(at+piece, len(b))]); err != nil {
			return at, err
		}
	}
	return len(b), nil
}
