package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/shim/internal/disk"
	"holdfast/shim/internal/doctor"
	"holdfast/shim/internal/node"
)

// helper is this program as the process that does what may hang: see Helper.
var helper = []string{"/proc/self/exe", helperFlag}

const helperFlag = "-look"

// Helper is all that this program does if it was started by itself to look at what may hang; else nothing. main calls it first.
func Helper() {
	if len(os.Args) == 2 && os.Args[1] == helperFlag {
		mount.LookMain()
	}
}

// machine is this machine as package reconcile asks for it.
type machine struct {
	*disk.Disk
	lookout *mount.Lookout
}

var _ doctor.Machine = machine{}

// newMachine gives the disk its helper as well.
func newMachine(d *disk.Disk) machine {
	d.Helper = helper
	return machine{d, &mount.Lookout{}}
}

// Mounts lists what is mounted strictly below root.
func (m machine) Mounts(root string) (found []doctor.Mount, err error) {
	all, err := mount.Below(root)
	for _, at := range all {
		if at.Point != root {
			found = append(found, doctor.Mount{Point: at.Point, FSType: at.FSType, Source: at.Source})
		}
	}
	return found, err
}

// Dirs lists the directories strictly below root, with the number of their entries.
func (m machine) Dirs(root string) (found []doctor.Dir, err error) {
	paths, err := m.Disk.Dirs(root)
	if err != nil || len(paths) == 0 {
		return nil, err
	}
	top, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", root, err)
	}
	defer unix.Close(top)
	for _, path := range paths {
		n, err := entries(top, root, path)
		switch {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.EXDEV), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENOTDIR):
			continue // it is another one by now
		case err != nil:
			return nil, fmt.Errorf("open %s: %w", path, err)
		}
		found = append(found, doctor.Dir{Path: path, Entries: n})
	}
	return found, nil
}

// entries counts what is in a directory below the open one, without following a link or entering a mount.
func entries(top int, root, path string) (int, error) {
	rel, err := filepath.Rel(root, path)
	if err != nil {
		return 0, err
	}
	fd, err := unix.Openat2(top, rel, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return 0, err
	}
	dir := os.NewFile(uintptr(fd), path)
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	return len(names), err
}

// usersLimit is how long it may take to find users.
const usersLimit = 20 * time.Second

// Users says who uses what is mounted at the points, and by which other mounts.
func (m machine) Users(ctx context.Context, points []string) (map[string][]doctor.User, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	all, err := m.lookout.Users(helper, usersLimit, points)
	if err != nil {
		return nil, err
	}
	found := map[string][]doctor.User{}
	for point, users := range all {
		for _, u := range users {
			by := doctor.User{Text: u.String()}
			if u.PID == 0 {
				by.Mount = u.Path
			}
			found[point] = append(found[point], by)
		}
	}
	return found, nil
}

// Unmount takes the uppermost mount at a path off.
func (m machine) Unmount(ctx context.Context, path string) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return m.Disk.Unmount(path)
}

// Look looks at paths. What may not be looked at, for want of a right, is not in the answer: nothing is known to be wrong with it.
func (m machine) Look(ctx context.Context, paths ...string) (map[string]doctor.Sight, error) {
	all, err := m.Disk.Look(ctx, paths...)
	seen := make(map[string]doctor.Sight, len(all))
	for path, s := range all {
		switch {
		case s.Hung, s.Dead():
			seen[path] = doctor.Sight{Trouble: s.Trouble()}
		case s.Errno == 0, s.Errno == unix.ENOENT:
			seen[path] = doctor.Sight{Block: s.Kind == mount.BlockDevice}
		}
	}
	return seen, err
}

// lookLimit is how long a path is looked at for a call that waits for it.
const lookLimit = 5 * time.Second

// devices looks at paths for package volume.
func (m machine) devices(ctx context.Context, paths ...string) (map[string]node.Seen, error) {
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	all, err := m.Disk.Look(ctx, paths...)
	seen := make(map[string]node.Seen, len(all))
	for path, s := range all {
		seen[path] = node.Seen{Block: s.Kind == mount.BlockDevice, Device: hooks.DeviceNumber{Major: int64(s.Major), Minor: int64(s.Minor)},
			Trouble: s.Trouble()}
	}
	return seen, err
}
