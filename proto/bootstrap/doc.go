// Package bootstrap defines what a host and a shim agree on before their first RPC: the go-plugin handshake, the
// protocol versions, the environment variables and the life cycle of a shim process.
//
// A host uses Handshake, Client and ClientTLS. A shim's main uses NewLogger and Serve, and nothing else of go-plugin.
//
// Promises to a shim that calls Serve:
//
//   - Its output cannot break the handshake. Descriptor 1 is /dev/null from package initialisation on, and only the
//     handshake line reaches the host.
//   - Logging cannot block it. Log lines pass a bounded queue; excess lines are counted and dropped.
//   - It does not outlive its host. The end of the inherited life pipe ends its context, and its process within 1 s.
//   - It ends as a whole process. Durable state must not depend on a graceful end.
//
// The work at package initialisation happens only in a process that a host has started as a shim (both the cookie and
// LifeFD are in its environment), so a host may import this package.
package bootstrap
