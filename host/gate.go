package host

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/proto/wire"
	"holdfast/registry"
)

// gate lets calls through to the active shim and holds them while there is none.
type gate struct {
	mu      sync.Mutex // guards all below; held for no longer than a look-up
	current *shim      // nil: closed
	why     error      // why it is closed
	shutFor error      // set for good by shut
	changed chan struct{}
}

func newGate() *gate { return &gate{changed: make(chan struct{})} }

func (g *gate) set(f func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	f()
	close(g.changed)
	g.changed = make(chan struct{})
}

func (g *gate) open(sh *shim)   { g.set(func() { g.current, g.why = sh, nil }) }
func (g *gate) close(why error) { g.set(func() { g.current, g.why = nil, why }) }

// shut fails whoever waits, and whoever comes, with why.
func (g *gate) shut(why error) { g.set(func() { g.current, g.shutFor = nil, why }) }

func (g *gate) look() (current *shim, why, shut error, changed chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.current, g.why, g.shutFor, g.changed
}

// enter waits for an active shim other than the one that a call was cut off at, until hold expires or ctx ends.
func (g *gate) enter(ctx context.Context, hold <-chan time.Time, not *shim) (*shim, error) {
	for {
		current, why, shut, changed := g.look()
		switch {
		case shut != nil:
			return nil, shut
		case current != nil && current != not:
			return current, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("no shim is active: %w", context.Cause(ctx))
		case <-hold:
			if why == nil {
				why = fmt.Errorf("it does not answer")
			}
			return nil, registry.Errorf(registry.ErrUnavailable, "no shim has become active in time; it was last seen failing so: %w", why)
		}
	}
}

// call makes a call at the active shim. One that is cut off, because that shim died, is made again at the next: reads may be repeated,
// and what changes state carries an operation id.
func (h *Host) call(ctx context.Context, f func(ctx context.Context, conn grpc.ClientConnInterface) error) error {
	hold := time.NewTimer(h.config.MaxHold)
	defer hold.Stop()
	var cut *shim
	for {
		sh, err := h.gate.enter(ctx, hold.C, cut)
		if err != nil {
			return err
		}
		err = f(ctx, sh.process.Conn())
		if !cutOff(err) || ctx.Err() != nil {
			return wire.Error(err)
		}
		cut = sh
		hold.Reset(h.config.MaxHold)
	}
}

// cutOff says whether the transport failed, rather than the shim: what the shim says carries a detail.
func cutOff(err error) bool {
	st, is := status.FromError(err)
	return is && st.Code() == codes.Unavailable && len(st.Details()) == 0
}
