package mount

import (
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
)

// RemoveStaleSocket reports whether a process serves the unix socket at path, and removes the socket if none does. A
// missing socket is no error. It never follows the last two elements of path as links, so a task that owns the
// directory cannot redirect the removal. A file of another type is an error and stays.
func RemoveStaleSocket(path string) (served bool, err error) {
	if len(path) > hooks.MaxSocketPath {
		return false, fmt.Errorf("socket path %s has %d bytes; the limit is %d; choose a shorter one", path, len(path),
			hooks.MaxSocketPath)
	}
	dir, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open the directory of socket %s: %w", path, err)
	}
	defer unix.Close(dir)
	served, err = removeStaleAt(dir, filepath.Base(path))
	if err != nil {
		return served, fmt.Errorf("socket %s: %w", path, err)
	}
	return served, nil
}

func removeStaleAt(dir int, name string) (served bool, err error) {
	fd, err := unix.Openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return false, fmt.Errorf("the file is no socket; remove it, or choose another path")
	}
	if served, err = isServedSocket(fd); served || err != nil {
		return served, err
	}
	if err := unix.Unlinkat(dir, name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return false, fmt.Errorf("remove the stale socket: %w", err)
	}
	return false, nil
}

// isServedSocket connects to the socket that fd has open. It cannot hang, because the connect does not block.
func isServedSocket(fd int) (served bool, err error) {
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(s)
	err = unix.Connect(s, &unix.SockaddrUnix{Name: procFD(fd)})
	switch {
	case err == nil, errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EPROTOTYPE):
		return true, nil // EAGAIN: it listens and is busy; EPROTOTYPE: a socket of another type is served
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOENT):
		return false, nil
	}
	return false, fmt.Errorf("dial: %w", err)
}
