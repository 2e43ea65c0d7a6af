// Package launch starts a shim process, verifies that it is the right one, and ends it. Only the host SDK uses it.
//
// A Store keeps shim binaries under their SHA-256. Start verifies an open descriptor of the stored file and executes
// that descriptor, so what was verified is what runs. It does not hash a file again that has not changed. A damaged
// stored copy is replaced from the binary's path. If nothing is at the path any more, an intact stored copy is used.
//
// Start speaks go-plugin's protocol through a runner of its own. The shim gets:
//   - an environment of few named variables, own stdio and an own session,
//   - a private socket directory and mutual TLS; the host checks that the peer of the socket is the child,
//   - a pipe whose end tells it that its host is gone (package bootstrap).
//
// A Process is one life of a shim. waitid(2) reports its death. If another process holds the shim's pipes, the report
// comes up to 100 ms later; if a logger blocks, up to 200 ms. Kill sends SIGKILL and needs no cooperation. The rest of
// the shim's process group ends with it. Its files are removed at its death. The next Start in the same run directory
// removes files that a killed host left.
//
// What the shim prints is treated as hostile: bounded in length and rate, escaped, and never parsed by go-plugin.
//
// Nothing outlives the host but the store. A shim ends when its host does, and the next host ends a shim that still has
// the state (EndOrphans). There is no reattaching. docs/traps.md lists the traps of go-plugin and the test for each.
package launch
