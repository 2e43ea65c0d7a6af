// Package controller holds what nodes share: volumes, claims and attachments, and the calls to controller plugins. A
// Controller creates, registers, expands and deletes volumes, and attaches them to nodes where their plugin wants that
// (ControllerPublishVolume). It touches no mount.
//
// Every call that changes something has an intent before it and a stored outcome after it. A volume is a record in
// state creating before the plugin is asked for it, so what a plugin made for a process that died is found by asking
// for the same name again. It stays a record in state deleting until the plugin says that it is gone.
//
// Claims decide who may use which volume, and how. A claim is taken in one transaction that sees all others. One matrix
// over all seven access modes decides (Compatible). It is symmetric: the order of claims does not matter.
//
//	mode                        claims    nodes  that write
//	single-node-writer          one       one    one
//	single-node-reader-only     one       one    none
//	single-node-single-writer   one       one    one
//	single-node-multi-writer    many      one    many
//	multi-node-reader-only      many      many   none
//	multi-node-single-writer    many      many   one
//	multi-node-multi-writer     many      many   many
//
// All claims of a volume have the same access mode and the same attachment mode: a plugin attaches and stages a volume
// for one capability, and whoever writes to a block device damages a file system mounted from it. On one node, all that
// the staging mount depends on is equal too; read-only may differ. single-node-writer and single-node-reader-only admit
// one claim: the spec says "published once". multi-node-single-writer counts claims, not nodes.
//
// A claim is never released while its volume is mounted for it, nor is the last claim of a node while the volume is
// staged or attached there.
//
// An expansion has two halves. The commit that stores the controller's answer records what is pending for the node,
// which the node does (Node). A plugin may have either half or both.
//
// Optional calls and fields are sent only where the plugin declares them. Detach follows what Attach recorded. A node
// is never detached without its id: an empty one would mean all nodes. Answers are checked before they are stored.
//
// Attach and Detach need the volume's lock; all other methods take it. Run finishes what no caller waits for any more.
package controller
