package disk

import (
	"context"

	"holdfast/examples/loopfs/internal/mount"
)

// Backend is what holds the bytes of volumes. Calls for one volume are never concurrent: the caller has its Hold.
type Backend interface {
	// Make makes the volume's bytes: that many, empty. What an earlier Make left, finished or not, is replaced.
	Make(ctx context.Context, id ID, bytes int64) error
	// Remove takes the bytes away for good; that there are none is no error.
	Remove(id ID) error
	// Mount shows the volume at a directory where nothing is mounted.
	Mount(id ID, at mount.Place, flags mount.Flags) error
	// Shows says whether a mount of the table is this volume: its staging mount or a bind mount of that.
	Shows(t mount.Table, e *mount.Entry, id ID) (bool, error)
	// HeldBy names what in the kernel still uses the volume's bytes, or "".
	HeldBy(id ID) (string, error)
}

// The names of the backends, as records keep them.
const (
	LoopBackend = "loop" // sparse ext4 images on loop devices; real sizes; root in the initial user namespace
	DirBackend  = "dir"  // plain directories; sizes are only counted; works in a user namespace
)

// Backends makes both over one data directory. Making and removing volumes needs no privilege in either.
func Backends(s *Store) map[string]Backend {
	return map[string]Backend{LoopBackend: &loop{s}, DirBackend: &dir{s}}
}
