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

	"holdfast/registry"
	"holdfast/shim/internal/rpc"
	"holdfast/shim/internal/store"
)

// Tenure is one shim process.
type Tenure struct {
	version   string
	log       hclog.Logger
	callbacks *rpc.Callbacks
	server    *rpc.Server
	fatal     chan error // takes the first reason why the process has to end

	life context.Context // of the process; set by Register

	moving sync.Mutex // held while a reign is built, quiesced or taken down: one of those at a time

	mu    sync.Mutex // guards all below; held for no longer than a look-up
	state State
	hello *rpc.Hello
	reign *reign
	left  rpc.Left // as what this shim has left the state, once it was released

	resting sync.WaitGroup // what a released reign closes later
	ended   chan struct{}  // closed by end
	learnt  *learnt        // from a rehearsal; used once. Guarded by moving
	decoded *store.Decoded // of the state, and of the copy that was rehearsed with
}

// New is a candidate.
func New(version string, log hclog.Logger) *Tenure {
	t := &Tenure{
		version: version, log: log, callbacks: &rpc.Callbacks{}, fatal: make(chan error, 1), ended: make(chan struct{}), state: Candidate,
		decoded: store.NewDecoded(),
	}
	t.server = rpc.New(t, t.callbacks, log)
	return t
}

// Register puts the services on g. They are called for as long as life lasts.
func (t *Tenure) Register(life context.Context, g grpc.ServiceRegistrar) {
	t.life = life
	t.server.Register(g)
}

// Run returns when the process has to end: its context has ended, or the store has failed. After a failure nothing is taken down: what
// does not write any more might not end either, and nothing durable needs it.
func (t *Tenure) Run(ctx context.Context) error {
	select {
	case err := <-t.fatal:
		t.server.Set(nil)
		_, _ = t.move(Gone) // is always legal
		return err
	case <-ctx.Done():
		return t.end()
	}
}

// end takes the reign down, if there is one. What it cannot do in time, the end of the process does.
func (t *Tenure) end() error {
	t.server.Set(nil)
	t.moving.Lock()
	defer t.moving.Unlock()
	_, _ = t.move(Gone) // is always legal
	t.learnt.forget()
	close(t.ended)
	defer t.resting.Wait()
	r := t.take()
	if r == nil {
		return nil
	}
	return r.close()
}

// fail has the process end for err.
func (t *Tenure) fail(err error) {
	select {
	case t.fatal <- err:
	default: // one reason is enough
	}
}

// current is the reign; nil: there is none, as the shim is neither active nor quiesced.
func (t *Tenure) current() *reign {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.reign
}

// move changes the state, if that is legal, and returns what it was.
func (t *Tenure) move(to State) (was State, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	was = t.state
	t.state, err = was.move(to)
	return was, err
}

// take is the reign, which is the caller's from now on; nil if there is none.
func (t *Tenure) take() *reign {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.reign
	t.reign = nil
	return r
}

// Hello takes down what the host says of itself. The directories of an active shim do not change.
func (t *Tenure) Hello(_ context.Context, h rpc.Hello) (rpc.Status, error) {
	if err := t.greet(&h); err != nil {
		return rpc.Status{}, err
	}
	return t.Status(), nil
}

func (t *Tenure) greet(h *rpc.Hello) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	settled := t.state != Candidate && t.state != Released
	if was := t.hello; settled && was != nil && (was.StateDir != h.StateDir || was.RunDir != h.RunDir || was.Node != h.Node) {
		return registry.Errorf(registry.ErrConflict, "this shim is active for node %s at %s; start another one for node %s at %s",
			was.Node, was.StateDir, h.Node, h.StateDir)
	}
	t.hello = h
	return nil
}

// Status is what the shim says of itself. It waits for no move.
func (t *Tenure) Status() rpc.Status {
	t.mu.Lock()
	state, r := t.state, t.reign
	t.mu.Unlock()
	st := rpc.Status{
		Version: t.version, Tenure: state.proto(), SchemaFrom: store.Oldest, SchemaTo: store.Newest, PID: os.Getpid(),
	}
	if r != nil {
		r.describe(&st)
	}
	return st
}

