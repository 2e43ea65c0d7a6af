package doctor

import (
	"context"

	"holdfast/internal/mount"
)

// Machine is the mounts and directories of this node. None of its methods follows a path into a mount.
type Machine interface {
	// Boot returns the ID of the current boot.
	Boot() string
	// Mounts lists the mounts strictly below root, the oldest first, also those that another mount hides.
	Mounts(root string) (mount.Mounts, error)
	// Dirs lists the directories strictly below root, children before their parents, without entering a mount.
	Dirs(root string) ([]mount.DirInfo, error)
	// Users returns who uses what is mounted at each of the points and below.
	Users(points []string) (map[string][]mount.User, error)
	// Inspect inspects paths within a limited time. The error is about paths that are not in the answer.
	Inspect(ctx context.Context, paths ...string) (map[string]mount.Info, error)
	// Unmount unmounts the uppermost mount at path, neither lazily nor by force: one in use stays, which is an error. It
	// takes a limited time.
	Unmount(ctx context.Context, path string) error
	// RemoveDir removes an empty directory that is no mount point. It may be gone.
	RemoveDir(path string) error
}
