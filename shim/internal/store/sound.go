package store

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"holdfast/registry"
)

// Usable returns why a shim could not open the state file: the permissions, owner or type of the file or its directory. It
// reads nothing and takes no lock.
func Usable(path string) error {
	if err := ensureDir(filepath.Dir(path)); err != nil {
		return err
	}
	file, err := openFile(path, true)
	if err != nil {
		return err
	}
	return file.Close()
}

// Sound is nil if the file at path is whole: its pages, each checksum, and that no record is missing. It is only read. ErrDamaged says
// what is wrong first; a file that is being written to at that moment may be called so as well. ErrNotFound: there is none.
func Sound(path string) error {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return registry.Errorf(registry.ErrNotFound, "state file: %w", err)
	}
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "state file: %w", err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return registry.Errorf(registry.ErrUnavailable, "state file: %w", err)
	}
	if _, err := verify(file, info.Size()); err != nil {
		return registry.Errorf(registry.ErrDamaged,
			"%s is damaged: %w. Nothing was changed in it. Put a good copy in its place, or ask for help with "+
				"this one; only if nothing on this node uses a volume: move it away, and the shim starts with nothing", path, err)
	}
	return nil
}
