// Package e2e proves the whole chain on real parts: a host, a shim that was built on its own, plugins behind real sockets, real mounts. The
// oracles are the plugin's journal of calls and the kernel's mount table.
package e2e
