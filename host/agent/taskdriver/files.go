package taskdriver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// File is a small file that a driver writes before a task starts. It replaces the file of an earlier attempt.
type File struct {
	Path string      `json:"path"` // relative to the task's directory
	Mode fs.FileMode `json:"mode"`
	Data []byte      `json:"data"`
}

// split splits the path at its first directory.
func (f File) split() (dir, name string) {
	dir, name, _ = strings.Cut(filepath.Clean(f.Path), "/")
	return dir, name
}

// Own reports whether the file is in a directory that each task sees: local/ or secrets/.
func (f File) Own() bool {
	dir, name := f.split()
	return name != "" && (dir == "local" || dir == "secrets")
}

// reservedNames are the names in a task's directory that a job cannot use for its files.
var reservedNames = []string{
	"alloc", "dirs", "logs", "root", "parent.log", handleFile, exitFile, stopFile, lockFile, execFile,
}

// checkFiles refuses paths that a task cannot see. A container may see all directories but the reserved ones.
func (t Task) checkFiles(container bool) error {
	for _, f := range t.Files {
		dir, name := f.split()
		if f.Own() || container && name != "" && filepath.IsLocal(f.Path) && !slices.Contains(reservedNames, dir) {
			continue
		}
		return registry.Invalid("file %s: write it to local/ or secrets/, which the task sees as /local and /secrets",
			f.Path)
	}
	return nil
}

// writeFiles writes the files of the task. pathOf returns where this process sees the first directory of a file's path.
// Links of an earlier attempt cannot redirect a file to outside of that directory.
func (t Task) writeFiles(pathOf func(dir string) string, uid, gid int) error {
	for _, f := range t.Files {
		if err := f.writeIn(pathOf, uid, gid); err != nil {
			return fmt.Errorf("template %s: %w", f.Path, classifyFileError(err))
		}
	}
	return nil
}

// classifyFileError returns an ErrInvalid for an error that would recur at the next attempt. Such an error comes from a
// link that leads out of the directory, which os.Root refuses without an error number, or from an obstacle that an
// earlier attempt has made. A full disk is ErrExhausted. Other errors stay unchanged.
func classifyFileError(err error) error {
	number, has := errors.AsType[unix.Errno](err)
	lasting := []unix.Errno{unix.ENOTDIR, unix.EISDIR, unix.ENOTEMPTY, unix.ELOOP, unix.ENAMETOOLONG}
	if !has || slices.Contains(lasting, number) {
		return registry.Invalid("%w", err)
	}
	return Exhausted(err)
}

func (f File) writeIn(pathOf func(dir string) string, uid, gid int) error {
	dir, name := f.split()
	root, err := os.OpenRoot(pathOf(dir))
	if err != nil {
		return err
	}
	return errors.Join(f.write(root, name, uid, gid), root.Close())
}

func (f File) write(root *os.Root, name string, uid, gid int) error {
	if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	out, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = out.Write(f.Data)
	if uid != 0 || gid != 0 {
		err = errors.Join(err, out.Chown(uid, gid))
	}
	return errors.Join(err, out.Chmod(f.Mode), out.Close())
}
