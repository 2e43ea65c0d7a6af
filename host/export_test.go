package host

import "google.golang.org/grpc"

// Conn is the connection to the shim that is active now.
func (h *Host) Conn() grpc.ClientConnInterface { return h.gate.serving().process.Conn() }
