package host

import (
	"context"

	"google.golang.org/grpc"
)

// Conn is the connection to the shim that is active now.
func (h *Host) Conn() grpc.ClientConnInterface { return h.gate.serving().process.Conn() }

// Changing makes a call that changes something, Reading one that does not.
func (h *Host) Changing(ctx context.Context, f func(context.Context, grpc.ClientConnInterface) error) error {
	return h.call(ctx, f)
}

func (h *Host) Reading(ctx context.Context, f func(context.Context, grpc.ClientConnInterface) error) error {
	return h.read(ctx, f)
}

// Hush holds what changes something, as a swap does first.
func (h *Host) Hush() (end func()) {
	serving := h.gate.serving()
	h.gate.hush()
	return func() { h.gate.open(serving) }
}

// candidate rehearses as it is told to.
type candidate struct {
	side
	readable uint32
}

func (c candidate) rehearse(context.Context, string) (rehearsal, error) {
	return rehearsal{readable: c.readable}, nil
}

// Rehearsed is what is said to a candidate that makes the state one that only shims of a schema and newer can read; zero: it does not say.
func (h *Host) Rehearsed(ctx context.Context, readable uint32) error {
	_, err := h.rehearsed(ctx, candidate{readable: readable})
	return err
}
