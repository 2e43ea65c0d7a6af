package disk

import (
	"context"

	"holdfast/examples/loopfs/internal/mount"
	mounttable "holdfast/internal/mount"
)

// Backend is what holds the bytes of volumes and shows them. Calls for one volume are never concurrent: the caller has
// its Hold.
type Backend interface {
	Bytes
	Mounts
}

// Bytes is what holds the bytes of volumes and snapshots.
type Bytes interface {
	// Make makes that many bytes, empty. What an earlier Make or Copy left, finished or not, is replaced.
	Make(ctx context.Context, id ID, bytes int64) error
	// Copy makes that many bytes as Make does, which begin with those of another id. If that is live, somebody may
	// write to it meanwhile; a copy that would not be of one moment is ErrInUse then.
	Copy(ctx context.Context, from, to ID, bytes int64, live bool) error
	// Grow makes the bytes as many as that, if they are fewer.
	Grow(id ID, bytes int64) error
	// Remove takes the bytes away for good; that there are none is no error.
	Remove(id ID) error
	// HeldBy names what in the kernel still uses the bytes, or "".
	HeldBy(id ID) (string, error)
}

// Mounts is how volumes are shown.
type Mounts interface {
	// Takes says whether volumes can be used so, now or ever; the error is ErrInvalid.
	Takes(u Usage) error
	// FileSystem is the type of what the volume holds, or what it would be given where nothing was ever written; always
	// "" if the backend has no types. Data that are no file system are ErrInUse.
	FileSystem(id ID, given string) (string, error)
	// Mount shows the volume at a directory where nothing is mounted. Before that it makes the file system if there is
	// none, and makes the bytes and the file system as large as the volume.
	Mount(ctx context.Context, id ID, at mount.Place, how Mounting) error
	// Shows says whether a mount of the table is this volume: its staging mount or a bind mount of that, or a bind
	// mount of its device.
	Shows(table mounttable.Mounts, m mounttable.Mount, id ID) (bool, error)
	// Expand makes what is shown of the volume as large as its bytes, while it is used.
	Expand(id ID, raw bool) error
	// Stats counts what the mounted volume of that size holds at a path.
	Stats(id ID, bytes int64, at string) (Stats, error)
}

// Devices is what a backend has that gives volumes away as block devices.
type Devices interface {
	// Attach gives the path of the volume's device, which stays until Detach. There is one for writing and one for
	// reading.
	Attach(id ID, readOnly bool) (string, error)
	// Device is the path of the attached device, or "".
	Device(id ID, readOnly bool) (string, error)
	// Size is how many bytes the volume's devices have.
	Size(id ID) (int64, error)
	// Detach takes the volume's devices away; that there are none is no error.
	Detach(id ID) error
}

// Freezer is what a backend has that can stop all writing to a mounted volume for a while. A freeze outlives the
// process.
type Freezer interface {
	// Freeze brings the file system to a state that needs no repair, and lets no write through until Thaw.
	Freeze(id ID) error
	// Thaw ends it; that nothing is frozen is no error.
	Thaw(id ID) error
}

// Mounting is how a volume is mounted.
type Mounting struct {
	Bytes      int64 // the size of the volume
	FileSystem string
	Flags      mount.Flags
	Group      string // the root directory is given to that group (a number); "": it stays whose it is
}

// Stats are what a mounted volume holds.
type Stats struct{ Bytes, Inodes Count }

// Count is how many there are of something.
type Count struct{ Total, Used, Free int64 }

// The names of the backends, as records keep them.
const (
	LoopBackend = "loop" // sparse images on loop devices; real sizes; root in the initial user namespace
	DirBackend  = "dir"  // plain directories; sizes are only counted; works in a user namespace
)

// Backends makes both over one data directory. Making and removing volumes needs no privilege in either.
func Backends(s *Store) map[string]Backend {
	return map[string]Backend{LoopBackend: &loop{s}, DirBackend: &dir{s}}
}
