package disk

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// within opens below a directory: the kernel follows no link and enters no mount, also one that was made this moment.
const within = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV

// Dirs lists the directories strictly below root, children first, without entering a mount: neither a mount point nor what is below it
// is listed.
func (d *Disk) Dirs(root string) (dirs []string, err error) {
	fd, err := unix.Open(root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", root, err)
	}
	return appendDirs(nil, os.NewFile(uintptr(fd), root))
}

// appendDirs adds the directories below the open one, which it closes.
func appendDirs(dirs []string, at *os.File) ([]string, error) {
	defer at.Close()
	names, err := at.Readdirnames(-1) // names only: a stat could ask the server of a dead mount
	if errors.Is(err, unix.ENOENT) {  // removed since it was opened
		return dirs, nil
	}
	if err != nil {
		return dirs, err
	}
	for _, name := range names {
		how := &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC, Resolve: within}
		fd, err := unix.Openat2(int(at.Fd()), name, how)
		path := filepath.Join(at.Name(), name)
		switch {
		case errors.Is(err, unix.EXDEV), errors.Is(err, unix.ENOENT): // a mount; gone meanwhile
			continue
		case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP): // a file; a link
			continue
		case err != nil:
			return dirs, fmt.Errorf("open %s: %w", path, err)
		}
		if dirs, err = appendDirs(dirs, os.NewFile(uintptr(fd), path)); err != nil {
			return dirs, err
		}
		dirs = append(dirs, path)
	}
	return dirs, nil
}
