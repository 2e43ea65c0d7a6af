package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// ErrNotShared means that mounts below a directory do not propagate to other namespaces. See MakeShared.
var ErrNotShared = errors.New("not on a shared mount")

// MakeShared makes each directory a shared mount of itself, in a new peer group. If a directory is a shared mount
// already, it and the mounts below it stay as they are. No directory may lie below another one. MakeShared resolves
// symbolic links, because the directories hold no volume yet.
//
// The clone becomes private before it becomes shared. If / is shared, a plain bind would be a peer of /, and every
// mount below would appear twice.
func MakeShared(dirs ...string) error {
	all, err := Table(0)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := makeShared(all, dir); err != nil {
			return fmt.Errorf("make %s a shared mount: %w", dir, err)
		}
	}
	return nil
}

func makeShared(all Mounts, dir string) error {
	dir, err := resolveDir(dir)
	if err != nil {
		return err
	}
	at, found := all.At(dir)
	if found && at.Shared() {
		return nil
	}
	if found {
		return unix.Mount("", dir, "", unix.MS_SHARED, "")
	}
	fd, err := clone(dir, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for _, kind := range []uint64{unix.MS_PRIVATE, unix.MS_SHARED} {
		if err := setAttr(fd, true, unix.MountAttr{Propagation: kind}); err != nil {
			return err
		}
	}
	return attach(fd, unix.AT_FDCWD, dir)
}

// ProbePropagation checks that a mount made below dir in another namespace, such as that of a task, appears in this
// one. It removes its test mount. The error says why the mount did not appear.
func ProbePropagation(dir string) error {
	return wrap(probePropagation(dir), "test mount propagation below %s", dir)
}

func probePropagation(dir string) error {
	dir, err := resolveDir(dir)
	if err != nil {
		return err
	}
	probe := filepath.Join(dir, ".probe")
	_ = unix.Unmount(probe, unix.UMOUNT_NOFOLLOW) // a killed process may have left the mount and the directory
	if err := os.Mkdir(probe, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	defer func() { _ = unix.Rmdir(probe) }()
	err = OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("make a mount namespace (needs CAP_SYS_ADMIN, or unshare -Urm): %w", err)
		}
		return wrap(unix.Mount("probe", probe, "tmpfs", 0, "size=4k"), "mount at %s", probe)
	})
	if err != nil {
		return err
	}
	// Compare mount IDs, because reading the mount table may take long.
	outer, err := mountID(unix.AT_FDCWD, dir)
	if err != nil {
		return err
	}
	inner, err := mountID(unix.AT_FDCWD, probe)
	switch {
	case err != nil:
		return err
	case inner == outer:
		return notPropagated(dir)
	}
	return wrap(unix.Unmount(probe, 0), "unmount %s", probe)
}

// notPropagated explains why a test mount did not appear.
func notPropagated(dir string) error {
	ms, err := Table(0)
	if err != nil {
		return err
	}
	if m, found := ms.Holding(dir); found && !m.Shared() {
		return fmt.Errorf("%w: it lies on %s, which is %s; run: mount --make-shared %s", ErrNotShared, m.Point,
			m.Propagation(), m.Point)
	}
	return fmt.Errorf("%w: the test mount did not appear", ErrNotShared)
}

// mountID returns the ID of the mount that holds a path below an open directory. If path is empty, it is the mount of
// the opened file. mountID follows no link and asks no server.
func mountID(dir int, path string) (int, error) {
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_STATX_DONT_SYNC
	if path == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	var st unix.Statx_t
	err := unix.Statx(dir, path, flags, unix.STATX_MNT_ID, &st)
	return int(st.Mnt_id), wrap(err, "statx %s", path)
}

// resolveDir returns dir in the form that mountinfo has.
func resolveDir(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(dir)
}

// clone returns a detached copy of the mounts at path and below. Copies of shared mounts are peers of these, and copies
// of slaves are slaves. The kernel follows links in path and asks no server.
func clone(path string, flags uint) (int, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE|flags)
	return fd, wrap(err, "clone %s", path)
}

// mountOf returns the mount to which path leads. It follows links and asks no server, so path may be in a volume.
func (ms Mounts) mountOf(path string) (Mount, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return Mount{}, err
	}
	defer unix.Close(fd)
	id, err := mountID(fd, "")
	if err != nil {
		return Mount{}, err
	}
	i := slices.IndexFunc(ms, func(m Mount) bool { return m.ID == id })
	if i < 0 {
		return Mount{}, fmt.Errorf("mount %d of %s is not in the mount table", id, path)
	}
	return ms[i], nil
}

// attach mounts a detached tree at a path below dir, or at dir itself if path is empty.
func attach(tree, dir int, path string) error {
	flags := unix.MOVE_MOUNT_F_EMPTY_PATH
	if path == "" {
		flags |= unix.MOVE_MOUNT_T_EMPTY_PATH
	}
	return unix.MoveMount(tree, "", dir, path, flags)
}

// setAttr changes the attributes of the mount at fd. If recursive is set, it also changes all mounts below.
func setAttr(fd int, recursive bool, attr unix.MountAttr) error {
	flags := uint(unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	return wrap(unix.MountSetattr(fd, "", flags, &attr), "mount_setattr")
}

// wrap adds the operation to an error. It returns nil if the error is nil.
func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), err)
}

// OnThread runs fn on a separate thread that ends with fn, so fn may leave the thread in any namespace. The main thread
// cannot end before the process. If OnThread gets the main thread, it runs fn on another one.
func OnThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			done <- OnThread(fn)
			return
		}
		done <- fn()
	}()
	return <-done
}
