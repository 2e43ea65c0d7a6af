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

// Young is how many calls are under way, as a swap counts them that waits for a lull.
func (h *Host) Young() int { return h.traffic.young() }
