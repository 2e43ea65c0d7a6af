package mount

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/proc"
	"holdfast/registry"
)

// Manager makes, inspects and removes directories, sockets and mounts below the two directories of a Layout. It refuses
// every other path. Its errors have a kind of package registry. No method follows a path into a mount, so a dead mount
// blocks none. Operations that touch a mount run in a helper process with a deadline.
type Manager struct {
	layout hooks.Layout
	boot   string
	helper Helper
}

// Limits of helper processes. A volume's server needs a round trip for each name of a part's path.
const (
	inspectLimit = 5 * time.Second
	partLimit    = 10 * time.Second
	unmountLimit = 30 * time.Second
)

// maxNamed is the maximum number of users in an error.
const maxNamed = 5

// NewManager returns a Manager whose helper processes run HelperCommand.
func NewManager(l hooks.Layout) (*Manager, error) {
	boot, err := proc.BootID()
	return &Manager{layout: l, boot: boot, helper: Helper{Command: HelperCommand}}, err
}

// Boot returns the ID of the current boot.
func (m *Manager) Boot() string { return m.boot }

// Share makes the run directory and the mount root shared mounts. It checks that a mount that a task makes below the
// mount root appears in this namespace.
func (m *Manager) Share() error {
	dirs := []string{m.layout.Run, m.layout.MountRoot()}
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return withExhausted(err)
		}
	}
	if err := MakeShared(dirs...); err != nil {
		return err
	}
	err := ProbePropagation(m.layout.MountRoot())
	// Only the ENOSPC of mkdir means a full disk. That of mount means that there are too many mounts.
	if made, is := errors.AsType[*fs.PathError](err); is && made.Op == "mkdir" {
		return withExhausted(err)
	}
	return err
}

// split cuts a path into a directory of the layout (the mount root or the run directory) and the rest.
func (m *Manager) split(path string) (root, rel string, err error) {
	if m.layout.Ours(path) {
		for _, root := range []string{m.layout.MountRoot(), m.layout.Run} {
			if rel, below := strings.CutPrefix(path, root+"/"); below {
				return root, rel, nil
			}
		}
	}
	return "", "", registry.Errorf(registry.ErrInternal, "path %q is not below %s or %s", path, m.layout.MountRoot(),
		m.layout.SocketDirs())
}

// check refuses paths that are not below the layout's directories.
func (m *Manager) check(paths ...string) error {
	for _, path := range paths {
		if _, _, err := m.split(path); err != nil {
			return err
		}
	}
	return nil
}

// checkSocket refuses a path that is not below the run directory.
func (m *Manager) checkSocket(path string) error {
	root, _, err := m.split(path)
	if err == nil && root != m.layout.Run {
		err = registry.Errorf(registry.ErrInternal, "path %q is not below %s", path, m.layout.SocketDirs())
	}
	return err
}

// MakeDir makes a directory and its parents with mode 0700. It may exist.
func (m *Manager) MakeDir(path string) error {
	root, rel, err := m.split(path)
	if err == nil {
		err = os.MkdirAll(root, 0o700)
	}
	if err == nil {
		err = MkdirAll(root, rel)
	}
	return withExhausted(err)
}

// MakeDirs makes directories.
func (m *Manager) MakeDirs(dirs []hooks.HostDir) error {
	for _, dir := range dirs {
		if err := m.MakeDir(dir.Path); err != nil {
			return err
		}
	}
	return nil
}

// RemoveDir removes an empty directory that is no mount point. It may be missing.
func (m *Manager) RemoveDir(path string) error {
	root, rel, err := m.split(path)
	if err != nil {
		return err
	}
	return Rmdir(root, rel)
}

// ClearSocket reports whether a process serves the socket, and removes the socket if none does.
func (m *Manager) ClearSocket(_ context.Context, path string) (served bool, err error) {
	if err := m.checkSocket(path); err != nil {
		return false, err
	}
	return RemoveStaleSocket(path)
}

// RemoveSocketDir removes the directory of a task's sockets and all files in it.
func (m *Manager) RemoveSocketDir(path string) error {
	if err := m.checkSocket(path); err != nil {
		return err
	}
	return RemoveTree(path)
}

