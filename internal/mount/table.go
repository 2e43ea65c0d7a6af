package mount

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// Mount is one line of mountinfo (proc_pid_mountinfo(5)), unescaped.
type Mount struct {
	ID     int    // may be reused after an unmount
	Parent int    // the mount that this one is mounted on
	Major  int    // of the device
	Minor  int    // of the device
	Root   string // the directory of the file system that is mounted; ends in "//deleted" once it was removed
	Point  string // mount point, as seen from the reader's root
	FSType string
	Source string // a device, or a text of the file system
	Flags  string // of this mount: "rw,nosuid"
	Super  string // of the file system: "rw,size=64k"; may hold secrets
	Group  int    // peer group with which it shares mounts; 0: none
	Master int    // peer group from which it receives mounts; 0: none
}

// Shared reports whether mounts below m propagate to its peers.
func (m Mount) Shared() bool { return m.Group != 0 }

// ReadOnly reports whether m or its file system refuses writes.
func (m Mount) ReadOnly() bool { return hasFlag(m.Flags, "ro") || hasFlag(m.Super, "ro") }

// Propagation returns m's propagation in the terms of mount(8).
func (m Mount) Propagation() string {
	switch {
	case m.Shared() && m.Master != 0:
		return "shared and slave"
	case m.Shared():
		return "shared"
	case m.Master != 0:
		return "slave"
	}
	return "private"
}

func (m Mount) String() string {
	return fmt.Sprintf("%s (%s of %s, %s, %s)", m.Point, m.FSType, m.Source, m.Flags, m.Propagation())
}

func hasFlag(list, flag string) bool { return slices.Contains(strings.Split(list, ","), flag) }

// Mounts is the mount table at one moment.
type Mounts []Mount

// Table returns the mount table of a process. With pid 0 it is that of the calling thread.
func Table(pid int) (Mounts, error) {
	if pid == 0 {
		infos, err := mountinfo.GetMounts(nil)
		return mountsOf(infos), wrap(err, "read the mount table")
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	defer f.Close()
	infos, err := mountinfo.GetMountsFromReader(f, nil)
	return mountsOf(infos), wrap(err, "read the mount table %s", f.Name())
}

func mountsOf(infos []*mountinfo.Info) Mounts {
	ms := make(Mounts, 0, len(infos))
	for _, i := range infos {
		ms = append(ms, Mount{
			ID: i.ID, Parent: i.Parent, Major: i.Major, Minor: i.Minor, Root: i.Root, Point: i.Mountpoint,
			FSType: i.FSType, Source: i.Source, Flags: i.Options, Super: i.VFSOptions,
			Group: optional(i.Optional, "shared:"), Master: optional(i.Optional, "master:"),
		})
	}
	return ms
}

// optional returns the number in an optional field of mountinfo, or 0 if it is missing.
func optional(fields, tag string) int {
	for f := range strings.FieldsSeq(fields) {
		if n, found := strings.CutPrefix(f, tag); found {
			group, _ := strconv.Atoi(n)
			return group
		}
	}
	return 0
}

// At returns the mount at exactly this path, in the calling thread's namespace. See Mounts.At.
func At(path string) (Mount, bool, error) {
	ms, err := Table(0)
	if err != nil {
		return Mount{}, false, err
	}
	m, found := ms.At(path)
	return m, found, nil
}

// Below lists the mounts at root or below it, in the calling thread's namespace.
func Below(root string) (Mounts, error) {
	ms, err := Table(0)
	return ms.Below(root), err
}

// At returns the uppermost mount at path. It does not find a mount that a later mount at a parent directory hides. The
// path must be absolute, and its symbolic links are not resolved.
func (ms Mounts) At(path string) (Mount, bool) {
	m, found := ms.Holding(path)
	return m, found && m.Point == filepath.Clean(path)
}

// Holding returns the mount that contains a path.
func (ms Mounts) Holding(path string) (Mount, bool) {
	root, found := ms.root()
	if !found || !filepath.IsAbs(path) {
		return Mount{}, false
	}
	return ms.climb(root, filepath.Clean(path)), true
}

// climb follows a path from a mount, and goes to the top of each stack of mounts on the way.
func (ms Mounts) climb(at Mount, path string) Mount {
	for end := 1; end <= len(path); end++ {
		// Stop only where path[:end] is "/", a parent of path, or path.
		if end > 1 && end < len(path) && path[end] != '/' {
			continue
		}
		for range ms { // no stack is higher than the table is long
			i := slices.IndexFunc(ms, func(m Mount) bool {
				return m.Parent == at.ID && m.ID != at.ID && m.Point == path[:end]
			})
			if i < 0 {
				break
			}
			at = ms[i]
		}
	}
	return at
}

// root returns the lowest mount at /.
func (ms Mounts) root() (Mount, bool) {
	ids := make(map[int]bool, len(ms))
	for _, m := range ms {
		ids[m.ID] = true
	}
	i := slices.IndexFunc(ms, func(m Mount) bool { return m.Point == "/" && (m.Parent == m.ID || !ids[m.Parent]) })
	if i < 0 {
		return Mount{}, false
	}
	return ms[i], true
}

// Stack lists all mounts at exactly this path, also hidden ones.
func (ms Mounts) Stack(path string) Mounts {
	path = filepath.Clean(path)
	return ms.filter(func(m Mount) bool { return m.Point == path })
}

// Below lists the mounts at root or below it, also hidden ones.
func (ms Mounts) Below(root string) Mounts {
	return ms.filter(func(m Mount) bool { return within(root, m.Point) })
}

// SelfBind reports whether m is a bind mount of a directory onto itself, as MakeShared makes.
func (ms Mounts) SelfBind(m Mount) bool {
	for _, parent := range ms {
		if parent.ID != m.Parent {
			continue
		}
		rel, err := filepath.Rel(parent.Point, m.Point)
		return err == nil && parent.Major == m.Major && parent.Minor == m.Minor &&
			filepath.Join(parent.Root, rel) == m.Root
	}
	return false
}

func (ms Mounts) filter(keep func(Mount) bool) Mounts {
	var out Mounts
	for _, m := range ms {
		if keep(m) {
			out = append(out, m)
		}
	}
	return out
}

// within reports whether path is root or lies below it. It compares the texts only.
func within(root, path string) bool {
	root, path = filepath.Clean(root), filepath.Clean(path)
	return root == path || root == "/" || strings.HasPrefix(path, root+"/")
}
