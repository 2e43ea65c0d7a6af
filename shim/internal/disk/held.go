package disk

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"holdfast/internal/mount"
	"holdfast/registry"
)

// Limits of what is done in a helper for callers that give none.
const (
	usersLimit   = 10 * time.Second
	unmountLimit = 30 * time.Second
)

// maxTold is how many users an error names.
const maxTold = 5

// ours is nil if all of the paths are.
func (d *Disk) ours(paths []string) error {
	for _, path := range paths {
		if _, _, err := d.split(path); err != nil {
			return err
		}
	}
	return nil
}

// Mount is what is mounted at a path, and whether anything is: its source, type and flags, from the mount table.
func (d *Disk) Mount(path string) (mount.Mount, bool, error) {
	if err := d.ours([]string{path}); err != nil {
		return mount.Mount{}, false, err
	}
	m, found, err := mount.At(path)
	if err != nil || !found {
		return mount.Mount{}, false, err
	}
	return m, true, nil
}

// Users says in words who uses what is mounted at each of the paths and below; a path that nobody uses is not in the answer. See mount.Users
// for what is use.
func (d *Disk) Users(paths ...string) (map[string][]string, error) {
	if err := d.ours(paths); err != nil {
		return nil, err
	}
	all, err := d.lookout.Users(d.Helper, usersLimit, paths)
	if err != nil {
		return nil, unanswered(err)
	}
	words := make(map[string][]string, len(all))
	for path, users := range all {
		for _, u := range users {
			words[path] = append(words[path], u.String())
		}
	}
	return words, nil
}

// Unmount takes the uppermost mount at a path off, never lazily and never by force; that there is none is no error. One that is used stays,
// and the error (registry.ErrConflict) says by whom.
func (d *Disk) Unmount(path string) error {
	root, rel, err := d.split(path)
	if err != nil {
		return err
	}
	err = d.lookout.Unmount(d.Helper, unmountLimit, root, rel)
	if errors.Is(err, mount.ErrBusy) {
		return registry.Errorf(registry.ErrConflict, "%w; %s", err, d.because(path))
	}
	return unanswered(err)
}

// because says why the kernel refuses to unmount, and what to do.
func (d *Disk) because(path string) string {
	found, err := d.Users(path)
	users := found[path]
	switch {
	case err != nil:
		return "who uses it could not be found out: " + err.Error()
	case len(users) == 0:
		return "no process is seen to use it: look for a loop device (losetup --list), a swap file (swapon) or an export that lies on it"
	case len(users) > maxTold:
		users = append(users[:maxTold:maxTold], fmt.Sprintf("and %d more", len(users)-maxTold))
	}
	return strings.Join(users, ", ") + ": end that first"
}

// Look looks at paths, in a process that may hang: mount.Lookout.Look.
func (d *Disk) Look(ctx context.Context, paths ...string) (map[string]mount.Seen, error) {
	if err := d.ours(paths); err != nil {
		return nil, err
	}
	seen, err := d.lookout.Look(ctx, d.Helper, paths)
	return seen, unanswered(err)
}

// unanswered gives a helper that has not answered its kind: the same may be asked again.
func unanswered(err error) error {
	if errors.Is(err, mount.ErrHung) {
		return registry.Errorf(registry.ErrUncertain, "%w; see what hangs (ps -eo pid,stat,wchan,comm), then try again", err)
	}
	return err
}
