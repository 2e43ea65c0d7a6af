package host

import "google.golang.org/grpc"

// Conn returns the connection to the active shim.
func (h *Host) Conn() grpc.ClientConnInterface {
	h.gate.mu.Lock()
	defer h.gate.mu.Unlock()
	return h.gate.active.process.Conn()
}
