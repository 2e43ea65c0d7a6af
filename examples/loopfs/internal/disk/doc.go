// Package disk keeps loopfs' volumes and snapshots in one directory: a record for each, and what holds its bytes.
//
//	volumes/<id>.json   the record: size, state, where it is attached, staged and published
//	lock                ranges of it are locked by calls that change a volume or snapshot, or count space
//	nodes/<hash>.json   the nodes that were ever started on this directory
//	images/<id>.img     bytes of the loop backend: a sparse image, of an ext4 or xfs file system or of raw data
//	dirs/<id>/          bytes of the dir backend
//
// A process may be killed at any moment, and several processes (a controller, nodes) may use one directory. Records are
// replaced as a whole: temporary file, fsync, rename, fsync of the directory. Before bytes are made, removed, enlarged
// or frozen, the record says so. Recover, or the next call for the volume, completes or removes what a kill left. Bytes
// get their name when they are complete: a mkfs that outlives a killed loopfs writes to a file without a name. IDs are
// hashes of names, nothing else becomes a file name, and every path is opened through os.Root. Records say what was
// requested; the mount table says what is mounted.
//
// A volume never loses data to mkfs: a file system is made only where no byte was ever written.
//
// A copy is of one moment, and independent of its source. A mounted file system is frozen (FIFREEZE, as fsfreeze does)
// during the copy: an instant with reflinks (xfs, btrfs), else as long as the copy of its data takes. A raw volume or a
// directory cannot be frozen. While it is published for writing, a copy is refused, unless it is a reflink.
//
// The package does not know CSI. It returns the kinds of errors below, which loopfs maps to gRPC codes.
package disk

import (
	"errors"
	"fmt"
)

// The kinds of error.
var (
	ErrInvalid     = errors.New("invalid")                 // request
	ErrNotFound    = errors.New("not found")               // volume or snapshot
	ErrBusy        = errors.New("another call is running") // for this volume, here or in another process
	ErrInUse       = errors.New("in use")                  // unmount, detach or unpublish first
	ErrExists      = errors.New("already exists")          // the same name or path with other arguments
	ErrFull        = errors.New("no space left")           // for this size, now
	ErrRange       = errors.New("size not possible")       // now or later
	ErrUnavailable = errors.New("not possible here")       // to this process, e.g. loop devices without root
	ErrDamaged     = errors.New("record is damaged")       // an operator has to repair it
)

// Errorf returns an error of a kind. Its text is the formatted one alone.
func Errorf(kind error, format string, args ...any) error {
	return &kindError{kind: kind, err: fmt.Errorf(format, args...)}
}

type kindError struct{ kind, err error }

func (e *kindError) Error() string   { return e.err.Error() }
func (e *kindError) Unwrap() []error { return []error{e.kind, e.err} }
