// Command loopfs is a CSI driver (specification v1.13) for volumes on one machine: sparse images on loop devices where
// it is root, plain directories where it is not. The demo and the end-to-end tests run it as their plugin, csi-sanity
// runs against it (make sanity), and it is meant to be read as an example of one.
//
// Two things are peculiar. All services work on one data directory and keep nothing in memory, so that controller and
// node may be one process or two, any of them may be killed at any moment, and the next start finishes or removes what
// was left. And it is strict: what an orchestrator does in the wrong order (publish before stage, unstage while
// published, detach while staged, delete while in use) or with other arguments than before is an error with the reason,
// never quietly right.
//
// The services are in identity.go, controller.go (snapshot.go, list.go; attach.go with --attach) and node.go (stage.go,
// publish.go, ephemeral.go, stats.go); status.go is the one place where kinds of error become gRPC codes. Package
// internal/disk keeps volumes and snapshots, internal/mount mounts them.
//
// What it promises: the kernel alone says what is mounted or attached; what loopfs did not mount stays untouched; it
// never follows an id or a name to a path, never unmounts lazily, and never makes a file system where a byte was
// written. A snapshot, a clone and a restored volume are copies of one moment, independent of their source. What it
// does not do: groups of snapshots, ControllerModifyVolume, health. The dir backend counts sizes but cannot enforce
// them, and has no block devices.
package main
