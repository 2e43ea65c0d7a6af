// Package launch starts a shim process, makes sure that it is the right one, and ends it.
//
// A Store keeps shim binaries under their SHA-256 and holds a verified descriptor of each; Start executes that very
// descriptor, so that what was verified is what runs, and a restart after a crash does not hash again. Start speaks
// go-plugin's protocol through a runner of our own: an environment of few named variables, own stdio, an own session, a
// private socket directory, mutual TLS, and a check that the process behind the socket is the child.
//
// A store writes only what is new to it. A host starts again on a full disk, and without the file its shim was installed
// from, as long as the stored copy is intact; a copy that is not is mended from the file. A digest that somebody gave, or that
// lies beside the binary, is enforced. One that was trusted on first use is not: replacing the file is how one upgrades, so the
// new content is trusted as the first was, and Digest says what it replaces. Whoever wants more than that gives digests.
// Digest.Warnings is what a host should tell of all this.
//
// A Process is one life of a shim. Its death is seen through a pidfd, within milliseconds and whatever holds its pipes; Kill
// is SIGKILL through that pidfd and never waits for the shim's cooperation. Whoever has started a Process ends it with Kill
// or Stop, or sees it end through Done; either way everything it had on disk is removed, and what a killed host has left
// behind is removed by the next Start in the same run directory. Something that cannot be removed, as it has been mounted
// there, is logged, and says nothing of the process: it is dead. What a shim has started ends with it, if it is in its process group. What is not, and
// has a pipe of the dead shim, is killed where it is known to be the shim's, as it executes a stored binary, or in the way of the next one, as it has the
// state open; any other is logged.
//
// What the shim prints is treated as hostile: bounded in length and rate, escaped, and never parsed by go-plugin.
//
// Nothing here survives the host but the store's files: a shim ends when its host does (package bootstrap), and the next host
// ends one that has not (EndOrphans). There is no reattaching. The package knows no schema, no configuration and no CSI; only the host SDK calls it.
package launch
