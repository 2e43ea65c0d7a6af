// Package cluster keeps the records that nodes share in etcd.
//
// Each node has a copy of these records in its own store. So reads, watches and indexes work as on a single node, and
// continue without etcd. State.Commit makes a decision on that copy and writes it to etcd in one transaction. The
// transaction succeeds only if nothing that the decision has read was changed since. State.Run follows etcd and applies
// each transaction to the copy, with its events. A commit returns once the copy of its own node has it.
//
// Records of a single node never leave its store.
package cluster
