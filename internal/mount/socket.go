package mount

import (
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// MaxSocketPath is the longest path of a unix socket, in bytes (unix(7): 108 with the final zero).
const MaxSocketPath = 107

// StaleSocket says whether anybody serves the unix socket at path, and removes the socket if nobody does. That there is none is
// no error. The last two elements of path are never followed as links: a task that owns the directory cannot aim this at
// another file. What is there but is no socket is an error and stays.
func StaleSocket(path string) (answers bool, err error) {
	if len(path) > MaxSocketPath {
		return false, fmt.Errorf("socket path %s has %d bytes, at most %d work", path, len(path), MaxSocketPath)
	}
	dir, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open the directory of socket %s: %w", path, err)
	}
	defer unix.Close(dir)
	answers, err = staleAt(dir, filepath.Base(path))
	if err != nil {
		return answers, fmt.Errorf("socket %s: %w", path, err)
	}
	return answers, nil
}

func staleAt(dir int, name string) (answers bool, err error) {
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
		return false, fmt.Errorf("is there but is no socket; remove it")
	}
	if answers, err = dial(fd); answers || err != nil {
		return answers, err
	}
	if err := unix.Unlinkat(dir, name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return false, fmt.Errorf("remove it as nobody answers: %w", err)
	}
	return false, nil
}

// dial connects to the very socket that fd is open on. Unix sockets connect or refuse at once, so this cannot hang.
func dial(fd int) (answers bool, err error) {
	s, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(s)
	err = unix.Connect(s, &unix.SockaddrUnix{Name: procFD(fd)})
	switch {
	case err == nil, errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EPROTOTYPE):
		return true, nil // EAGAIN: it listens and is busy; EPROTOTYPE: it is served, as another type of socket
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOENT):
		return false, nil
	}
	return false, fmt.Errorf("dial: %w", err)
}
