package mount

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"
)

// ErrNotShared means that mounts below a directory do not propagate to other namespaces. See MakeShared.
var ErrNotShared = errors.New("not on a shared mount")

// MakeShared makes each directory a shared mount of itself in a peer group of its own. A directory that is a shared
// mount stays as it is, and so do mounts below it. No directory lies below another one. Symbolic links are resolved, as
// the directories hold no volume yet.
//
// The clone becomes private before it becomes shared: where / is shared, a plain bind would be a peer of /, and every
// mount below it would be made twice.
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
	dir, err := resolve(dir)
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

// ProbePropagation checks that a mount below dir in another namespace, as in that of a task, appears in this one. It
// removes its test mount. The error has the reason.
func ProbePropagation(dir string) error {
	return wrap(probePropagation(dir), "test mount propagation below %s", dir)
}

func probePropagation(dir string) error {
	dir, err := resolve(dir)
	if err != nil {
		return err
	}
	probe, err := os.MkdirTemp(dir, ".probe-")
	if err != nil {
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
	// Mount IDs, as the mount table may be long.
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

// mountID returns the ID of the mount of a path below an open directory, or of the file itself if path is empty. It
// follows no link and asks no server.
func mountID(dir int, path string) (int, error) {
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_STATX_DONT_SYNC
	if path == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	var st unix.Statx_t
	err := unix.Statx(dir, path, flags, unix.STATX_MNT_ID, &st)
	return int(st.Mnt_id), wrap(err, "statx %s", path)
}

// resolve returns dir as mountinfo has it.
func resolve(dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	return filepath.EvalSymlinks(dir)
}

// clone returns a detached copy of the mounts at path and below: peers of shared mounts, slaves of slaves. The kernel
// follows links in path and asks no server.
func clone(path string, flags uint) (int, error) {
	fd, err := unix.OpenTree(unix.AT_FDCWD, path, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_RECURSIVE|flags)
	return fd, wrap(err, "clone %s", path)
}

// mountOf returns the mount that path leads to, following links. It asks no server, so it is safe for a volume.
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

// setAttr changes the attributes of the mount at fd; recursive: of all mounts below it, too.
func setAttr(fd int, recursive bool, attr unix.MountAttr) error {
	flags := uint(unix.AT_EMPTY_PATH)
	if recursive {
		flags |= unix.AT_RECURSIVE
	}
	return wrap(unix.MountSetattr(fd, "", flags, &attr), "mount_setattr")
}

// wrap adds the operation to an error. It returns nil for nil.
func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), err)
}

// OnThread runs fn on a thread of its own, which ends with fn, so fn may leave it in any namespace. The main thread
// cannot end before the process: if fn gets it, fn runs on another.
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
