package disk

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"holdfast/examples/loopfs/internal/mount"
)

// dir keeps a volume as a directory and shows it by bind mounts.
type dir struct{ store *Store }

func dirName(id ID) string { return "dirs/" + string(id) }

func (d *dir) Make(_ context.Context, id ID, _ int64) error {
	if err := d.Remove(id); err != nil {
		return err
	}
	if err := d.store.root.Mkdir(dirName(id), 0o755); err != nil {
		return fmt.Errorf("make the volume's directory: %w", err)
	}
	if err := d.store.root.Chmod(dirName(id), 0o755); err != nil { // whatever the umask is: tasks without root use it
		return fmt.Errorf("make the volume's directory: %w", err)
	}
	return d.store.syncDir("dirs")
}

// Remove goes through the directory's content, so it first makes sure that nothing is mounted in there.
func (d *dir) Remove(id ID) error {
	table, err := mount.ReadTable()
	if err != nil {
		return err
	}
	if at := table.Within(filepath.Join(d.store.path, dirName(id))); len(at) > 0 {
		return Errorf(ErrInUse, "something is mounted inside the volume, at %s", at[0].Mountpoint)
	}
	if err := d.store.root.RemoveAll(dirName(id)); err != nil {
		return fmt.Errorf("remove the volume's directory: %w", err)
	}
	return d.store.syncDir("dirs")
}

func (d *dir) Mount(id ID, at mount.Place, flags mount.Flags) error {
	if flags.ForFileSystem() {
		return Errorf(ErrInvalid, "the dir backend has no file system of its own: it takes no ext4 mount flags")
	}
	source, err := d.store.root.Open(dirName(id))
	if err != nil {
		return fmt.Errorf("open the volume's directory: %w", err)
	}
	defer source.Close()
	return at.Bind(source, flags)
}

func (d *dir) Shows(t mount.Table, e *mount.Entry, id ID) (bool, error) {
	source, err := d.store.root.Open(dirName(id))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open the volume's directory: %w", err)
	}
	defer source.Close()
	o, err := t.Origin(source)
	if err != nil {
		return false, err
	}
	return e.Major == o.Major && e.Minor == o.Minor && e.Root == o.Root, nil
}

func (d *dir) HeldBy(id ID) (string, error) {
	table, err := mount.ReadTable()
	if err != nil {
		return "", err
	}
	for _, e := range table {
		if filepath.Base(e.Root) != string(id) {
			continue
		}
		if shown, err := d.Shows(table, e, id); shown || err != nil {
			return "the mount at " + e.Mountpoint, err
		}
	}
	return "", nil
}
