package mount

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// area says who owns the files below a directory of a space.
type area int

const (
	host   area = iota // the host: the space must not make anything there
	copied             // the space: a tmpfs that replaces a directory of the host
	own                // the space: its tmpfs, and binds in it
	shared             // a bidirectional bind: a mount there would appear on the host
)

// maxCopied is the largest number of entries of a host's directory that is copied because it lacks a target.
const maxCopied = 4096

// tree builds the root of a space, on the thread that is inside it.
type tree struct {
	sources map[string]int  // detached clones, by target
	areas   map[string]area // by directory; the longest matching prefix counts
	copies  []int           // the copied directories, opened with O_PATH
}

func newTree() *tree {
	return &tree{sources: map[string]int{}, areas: map[string]area{}}
}

// location is an open file or directory of a space.
type location struct {
	path string // without symbolic links
	fd   int
}

func (t *tree) close() {
	for _, fd := range t.sources {
		unix.Close(fd)
	}
	for _, fd := range t.copies {
		unix.Close(fd)
	}
}

// setArea records the area of path, and removes areas below it.
func (t *tree) setArea(path string, whose area) {
	maps.DeleteFunc(t.areas, func(p string, _ area) bool { return within(path, p) })
	t.areas[path] = whose
}

// areaOf returns the area of path.
func (t *tree) areaOf(path string) area {
	for {
		if a, known := t.areas[path]; known || path == "/" {
			return a
		}
		path = filepath.Dir(path)
	}
}

// cloneBinds clones the sources of the wanted binds.
func (t *tree) cloneBinds(layers []Layer, wanted func(Bind) bool) error {
	for _, l := range layers {
		b, is := l.(Bind)
		if !is || !wanted(b) {
			continue
		}
		if _, twice := t.sources[b.Target]; twice {
			return fmt.Errorf("bind %s: %s is the target of two binds", b.Source, b.Target)
		}
		if !filepath.IsAbs(b.Source) {
			return fmt.Errorf("bind %q: the source is no absolute path", b.Source)
		}
		fd, err := clone(b.Source, 0)
		if err != nil {
			return fmt.Errorf("bind %s: %w", b.Source, err)
		}
		t.sources[b.Target] = fd
	}
	return nil
}

// buildRoot makes the root, which is a tmpfs with the entries of the host's root, and changes to it.
func (t *tree) buildRoot(scratch string) error {
	if err := t.copyDir("/", scratch); err != nil {
		return fmt.Errorf("build the root of a task: %w", err)
	}
	if err := unix.Chdir(scratch); err != nil {
		return fmt.Errorf("enter the root of a task: %w", err)
	}
	// After pivot_root, the old root lies on top of the new one, also at ".". It is then unmounted with all mounts
	// below it.
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot to the root of a task: %w", err)
	}
	if err := unix.Unmount(".", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("leave the root of the host: %w", err)
	}
	return wrap(unix.Chdir("/"), "enter the root of a task")
}

// copyDir mounts a tmpfs and binds each entry of the host's directory dir into it. New entries in the tmpfs do not
// appear on the host.
func (t *tree) copyDir(dir, at string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	if len(entries) > maxCopied {
		return fmt.Errorf("%s has %d entries, too many to copy it for the task; choose another target", dir,
			len(entries))
	}
	clones := make(map[string]int, len(entries))
	defer func() {
		for _, fd := range clones {
			unix.Close(fd)
		}
	}()
	for _, e := range entries {
		if e.Type()&os.ModeSymlink != 0 {
			continue
		}
		if clones[e.Name()], err = clone(filepath.Join(dir, e.Name()),
			unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT); err != nil {
			delete(clones, e.Name())
			if errors.Is(err, unix.ENOENT) {
				continue // removed meanwhile
			}
			return err
		}
	}
	links, err := readLinks(dir, entries)
	if err != nil {
		return err
	}
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV)
	if dir == "/dev" {
		flags = unix.MS_NOSUID // for ptmx
	}
	if err := unix.Mount("tmpfs", at, "tmpfs", flags, "size=4m,mode=755"); err != nil {
		return fmt.Errorf("mount a tmpfs at %s: %w", at, err)
	}
	copy, err := unix.Open(at, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	t.copies = append(t.copies, copy)
	t.setArea(dir, copied)
	for name, to := range links {
		if err := os.Symlink(to, filepath.Join(at, name)); err != nil {
			return err
		}
	}
	for name, fd := range clones {
		if err := t.attachCopied(fd, dir, filepath.Join(at, name)); err != nil {
			return err
		}
		t.areas[filepath.Join(dir, name)] = host
	}
	return nil
}

