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

// MakeShared makes each directory a shared mount of itself in a peer group of its own, whatever it lies on. A directory
// that is a shared mount already stays as it is, and so do mounts below it. None of them lies below another.
//
// They are ours and hold no volume yet, so their links are resolved. The clone becomes private before it becomes
// shared: where / is shared, a plain bind would be a peer of /, and every mount below it would be made twice.
func MakeShared(dirs ...string) error {
	all, err := Table(0)
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := makeShared(all, dir); err != nil {
			return err
		}
	}
	return nil
}

func makeShared(all Mounts, dir string) error {
	dir, err := resolve(dir)
	if err != nil {
		return fmt.Errorf("make a shared mount: %w", err)
	}
	at, found := all.At(dir)
	if found && at.Shared() {
		return nil
	}
	if found {
		return wrap(unix.Mount("", dir, "", unix.MS_SHARED, ""), "make %s shared", dir)
	}
	fd, err := clone(dir, 0)
	if err != nil {
		return fmt.Errorf("make %s shared: %w", dir, err)
	}
	defer unix.Close(fd)
	for _, kind := range []uint64{unix.MS_PRIVATE, unix.MS_SHARED} {
		if err := setAttr(fd, true, unix.MountAttr{Propagation: kind}); err != nil {
			return fmt.Errorf("make %s shared: %w", dir, err)
		}
	}
	return wrap(attach(fd, unix.AT_FDCWD, dir), "mount %s on itself", dir)
}

// ProbePropagation proves that a mount below dir in another namespace, as a task makes it, appears in this one. It
// leaves nothing behind. The error says what prevents it.
func ProbePropagation(dir string) error {
	dir, err := resolve(dir)
	if err != nil {
		return fmt.Errorf("test mount propagation: %w", err)
	}
	probe, err := os.MkdirTemp(dir, ".probe-")
	if err != nil {
		return fmt.Errorf("test mount propagation below %s: %w", dir, err)
	}
	defer func() { _ = unix.Rmdir(probe) }()
	err = OnThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("make a mount namespace (this needs CAP_SYS_ADMIN, as in unshare -Urm): %w", err)
		}
		return wrap(unix.Mount("probe", probe, "tmpfs", 0, "size=4k"), "mount at %s", probe)
	})
	if err != nil {
		return fmt.Errorf("test mount propagation below %s: %w", dir, err)
	}
	arrived, err := crosses(dir, probe)
	if err != nil {
		return fmt.Errorf("test mount propagation below %s: %w", dir, err)
	}
	if !arrived {
		return missed(dir)
	}
	return wrap(unix.Unmount(probe, 0), "take the probe at %s down", probe)
}

// crosses reports whether inner, a directory of ours in outer, lies on another mount. It does not read the mount table,
// which may be long.
func crosses(outer, inner string) (bool, error) {
	var mounts [2]uint64
	for i, path := range []string{outer, inner} {
		var st unix.Statx_t
		if err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_MNT_ID, &st); err != nil {
			return false, wrap(err, "look at %s", path)
		}
		if mounts[i] = st.Mnt_id; st.Mask&unix.STATX_MNT_ID == 0 { // a kernel before 5.8
			_, found, err := At(inner)
			return found, err
		}
	}
	return mounts[0] != mounts[1], nil
}

// missed explains why a test mount did not appear.
func missed(dir string) error {
	ms, err := Table(0)
	if err != nil {
		return err
	}
	m, found := ms.Holding(dir)
	switch {
	case !found:
		return fmt.Errorf("mounts below %s do not propagate: it lies on no mount: %w", dir,
			ErrNotShared)
	case !m.Shared():
		return fmt.Errorf("mounts below %s do not propagate: it lies on %s, which is %s; run: mount --make-shared %s: %w",
			dir, m.Point, m.Propagation(), m.Point, ErrNotShared)
	}
	return fmt.Errorf("mounts below %s do not propagate although %s is shared: %w", dir, m.Point,
		ErrNotShared)
}

// resolve returns dir as mountinfo writes it.
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
	var st unix.Statx_t
	if err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_MNT_ID, &st); err != nil {
		return Mount{}, err
	}
	i := slices.IndexFunc(ms, func(m Mount) bool { return m.ID == int(st.Mnt_id) })
	if i < 0 {
		return Mount{}, fmt.Errorf("mount %d of %s is not in the mount table", st.Mnt_id, path)
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

// wrap adds to an error what was being done. It returns nil for nil.
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
