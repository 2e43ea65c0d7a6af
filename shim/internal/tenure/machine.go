package tenure

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mnt"
	"holdfast/shim/internal/disk"
	"holdfast/shim/internal/reconcile"
	"holdfast/shim/internal/volume"
)

// helper is this program as the process that does what may hang: see Helper.
var helper = []string{"/proc/self/exe", helperFlag}

const helperFlag = "-look"

// Helper is all that this program does if it was started by itself to look at what may hang; else nothing. main calls it first.
func Helper() {
	if len(os.Args) == 2 && os.Args[1] == helperFlag {
		mnt.LookMain()
	}
}

// machine is this machine as the use cases ask for it.
type machine struct {
	*disk.Disk
	lookout *mnt.Lookout
	root    string // the mount root
}

var _ reconcile.Machine = machine{}

func newMachine(d *disk.Disk, l hooks.Layout) machine {
	return machine{d, &mnt.Lookout{}, l.MountRoot()}
}

// Mounts lists what is mounted strictly below root.
func (m machine) Mounts(root string) (found []reconcile.Mount, err error) {
	all, err := mnt.Below(root)
	for _, at := range all {
		if at.Point != root {
			found = append(found, reconcile.Mount{Point: at.Point, FSType: at.FSType, Source: at.Source})
		}
	}
	return found, err
}

// Dirs lists the directories strictly below root, with the number of their entries.
func (m machine) Dirs(root string) (found []reconcile.Dir, err error) {
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
		found = append(found, reconcile.Dir{Path: path, Entries: n})
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

// within is the time that ctx leaves, which a helper is given.
func within(ctx context.Context) (time.Duration, error) {
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	until, limited := ctx.Deadline()
	if !limited {
		return 0, errors.New("a helper has to have a deadline")
	}
	return time.Until(until), nil
}

// Users says who uses what is mounted at the points.
func (m machine) Users(ctx context.Context, points []string) (map[string][]reconcile.User, error) {
	limit, err := within(ctx)
	if err != nil {
		return nil, err
	}
	all, err := m.lookout.Users(helper, limit, points)
	if err != nil {
		return nil, err
	}
	found := map[string][]reconcile.User{}
	for point, users := range all {
		for _, u := range users {
			by := reconcile.User{Text: u.String()}
			if u.PID == 0 {
				by.Mount = u.Path
			}
			found[point] = append(found[point], by)
		}
	}
	return found, nil
}

// Unmount takes the uppermost mount at a path below the mount root off.
func (m machine) Unmount(ctx context.Context, path string) error {
	limit, err := within(ctx)
	if err != nil {
		return err
	}
	rel, err := filepath.Rel(m.root, path)
	if err != nil {
		return err
	}
	return m.lookout.Unmount(helper, limit, m.root, rel)
}

// Look looks at paths.
func (m machine) Look(ctx context.Context, paths ...string) (map[string]reconcile.Sight, error) {
	all, err := m.lookout.Look(ctx, helper, paths)
	seen := make(map[string]reconcile.Sight, len(all))
	for path, s := range all {
		seen[path] = reconcile.Sight{Block: s.Kind == mnt.BlockDevice, Trouble: trouble(s)}
	}
	return seen, err
}

// trouble is what is wrong at a path. That there is nothing is no trouble of what is there.
func trouble(s mnt.Seen) string {
	if s.Errno == unix.ENOENT {
		return ""
	}
	return s.Trouble()
}

// lookLimit is how long a path is looked at for a call that waits for it.
const lookLimit = 5 * time.Second

// devices looks at paths for package volume.
func (m machine) devices(ctx context.Context, paths ...string) (map[string]volume.Seen, error) {
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	all, err := m.lookout.Look(ctx, helper, paths)
	seen := make(map[string]volume.Seen, len(all))
	for path, s := range all {
		seen[path] = volume.Seen{Block: s.Kind == mnt.BlockDevice, Device: hooks.DeviceNumber{Major: int64(s.Major), Minor: int64(s.Minor)}, Trouble: trouble(s)}
	}
	return seen, err
}
