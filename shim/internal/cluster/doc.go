// Package cluster keeps the records that nodes share in etcd.
//
// Each node has a copy of these records in its own store, so reads, watches and indexes work as on a single node and go
// on without etcd. State.Commit makes a decision on that copy and writes it to etcd in one transaction, under the
// condition that nothing which the decision has read was changed since. State.Run follows etcd and applies each
// transaction to the copy, with its events. A commit returns once the copy of its own node has it.
//
// Records of one node never leave its store.
package cluster
