package disk

import (
	"context"
	"errors"
	"strings"
	"time"

	"holdfast/internal/mount"
	"holdfast/registry"
	"holdfast/shim/internal/node"
)

var _ node.Parts = (*Disk)(nil)

// partLimit is how long a part may take to be mounted or unmounted. Asking the server of a volume for a path takes a round trip for each
// name.
const partLimit = 10 * time.Second

// HasPart says whether what is mounted at a path is a part of what is mounted at target, and whether anything is mounted there at all. It
// goes by the mount table: of the same file system, and of a directory or file below the one that the volume is. A part that somebody has
// removed from its volume is none.
func (d *Disk) HasPart(target, at string) (has, mounted bool, err error) {
	if err := d.ours([]string{target, at}); err != nil {
		return false, false, err
	}
	table, err := mount.Table(0)
	if err != nil {
		return false, false, err
	}
	part, mounted := table.At(at)
	whole, there := table.At(target)
	return mounted && there && isPart(part, whole), mounted, nil
}

func isPart(part, whole mount.Mount) bool {
	return part.Major == whole.Major && part.Minor == whole.Minor && !strings.HasSuffix(part.Root, "//deleted") &&
		(whole.Root == "/" || part.Root == whole.Root || strings.HasPrefix(part.Root, whole.Root+"/"))
}

// MountPart mounts a path in what is mounted at target once more: mount.Lookout.MountPart.
func (d *Disk) MountPart(ctx context.Context, target, path, at string, create bool) error {
	root, rel, err := d.split(at)
	if err != nil {
		return err
	}
	from, volume, err := d.split(target)
	if err == nil && from != root {
		err = registry.Errorf(registry.ErrInternal, "%q and %q are below different roots", target, at)
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, partLimit)
	defer cancel()
	return d.partError(at, d.lookout.MountPart(ctx, d.Helper, mount.Part{Root: root, Volume: volume, Path: path, Make: create, At: rel}))
}

// UnmountPart takes off what is mounted at a path, and removes its directory: mount.Lookout.UnmountPart.
func (d *Disk) UnmountPart(ctx context.Context, at string) error {
	root, rel, err := d.split(at)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, partLimit)
	defer cancel()
	return d.partError(at, d.lookout.UnmountPart(ctx, d.Helper, root, rel))
}

// partError gives an error its kind, and says what to do.
func (d *Disk) partError(at string, err error) error {
	switch {
	case errors.Is(err, mount.ErrNoPart):
		return registry.Errorf(registry.ErrNotFound, "%w; make it, or give the volume_mount another sub_path", err)
	case errors.Is(err, mount.ErrOutside):
		return registry.Errorf(registry.ErrDenied, "%w; give the volume_mount the path that is meant", err)
	case errors.Is(err, mount.ErrHeld):
		return registry.Errorf(registry.ErrUncertain, "%w, of an earlier shim; see what hangs (ps -eo pid,stat,wchan,comm), then try again", err)
	case errors.Is(err, mount.ErrBusy):
		return registry.Errorf(registry.ErrConflict, "%w; %s", err, d.because(at))
	case errors.Is(err, mount.ErrMounted):
		return registry.Errorf(registry.ErrConflict, "%w; see holdfast doctor", err)
	}
	return unanswered(typed(err))
}