// SweepSocketDirs removes the socket directories that are not in keep, unless a process serves their socket.
func (m *Manager) SweepSocketDirs(keep map[string]bool) error {
	entries, err := os.ReadDir(m.layout.SocketDirs())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		dir := filepath.Join(m.layout.SocketDirs(), e.Name())
		if keep[dir] {
			continue
		}
		served, err := RemoveStaleSocket(filepath.Join(dir, filepath.Base(m.layout.Socket(registry.TaskKey{}))))
		if err == nil && !served {
			err = RemoveTree(dir)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Mounted reports whether path is a mount point.
func (m *Manager) Mounted(path string) (bool, error) { return IsPoint(m.layout.MountRoot(), path) }

// Served calls the function Served.
func (m *Manager) Served(path string) bool { return Served(path) }

// Serves calls the function Serves.
func (m *Manager) Serves(socket string) bool { return Serves(socket) }

// Mounts lists the mounts strictly below root, the oldest first, also hidden ones.
func (m *Manager) Mounts(root string) (Mounts, error) {
	all, err := Table(0)
	return all.filter(func(m Mount) bool { return m.Point != root && within(root, m.Point) }), err
}

// Dirs calls the function Dirs.
func (m *Manager) Dirs(root string) ([]DirInfo, error) { return Dirs(root) }

// Users calls the function Users.
func (m *Manager) Users(points []string) (map[string][]User, error) {
	if err := m.check(points...); err != nil {
		return nil, err
	}
	return Users(points)
}

// Inspect inspects paths for at most 5 seconds. See Helper.Inspect.
func (m *Manager) Inspect(ctx context.Context, paths ...string) (map[string]Info, error) {
	if err := m.check(paths...); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, inspectLimit)
	defer cancel()
	found, err := m.helper.Inspect(ctx, paths)
	return found, m.explain("", err)
}

// Unmount unmounts the uppermost mount at path, if there is one. It is neither lazy nor forced: a mount in use stays,
// and the error (ErrConflict) names the users.
func (m *Manager) Unmount(ctx context.Context, path string) error {
	return m.withHelper(ctx, path, unmountLimit, m.helper.Unmount)
}

// withHelper calls do with the two parts of a path (split), and with a deadline.
func (m *Manager) withHelper(
	ctx context.Context, path string, limit time.Duration, do func(ctx context.Context, root, rel string) error,
) error {
	root, rel, err := m.split(path)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return m.explain(path, do(ctx, root, rel))
}

// HasPart reports whether the mount at a path is a part of the volume at target, and whether anything is mounted at the
// path. It reads the mount table. A part whose directory was removed from the volume does not count.
func (m *Manager) HasPart(target, at string) (has, mounted bool, err error) {
	if err := m.check(target, at); err != nil {
		return false, false, err
	}
	table, err := Table(0)
	if err != nil {
		return false, false, err
	}
	part, mounted := table.At(at)
	volume, found := table.At(target)
	has = mounted && found && part.Major == volume.Major && part.Minor == volume.Minor &&
		!strings.HasSuffix(part.Root, "//deleted") && within(volume.Root, part.Root)
	return has, mounted, nil
}

// MountPart mounts a path of the volume at target at a second place. See the function MountPart.
func (m *Manager) MountPart(ctx context.Context, target, path, at string, create bool) error {
	from, volume, err := m.split(target)
	if err != nil {
		return err
	}
	return m.withHelper(ctx, at, partLimit, func(ctx context.Context, root, rel string) error {
		if from != root {
			return registry.Errorf(registry.ErrInternal, "%q and %q are below different roots", target, at)
		}
		return m.helper.MountPart(ctx, Part{Root: root, Volume: volume, Path: path, Make: create, At: rel})
	})
}

// UnmountPart unmounts a part and removes its directory. See the function UnmountPart.
func (m *Manager) UnmountPart(ctx context.Context, at string) error {
	return m.withHelper(ctx, at, partLimit, m.helper.UnmountPart)
}

// Limits of SetOwnership. After a walk was cut off, the next try continues it, because it skips files with the right
// owner.
const (
	ownLimit  = 10 * time.Second
	walkLimit = 5 * time.Minute
)

// SetOwnership sets owner, group and mode of the volume at target. The result says if it did not: because the volume is
// mounted read-only, or because it has files and the ownership is not recursive. See the function SetOwnership.
func (m *Manager) SetOwnership(
	ctx context.Context, target string, o registry.Ownership,
) (registry.OwnershipResult, error) {
	limit := ownLimit
	if o.Recursive {
		limit = walkLimit
	}
	err := m.withHelper(ctx, target, limit, func(ctx context.Context, root, rel string) error {
		return m.helper.SetOwnership(ctx, Ownership{Root: root, Volume: rel, UID: number(o.Owner, 10),
			GID: number(o.Group, 10), Mode: number(o.Mode, 8), Recursive: o.Recursive})
	})
	switch {
	case err == nil:
		return registry.OwnershipSet, nil
	case errors.Is(err, ErrNotEmpty):
		return registry.OwnershipNotEmpty, nil
	case errors.Is(err, unix.EROFS):
		return registry.OwnershipReadOnly, nil
	}
	return "", err
}

// number parses a number of mount_options, which config has checked. It returns -1 for an empty text.
func number(s string, base int) int {
	n, err := strconv.ParseUint(s, base, 32)
	if err != nil {
		return -1
	}
	return int(n)
}

// explain adds the kind and the next step to an error about path.
func (m *Manager) explain(path string, err error) error {
	const waiting = "see which process waits in the kernel (ps -eo pid,stat,wchan,comm), then try again"
	switch {
	case errors.Is(err, ErrNoPart):
		return registry.Errorf(registry.ErrNotFound, "%w; make it, or correct sub_path of the volume_mount", err)
	case errors.Is(err, ErrOutside):
		return registry.Errorf(registry.ErrDenied, "%w; correct sub_path of the volume_mount", err)
	case errors.Is(err, ErrHeld), errors.Is(err, ErrHung):
		return registry.Errorf(registry.ErrUncertain, "%w; %s", err, waiting)
	case errors.Is(err, ErrBusy):
		return registry.Errorf(registry.ErrConflict, "%w; %s", err, m.namedUsers(path))
	case errors.Is(err, ErrMounted):
		return registry.Errorf(registry.ErrConflict, "%w; run: holdfast doctor", err)
	}
	return withExhausted(err)
}

// namedUsers returns the users of the mount at path, and what to do about them.
func (m *Manager) namedUsers(path string) string {
	found, err := m.Users([]string{path})
	var texts []string
	for _, u := range found[path] {
		texts = append(texts, u.Text)
	}
	switch {
	case err != nil:
		return "cannot find out who uses it: " + err.Error()
	case len(texts) == 0:
		return "no process is seen to use it: look for mapped files (lsof), a loop device (losetup --list), " +
			"a swap file (swapon) or an export on it"
	case len(texts) > maxNamed:
		texts = append(texts[:maxNamed:maxNamed], fmt.Sprintf("and %d more", len(texts)-maxNamed))
	}
	return strings.Join(texts, ", ") + ": stop that first"
}

// withExhausted adds the kind ErrExhausted to the error of a full file system.
func withExhausted(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return registry.Errorf(registry.ErrExhausted, "%w; make room, then try again", err)
	}
	return err
}
