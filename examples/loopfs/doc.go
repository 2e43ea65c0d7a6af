// Command loopfs is a CSI driver (specification v1.13) for volumes on one machine: sparse images on loop devices if it
// runs as root, else plain directories. The demo and the end-to-end tests run it as their plugin, csi-sanity runs
// against it (make sanity), and it is an example to read.
//
// One process serves all services on one data directory and keeps no state in memory. It may be killed at any moment,
// and its successor may start before it has ended. loopfs is strict: calls in the wrong order (publish before stage,
// unstage while published, delete while in use) or with other arguments than before are errors with a reason.
//
// main.go has the flags and the server. controller.go, snapshots.go, metadata.go, health.go and node.go have the calls.
// store.go keeps records and locks, create.go makes and removes volumes. backend.go says what the two backends do and
// has the simple one, dir; loop.go has loop. mount.go mounts.
//
// The kernel alone decides what is mounted or attached. loopfs does not touch other mounts, follows no ID or name to a
// path, never unmounts lazily, and makes a file system only in a new volume. A snapshot, a clone and a restored volume
// are copies of one moment, independent of their source; the snapshots of a group are of the same moment. The dir
// backend counts sizes but does not enforce them, and has no block devices and no changed blocks.
package main