// readLinks returns the targets of the symbolic links of a directory, by name.
func readLinks(dir string, entries []os.DirEntry) (map[string]string, error) {
	links := map[string]string{}
	for _, e := range entries {
		if e.Type()&os.ModeSymlink == 0 {
			continue
		}
		to, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		links[e.Name()] = to
	}
	return links, nil
}

// attachTree makes a mount point of the right type and mounts a detached tree there.
func attachTree(fd int, at string) error {
	dir, err := isDir(fd)
	if err == nil && dir {
		err = unix.Mkdir(at, 0o755)
	} else if err == nil {
		err = unix.Mknod(at, unix.S_IFREG|0o644, 0)
	}
	if err != nil {
		return fmt.Errorf("make %s: %w", at, err)
	}
	return wrap(attach(fd, unix.AT_FDCWD, at), "mount at %s", at)
}

// openTarget opens a path. If the path is missing, openTarget makes a directory or an empty file, with its parents. If
// these would be made in a directory of the host, a copy replaces that directory, so that nothing is made on the host.
func (t *tree) openTarget(target string, dir bool, mode uint32) (location, error) {
	path, missing, err := t.resolve(target)
	if err != nil {
		return location{}, err
	}
	switch whose := t.areaOf(path); {
	case whose == shared:
		return location{}, errors.New("it lies in a bidirectional bind, so a mount there would appear on the host")
	case whose == host && missing != "":
		if err := t.copyDir(path, path); err != nil {
			return location{}, err
		}
	}
	fd, err := t.create(path, missing, dir, mode)
	return location{filepath.Join(path, missing), fd}, err
}

// resolve follows target inside the space as far as it exists, and returns the missing rest. It follows links of the
// host. It follows no links in the space's own directories, because an earlier run of the task may have made them.
func (t *tree) resolve(target string) (path, missing string, err error) {
	path, rest := "/", strings.Split(strings.Trim(filepath.Clean(target), "/"), "/")
	for links := 0; len(rest) > 0; {
		next := filepath.Join(path, rest[0])
		var st unix.Stat_t
		err := unix.Lstat(next, &st)
		switch {
		case errors.Is(err, unix.ENOENT):
			return path, filepath.Join(rest...), nil
		case err != nil:
			return "", "", fmt.Errorf("%s: %w", next, err)
		case st.Mode&unix.S_IFMT != unix.S_IFLNK:
			path, rest = next, rest[1:]
			continue
		}
		if whose := t.areaOf(path); whose == own || whose == shared {
			return "", "", fmt.Errorf("%s is a symbolic link in a directory of the task; remove it", next)
		}
		to, err := os.Readlink(next)
		if err != nil {
			return "", "", err
		}
		if links++; links > 40 {
			return "", "", fmt.Errorf("%s: %w", target, unix.ELOOP)
		}
		if !filepath.IsAbs(to) {
			to = filepath.Join(path, to)
		}
		path, rest = "/", append(strings.Split(strings.Trim(filepath.Clean(to), "/"), "/"), rest[1:]...)
	}
	return path, "", nil
}

// create makes missing below path, which exists, and opens the result. It follows no link.
func (t *tree) create(path, missing string, dir bool, mode uint32) (int, error) {
	base, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_NO_SYMLINKS})
	if err != nil || missing == "" {
		return base, wrap(err, "open %s", path)
	}
	defer unix.Close(base)
	if dir {
		fd, err := mkdirAll(base, missing, 0o755)
		if err != nil {
			return -1, err
		}
		return fd, wrap(unix.Chmod(procFD(fd), mode), "set the mode of %s", missing)
	}
	parent, err := mkdirAll(base, filepath.Dir(missing), 0o755)
	if err != nil {
		return -1, err
	}
	defer unix.Close(parent)
	name := filepath.Base(missing)
	if err := unix.Mknodat(parent, name, unix.S_IFREG|0o600, 0); err != nil && !errors.Is(err, unix.EEXIST) {
		return -1, fmt.Errorf("make %s: %w", missing, err)
	}
	return openBelow(parent, name, unix.O_PATH)
}

// makeCopiesReadOnly makes copied directories read-only, because files written there would be lost.
func (t *tree) makeCopiesReadOnly() error {
	for _, fd := range t.copies {
		if err := setAttr(fd, false, unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}); err != nil {
			return fmt.Errorf("make a copied directory read-only: %w", err)
		}
	}
	return nil
}

// isDir reports whether an open path is a directory. It asks no server.
func isDir(fd int) (bool, error) {
	kind, err := fileType(fd)
	return kind == unix.S_IFDIR, err
}
