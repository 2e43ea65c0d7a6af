// Command loopfs is a CSI driver (specification v1.13) for volumes on one machine: sparse images on loop devices if it
// runs as root, else plain directories. The demo and the end-to-end tests run it as their plugin, csi-sanity runs
// against it (make sanity), and it is an example to read.
//
// All services work on one data directory and keep no state in memory. So controller and node may be one process or
// two, each may be killed at any moment, and the next start completes or removes what was left. loopfs is strict: calls
// in the wrong order (publish before stage, unstage while published, detach while staged, delete while in use) or with
// other arguments than before are errors with a reason.
//
// main.go has the flags and the server; identity.go, controller.go, snapshots.go, groups.go, metadata.go, health.go and
// node.go (with publish.go and ephemeral.go) have the services. Package internal/disk stores volumes and snapshots,
// internal/mount mounts them. README.md lists what loopfs shows of CSI.
//
// The kernel alone decides what is mounted or attached. loopfs does not touch other mounts, follows no ID or name to a
// path, never unmounts lazily, and never makes a file system where a byte was written. A snapshot, a clone and a
// restored volume are copies of one moment, independent of their source; the snapshots of a group are of the same
// moment. The dir backend counts sizes but does not enforce them, and has no block devices and no changed blocks.
package main
