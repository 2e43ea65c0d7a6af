// Package cluster tests a cluster of three nodes with three members of etcd while they are killed, frozen and cut off.
// `make e2e-cluster` runs it, as root; docs/cluster.md says what it checks.
//
// All processes run in namespaces of their own: of processes, mounts and networks. They are gone when the test ends,
// however it ends.
package cluster