// Activate makes a candidate the active shim; when it fails the shim is what it was before. A quiesced shim goes on: it still owns its state.
// So does an active one that is to go on.
func (t *Tenure) Activate(ctx context.Context, h rpc.Handover) error {
	t.moving.Lock()
	defer t.moving.Unlock()
	state, hello := t.greeted()
	switch {
	case hello == nil:
		return registry.Errorf(registry.ErrConflict, "nobody has said Hello to this shim yet")
	case state == Quiesced:
		_, err := t.move(Active)
		t.current().pause.End()
		t.server.Resume()
		return err
	case state == Active && h.Resume:
		return nil // it was asked to be quiet, and has not come to it
	}
	return t.reigns(ctx, hello, h)
}

func (t *Tenure) reigns(ctx context.Context, hello *rpc.Hello, h rpc.Handover) error {
	was, err := t.move(Activating)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(t.life, func() { cancel(context.Cause(t.life)) })()
	in := t.inherited(h)
	r, err := open(ctx, t, hello, in)
	if err != nil {
		in.learnt.forget()
		_, _ = t.move(was) // is legal
		return fmt.Errorf("activate: %w", err)
	}
	if _, err := t.move(Active); err != nil { // its store has failed already
		return errors.Join(err, r.close())
	}
	t.mu.Lock()
	t.reign = r
	t.mu.Unlock()
	t.server.Set(r.active())
	t.server.Resume()
	return nil
}

func (t *Tenure) greeted() (State, *rpc.Hello) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.state, t.hello
}

// Quiesce refuses new mutating calls and waits for those under way, until ctx ends; with long only for those that have not been under way for so
// long, and none begins another CSI call. What is still open then has its intent stored. A quiesced shim that is told so again waits again.
func (t *Tenure) Quiesce(ctx context.Context, long time.Duration) (openIntents int, err error) {
	t.moving.Lock()
	defer t.moving.Unlock()
	if ctx.Err() != nil { // nobody waits for it any more, and may have said so by an Activate that came first
		return 0, context.Cause(ctx)
	}
	if _, err := t.move(Quiesced); err != nil {
		return 0, err
	}
	if r := t.current(); long > 0 {
		r.pause.Begin()
	} else { // all of it is waited for
		r.pause.End()
	}
	waited := t.server.Quiesce(ctx, long)
	st := t.Status()
	if waited != nil {
		t.log.Info("calls are still under way", "intents", st.OpenIntents)
	}
	return st.OpenIntents, nil
}

// lastCalls is how long calls may take to end that Release has cut off.
const lastCalls = 2 * time.Second

// Release cuts off the calls under way, and closes the store and the connections: from now on this shim writes nothing and calls nobody.
func (t *Tenure) Release(ctx context.Context) (rpc.Left, error) {
	t.moving.Lock()
	defer t.moving.Unlock()
	if _, err := t.move(Releasing); err != nil {
		return rpc.Left{}, err
	}
	r := t.current()
	r.stop(errReleased)
	waiting, cancel := context.WithTimeout(ctx, lastCalls)
	defer cancel()
	if err := t.server.Quiesce(waiting, 0); err != nil {
		t.log.Warn("calls did not end in time; their intents are stored", "error", err)
	}
	t.server.Set(nil) // until now calls were answered that change nothing
	t.take()
	rest, err := r.release()
	t.resting.Go(func() {
		select {
		case <-time.After(calm): // the next shim has better use for the processor now
		case <-t.ended:
		}
		if err := rest(); err != nil {
			t.log.Warn("what was released is not closed", "error", err)
		}
	})
	t.left = rpc.Left{Generation: r.store.Generation(), Index: r.store.Index()}
	_, _ = t.move(Released) // is legal
	return t.left, err
}

// Snapshot writes a consistent copy of the state, in pieces.
func (t *Tenure) Snapshot(ctx context.Context, write func([]byte) error) (registry.Seq, error) {
	r := t.current()
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
