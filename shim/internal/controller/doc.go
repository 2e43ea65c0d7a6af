// Package controller manages what nodes share: volumes, claims and attachments, and the calls to controller plugins. A
// Controller creates, registers, expands and deletes volumes. It attaches them to nodes if their plugin requires that
// (ControllerPublishVolume). It touches no mount.
//
// Every call that changes something has an intent before it and a stored outcome after it. The record of a volume
// exists in state creating before CreateVolume is sent. After a crash the same call is repeated, which returns the
// volume that the plugin may have made. The record stays in state deleting until the plugin confirms the deletion.
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
// All claims of a volume have the same access mode, because a plugin attaches and stages a volume for one capability.
// They have the same attachment mode, because writes to a block device damage a file system that is mounted from it. On
// one node, all options of the staging mount are equal too; read-only may differ. single-node-writer and
// single-node-reader-only admit one claim: the spec says "published once". multi-node-single-writer counts claims, not
// nodes.
//
// A claim is never released while its volume is mounted for it. The last claim of a node is never released while the
// volume is staged or attached there.
//
// An expansion has two halves: the controller's and the node's. The commit that stores the controller's answer also
// records that the half of the node is pending (Expansion.Node). A plugin may have either half or both.
//
// Optional calls and fields are sent only if the plugin declares them. Detach uses the node id that Attach recorded. An
// empty id would detach all nodes, so it is never sent. Answers are checked before they are stored.
//
// Attach, Detach, DetachOrAbandon, Abandon, Settle and LeaveAlteration need the volume's lock. Other methods take the
// locks that they need. Run finishes operations without a caller.
package controller
