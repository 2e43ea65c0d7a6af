// Package claim decides who may use which volume, and how. A Ledger takes and releases claims, each in one transaction that sees
// all others, so that two callers can never both be granted what only one may have.
//
// One matrix over all seven access modes decides (Compatible). It is symmetric: the order in which claims are taken does not
// matter.
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
// All claims of a volume have the same access mode and the same attachment mode, as a plugin attaches and stages a volume for one
// capability (CSI spec, NodePublishVolume: a second publish with another capability should not be sent), and a block device that
// is also a mounted file system is damaged by whoever writes. On one node, all that the staging mount depends on is equal too;
// read-only may differ.
//
// single-node-writer and single-node-reader-only admit one claim at a time: the spec says "published once", and plugins may
// answer a second target path with FAILED_PRECONDITION. Two allocs of one node that share a volume use single-node-multi-writer.
// multi-node-single-writer counts claims, not nodes: of two writers on one node, neither would know of the other.
//
// A claim is never released while its volume is mounted for it, nor the last claim of a node while the volume is staged or
// attached there. What the claim stands for is taken down first.
package claim
