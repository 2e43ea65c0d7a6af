// Package disk keeps loopfs' volumes and snapshots in one directory: a record for each, and what holds its bytes.
//
//	volumes/<id>.json   the record: size, state, where it is attached, staged and published
//	lock                ranges of it are locked by calls that change a volume or snapshot, or count space
//	nodes/<hash>.json   the nodes that were ever started on this directory
//	images/<id>.img     bytes of the loop backend: a sparse image, of an ext4 or xfs file system or of raw data
//	dirs/<id>/          bytes of the dir backend
//
// What it promises. A process may be killed at any moment, and several processes (a controller, nodes) may use one
// directory at a time. Records are replaced as a whole (temporary file, fsync, rename, fsync of the directory). Before
// anything is made, removed, enlarged or frozen, the record says so; Recover, or the next call for that volume,
// finishes or removes what a kill left. Bytes get their name only when they are complete; a mkfs that outlives a killed
// loopfs writes to a file that nobody will name. Ids are minted here from a hash of the name; nothing else ever becomes
// a file name, and every path goes through os.Root. What is mounted is never asked of a record: records say what was
// wanted, the mount table says what is.
//
// A volume never loses data to a mkfs: a file system is made only where no byte was ever written.
//
// A copy is independent of its source from the moment that it is made, and it is of one moment. A mounted file system
// is frozen (FIFREEZE, as fsfreeze does) for as long as the copy takes: an instant where the data directory's file
// system has reflinks (xfs, btrfs), else as long as its data take to be copied. What cannot be frozen, a raw volume or
// a directory, is refused while it is published for writing, unless the copy is a reflink.
//
// It knows no CSI. The kinds of error below are all it returns; loopfs' services translate them.
package disk

import (
	"errors"
	"fmt"
)

// The kinds of error.
var (
	ErrInvalid     = errors.New("invalid")                 // the request is wrong
	ErrNotFound    = errors.New("not found")               // no such volume
	ErrBusy        = errors.New("another call is running") // for this volume, here or in another process
	ErrInUse       = errors.New("in use")                  // something has to be taken down first
	ErrExists      = errors.New("already exists")          // the same name or place, asked for differently
	ErrFull        = errors.New("no space left")           // for the size asked, now
	ErrRange       = errors.New("size not possible")       // now and later
	ErrUnavailable = errors.New("not possible here")       // this process may not do it, e.g. loop devices without root
	ErrDamaged     = errors.New("record is damaged")       // a record cannot be read; a person has to look
)

// Errorf makes an error of that kind whose text is only what the format says.
func Errorf(kind error, format string, args ...any) error {
	return &kindError{kind: kind, err: fmt.Errorf(format, args...)}
}

type kindError struct{ kind, err error }

func (e *kindError) Error() string   { return e.err.Error() }
func (e *kindError) Unwrap() []error { return []error{e.kind, e.err} }
