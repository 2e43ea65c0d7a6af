package host

import (
	"context"

	"google.golang.org/grpc"
)

// serving returns the shim that calls go to; nil: none.
func (g *gate) serving() *shim {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.active
}

// Conn returns the connection to the active shim.
func (h *Host) Conn() grpc.ClientConnInterface { return h.gate.serving().process.Conn() }

// Changing makes a call that changes something.
func (h *Host) Changing(ctx context.Context, f func(context.Context, grpc.ClientConnInterface) error) error {
	return h.do(ctx, writes, func(ctx context.Context, sh *shim) error { return f(ctx, sh.process.Conn()) })
}

// HoldWrites holds calls that change something, as a swap does first.
func (h *Host) HoldWrites() (end func()) {
	serving := h.gate.serving()
	h.gate.hold()
	return func() { h.gate.open(serving) }
}

// RehearseReadable returns the result of a rehearsal after which only shims of a schema and newer can read the state;
// zero: unknown.
func (h *Host) RehearseReadable(ctx context.Context, schema uint32) error {
	_, err := h.rehearse(ctx,
		func(context.Context, string) (rehearsal, error) { return rehearsal{readable: schema}, nil })
	return err
}
