package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A copy is of one moment, and independent of its source. A mounted file system is frozen (FIFREEZE, as fsfreeze does)
// during the copy: an instant with reflinks (xfs, btrfs), else as long as the copy of its data takes. A block device or
// a directory cannot be frozen. While it is published for writing, it is not copied.

// snapshot copies a volume. A snapshot of that name and source may exist.
func (d *driver) snapshot(ctx context.Context, name, source string) (record, error) {
	id := idFor(snapshotKind, name)
	unlock, err := d.lock(id)
	if err != nil {
		return record{}, err
	}
	defer unlock()
	have, err := d.load(id)
	switch {
	case err == nil && have.Source != volumeID(source):
		return record{}, status.Errorf(codes.AlreadyExists, "snapshot %q exists, of volume %s", name, have.Source)
	case err == nil || status.Code(err) != codes.NotFound:
		return have, err
	}
	var r record
	err = d.locked(volumeKind, source, func(s record) error {
		r = snapshotOf(s, id, time.Now().UTC())
		return d.makeCopy(ctx, s, r)
	})
	return r, err
}

func snapshotOf(s record, id volumeID, created time.Time) record {
	return record{ID: id, Backend: s.Backend, Bytes: s.Bytes, Usage: s.Usage, Source: s.ID, Created: created}
}

// createFrom makes a volume that begins as a copy of a volume or snapshot, in the backend of that.
func (d *driver) createFrom(ctx context.Context, r record, size *csi.CapacityRange) (record, error) {
	err := d.locked(r.Source.kind(), string(r.Source), func(s record) (err error) {
		r.Backend = s.Backend
		if r.Bytes, err = d.sizeOf(size, s.Bytes); err != nil {
			return err
		}
		if err := d.bytesOf(r).supports(); err != nil {
			return err
		}
		if s.Usage.Block && !r.Usage.Block {
			return status.Errorf(codes.InvalidArgument, "%s is a block device, and so must be its copy", s.ID)
		}
		return d.makeCopy(ctx, s, r)
	})
	return r, err
}

func (d *driver) makeCopy(ctx context.Context, s, r record) error {
	return d.make(r.ID, func(dir string) error {
		return d.atOneMoment([]record{s}, func() error { return d.copy(ctx, dir, s, r) })
	})
}

// copy writes a record and a copy of the bytes of s.
func (d *driver) copy(ctx context.Context, dir string, s, r record) error {
	return d.write(dir, r, func(b backend) error { return b.copyFrom(ctx, d.bytesOf(s)) })
}

// snapshotGroup copies volumes at one moment and returns the group.
func (d *driver) snapshotGroup(ctx context.Context, name string, sources []string) (record, error) {
	g := record{ID: idFor(groupKind, name), Created: time.Now().UTC()}
	sources = slices.Compact(slices.Sorted(slices.Values(sources)))
	for _, source := range sources {
		g.Members = append(g.Members, memberID(g.ID, volumeID(source)))
	}
	unlock, err := d.lock(g.ID)
	if err != nil {
		return record{}, err
	}
	defer unlock()
	have, err := d.load(g.ID)
	switch {
	case err == nil && !slices.Equal(have.Members, g.Members):
		return record{}, status.Errorf(codes.AlreadyExists, "group snapshot %q exists, of other volumes", name)
	case err == nil || status.Code(err) != codes.NotFound:
		return have, err
	}
	var volumes []record
	for _, source := range sources {
		s, unlock, err := d.acquire(volumeKind, source)
		if err != nil {
			return record{}, err
		}
		defer unlock()
		volumes = append(volumes, s)
	}
	return g, d.make(g.ID, func(dir string) error {
		if err := writeRecord(dir, g); err != nil {
			return err
		}
		return d.atOneMoment(volumes, func() error {
			for i, s := range volumes {
				member := filepath.Join(dir, string(g.Members[i]))
				err := os.Mkdir(member, 0o700)
				if err == nil {
					err = d.copy(ctx, member, s, snapshotOf(s, g.Members[i], g.Created))
				}
				if err != nil {
					return fmt.Errorf("copy %s: %w", s.ID, err)
				}
			}
			return syncDir(dir)
		})
	})
}

// atOneMoment calls do while locked volumes do not change: it first freezes each that is mounted for writing.
func (d *driver) atOneMoment(volumes []record, do func() error) (failed error) {
	for _, r := range volumes {
		staged, err := d.staged(r)
		if err != nil {
			return err
		}
		b := d.bytesOf(r)
		l, isLoop := b.(loop)
		user, err := b.heldBy()
		switch {
		case err != nil:
			return err
		case !staged && user != "":
			return status.Errorf(codes.FailedPrecondition, "volume %s is not at its staging path, but %s still uses it", r.ID,
				user)
		case !staged || r.stagedReadOnly():
		case isLoop && !r.Usage.Block:
			defer func() { failed = errors.Join(failed, l.thaw(r.Stage.Path)) }()
			if err := l.freeze(r.Stage.Path); err != nil {
				return err
			}
		default:
			if err := d.checkUnwritten(r); err != nil {
				return err
			}
		}
	}
	return do()
}

// checkUnwritten refuses a volume that is published for writing.
func (d *driver) checkUnwritten(r record) error {
	targets, err := d.published(r)
	for _, target := range targets {
		if !r.Stage.Published[target] {
			return status.Errorf(codes.FailedPrecondition, "volume %s is published for writing at %s and cannot be frozen, so "+
				"a copy would not be of one moment; unpublish it first", r.ID, target)
		}
	}
	return err
}
