package mount

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Entry is one line of the mount table of this process.
type Entry = mountinfo.Info

// Table is the mount table at one moment, in the kernel's order: what is on top comes last.
type Table []*Entry

// ReadTable reads the mount table of this process's mount namespace.
func ReadTable() (Table, error) {
	list, err := mountinfo.GetMounts(nil)
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	return list, nil
}

// At is the topmost mount whose mount point is exactly that path, or nil.
func (t Table) At(path string) *Entry {
	for i := len(t) - 1; i >= 0; i-- {
		if t[i].Mountpoint == path {
			return t[i]
		}
	}
	return nil
}

// Within lists the mounts at that path or below it.
func (t Table) Within(path string) []*Entry {
	var found []*Entry
	for _, e := range t {
		if Inside(e.Mountpoint, path) {
			found = append(found, e)
		}
	}
	return found
}

// Origin says where an open directory lies in its file system: the device and the path from that file system's root, as a
// bind mount of it would show them in the table.
func (t Table) Origin(dir *os.File) (Entry, error) {
	var st unix.Statx_t
	if err := unix.Statx(int(dir.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return Entry{}, fmt.Errorf("statx %s: %w", dir.Name(), err)
	}
	path, err := pathOf(int(dir.Fd()))
	if err != nil {
		return Entry{}, err
	}
	for _, e := range t {
		if uint64(e.ID) != st.Mnt_id {
			continue
		}
		below, err := filepath.Rel(e.Mountpoint, path)
		if err != nil {
			return Entry{}, fmt.Errorf("place %s below %s: %w", path, e.Mountpoint, err)
		}
		return Entry{Major: e.Major, Minor: e.Minor, Root: filepath.Join(e.Root, below)}, nil
	}
	return Entry{}, fmt.Errorf("the mount that holds %s is not in the mount table", path)
}

// Inside says whether path is dir or lies below it. Both are absolute and clean; nothing is looked up.
func Inside(path, dir string) bool {
	return path == dir || dir == "/" || strings.HasPrefix(path, dir+"/")
}

// pathOf is the path of an open descriptor as the kernel sees it, without symbolic links.
func pathOf(fd int) (string, error) {
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return "", fmt.Errorf("read the path of an open directory: %w", err)
	}
	return path, nil
}
