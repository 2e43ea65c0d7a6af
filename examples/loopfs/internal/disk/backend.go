package disk

import (
	"context"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/examples/loopfs/internal/mount"
	mounttable "holdfast/internal/mount"
)

// Backend stores the bytes of volumes and snapshots, and mounts them. The caller holds the lock of the volume.
type Backend interface {
	// Supports returns INVALID_ARGUMENT for a usage that volumes of this backend cannot have.
	Supports(u Usage) error
	// Make makes empty bytes. It replaces what an earlier Make or Copy left, complete or not.
	Make(ctx context.Context, id ID, bytes int64) error
	// Copy makes bytes that begin as a copy of another volume's. live: the source may be written to meanwhile. If the
	// copy would not be of one moment, the error is FAILED_PRECONDITION.
	Copy(ctx context.Context, from, to ID, bytes int64, live bool) error
	// Grow enlarges the bytes, if they are fewer.
	Grow(id ID, bytes int64) error
	// Remove removes the bytes. Missing bytes are no error.
	Remove(id ID) error
	// FileSystem returns the type of the volume's file system, or the given one if no data were ever written. It is
	// always empty if the backend has no types. The error for other data is FAILED_PRECONDITION.
	FileSystem(id ID, given string) (string, error)
	// Mount mounts the volume at a directory where nothing is mounted. It makes the file system if there is none, and
	// enlarges bytes and file system to the size of the volume.
	Mount(ctx context.Context, r Record, at string, how MountOptions) error
	// Shows reports whether a mount is one of this volume: its staging mount, or a bind mount of that or of its device.
	Shows(m mounttable.Mount, id ID) (bool, error)
	// Expand enlarges the mounted file system, or the devices, to the size of the bytes.
	Expand(id ID, raw bool) error
	// Stats returns the used bytes and inodes of a mounted volume.
	Stats(r Record, at string) (bytes, inodes *csi.VolumeUsage, err error)
	// Check looks for what is wrong with the bytes.
	Check(r Record) ([]*Problem, error)
}

// Devices is implemented by the backend that has block devices.
type Devices interface {
	// Attach returns the path of the volume's device, which stays until Detach. A read-only device is another one.
	Attach(r Record, readOnly bool) (string, error)
	// Device returns the path of the attached device, or an empty string.
	Device(id ID, readOnly bool) (string, error)
	// HeldBy returns a device that the kernel has of the volume, or an empty string.
	HeldBy(id ID) (string, error)
	// Size returns the size of the volume's devices in bytes.
	Size(id ID) (int64, error)
	// Detach detaches the volume's devices. That none is attached is no error.
	Detach(id ID) error
	// SetReadAhead sets how much the kernel reads ahead from the volume's devices, in KiB. 0 changes nothing.
	SetReadAhead(id ID, kib int64) error
	// Freeze brings the mounted file system to a state that needs no repair, and blocks writes until Thaw, also beyond
	// the end of this process.
	Freeze(id ID) error
	// Thaw ends a freeze. That nothing is frozen is no error.
	Thaw(id ID) error
	// Allocated calls each with the parts of a snapshot that hold data, in order, from an offset on.
	Allocated(id ID, at int64, each func(at, end int64) error) error
	// Changed calls each with the parts in which a snapshot differs from an earlier one, in order, from an offset on.
	Changed(base, id ID, at int64, each func(at, end int64) error) error
}

// MountOptions says how a volume is mounted.
type MountOptions struct {
	FileSystem string
	Flags      mount.Flags
	Group      int // the root directory is given to that group; 0: it stays whose it is
}

// giveTo gives a directory to a group: members may write, and new files belong to the group.
func giveTo(root *os.File, group int) error {
	st, err := root.Stat()
	if err == nil && group != 0 {
		err = root.Chown(-1, group)
	}
	if err == nil && group != 0 {
		err = root.Chmod(st.Mode() | os.ModeSetgid | 0o070)
	}
	return err
}

// The names of the backends, as records keep them.
const (
	LoopBackend = "loop" // sparse images on loop devices; real sizes; root in the initial user namespace
	DirBackend  = "dir"  // plain directories; sizes are only counted; works in a user namespace
)
