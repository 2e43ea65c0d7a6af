package mount

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	mounttable "holdfast/internal/mount"
)

// Origin returns where an open file or directory lies in its file system, as a bind mount of it would have it.
func Origin(table mounttable.Mounts, file *os.File) (mounttable.Mount, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(file.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return mounttable.Mount{}, fmt.Errorf("statx %s: %w", file.Name(), err)
	}
	path, err := pathOf(int(file.Fd()))
	if err != nil {
		return mounttable.Mount{}, err
	}
	for _, m := range table {
		if uint64(m.ID) != st.Mnt_id {
			continue
		}
		below, err := filepath.Rel(m.Point, path)
		if err != nil {
			return mounttable.Mount{}, fmt.Errorf("place %s below %s: %w", path, m.Point, err)
		}
		return mounttable.Mount{Major: m.Major, Minor: m.Minor, Root: filepath.Join(m.Root, below)}, nil
	}
	return mounttable.Mount{}, fmt.Errorf("the mount that holds %s is not in the mount table", path)
}

// SameOrigin reports whether two mounts are of the same file or directory.
func SameOrigin(a, b mounttable.Mount) bool {
	return a.Major == b.Major && a.Minor == b.Minor && a.Root == b.Root
}

// Inside reports whether path is dir or lies below it. Both are absolute and clean.
func Inside(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}

// pathOf returns the path of an open file, without symbolic links.
func pathOf(fd int) (string, error) {
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return "", fmt.Errorf("read the path of an open file: %w", err)
	}
	return path, nil
}
