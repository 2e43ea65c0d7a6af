package doctor

import "context"

// Mount is one line of the mount table.
type Mount struct {
	Point  string // on the host
	FSType string
	Source string // a device, or what the file system says
}

// Dir is a directory, and how many entries of any kind it has.
type Dir struct {
	Path    string
	Entries int
}

// User is one who uses a mount.
type User struct {
	Mount string // the mount point in this namespace by which it is used; empty: a process, or another namespace
	Text  string // for people
}

// Sight is what a helper process has seen at a path.
type Sight struct {
	Block   bool   // a block device
	Trouble string // why it cannot be used, for people: it hangs, or its server is gone; empty: nothing is known to be wrong
}

// Ground is the mount table and the directories of this machine. Nothing of it follows a path into a mount.
type Ground interface {
	// Boot is the boot id of this boot.
	Boot() string
	// Mounts lists what is mounted strictly below root, the oldest first, also what another mount hides.
	Mounts(root string) ([]Mount, error)
	// Dirs lists the directories strictly below root, children before their parents, without entering a mount: neither a mount point nor
	// what is below it is listed.
	Dirs(root string) ([]Dir, error)
}

// Lookout is what may hang, done by another process for a limited time.
type Lookout interface {
	// Users says who uses what is mounted at each of the points and below them.
	Users(ctx context.Context, points []string) (map[string][]User, error)
	// Look looks at each path. What has hung until ctx ends is trouble, and no error. What is not in the answer could not be looked at; if
	// more of it might be told another time, that is an error.
	Look(ctx context.Context, paths ...string) (map[string]Sight, error)
}

// Hands take away what is not used.
type Hands interface {
	// Unmount takes the uppermost mount at path off, neither lazily nor by force: one that is used stays, and that is an error. It takes a
	// limited time, whatever hangs.
	Unmount(ctx context.Context, path string) error
	// RemoveDir removes an empty directory that is no mount point (rmdir(2)). It may be gone.
	RemoveDir(path string) error
}

// Machine is all of that.
type Machine interface {
	Ground
	Lookout
	Hands
}
