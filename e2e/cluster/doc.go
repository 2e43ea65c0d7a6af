// Package cluster tests a cluster of three nodes with three members of etcd while they are killed, frozen and cut off.
// `make e2e-cluster` runs it, as root; docs/cluster.md says what it checks.
//
// All processes run in their own namespaces of processes, mounts and networks. When the test ends, in whatever way,
// these namespaces and their processes are gone.
package cluster
