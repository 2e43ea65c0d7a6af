// Package disk keeps the volumes and snapshots of loopfs in one directory: a record for each, and what holds its bytes.
//
//	volumes/<id>.json   the record: size, state, where it is attached, staged and published
//	lock                ranges of it are locked by calls that change a volume or snapshot, or count space
//	nodes/<hash>.json   the nodes that were ever started on this directory
//	images/<id>.img     bytes of the loop backend: a sparse image, of an ext4 or xfs file system or of raw data
//	dirs/<id>/          bytes of the dir backend
//
// A process may be killed at any moment, and several processes (a controller, nodes) may use one directory. Before
// bytes are made, removed, enlarged or frozen, the record says so. Recover or the next call for the volume completes
// or removes what a kill left. Bytes get their name when they are complete: a mkfs that outlives a killed loopfs
// writes to a file without a name. IDs are hashes of names, and every path is opened through os.Root. Records say
// what was requested; the mount table says what is mounted.
//
// A volume never loses data to mkfs: a file system is made only where no byte was ever written.
//
// A copy is of one moment, and independent of its source. A mounted file system is frozen (FIFREEZE, as fsfreeze does)
// during the copy: an instant with reflinks (xfs, btrfs), else as long as the copy of its data takes. A raw volume or a
// directory cannot be frozen. While it is published for writing, a copy is refused, unless it is a reflink.
//
// Errors are gRPC statuses where a caller can do something about them, else system errors.
package disk
