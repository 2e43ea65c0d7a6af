// Package bootstrap is what a host and a shim agree on before their first RPC: the go-plugin handshake, the protocol
// versions, the names of environment variables, and how a shim process lives and ends.
//
// A host uses Handshake and Client. A shim's main uses NewLogger and Serve, and nothing else of go-plugin.
//
// Promises to a shim that calls Serve:
//
//   - Nothing it prints can break the handshake: descriptor 1 is /dev/null from package initialisation on, and only the
//     handshake line reaches the host.
//   - Nothing it logs can freeze it: log lines pass a bounded queue, and what does not fit is counted and dropped.
//   - It does not outlive its host: the end of the inherited life pipe ends its context, and its process within a second.
//   - It ends with its whole process, and nothing durable may depend on a graceful end.
//
// The work at package initialisation happens only in a process that a host has started as a shim (both the cookie and
// LifeFD are in its environment), so a host may import this package.
package bootstrap
