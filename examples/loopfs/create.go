package main

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"math"
	"os"
	"path"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/hashicorp/go-hclog"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Limits of a volume's size. Sizes are whole blocks.
const (
	minBytes     = 16 << 20
	defaultBytes = 64 << 20
	blockBytes   = 4096
)

// sizeOf returns the size of a new or enlarged volume. It is at least that of its source, or that it has.
func (d *driver) sizeOf(want *csi.CapacityRange, source int64) (int64, error) {
	if err := checkRange(want); err != nil {
		return 0, err
	}
	most := cmp.Or(want.GetLimitBytes(), math.MaxInt64)
	least := max(minBytes, source)
	bytes := blocks(max(want.GetRequiredBytes(), least))
	if want.GetRequiredBytes() == 0 && source == 0 {
		bytes = min(defaultBytes, most/blockBytes*blockBytes)
	}
	switch {
	case want.GetRequiredBytes() > d.capacity:
		return 0, status.Errorf(codes.OutOfRange, "requested are %d bytes; the capacity is %d", want.GetRequiredBytes(),
			d.capacity)
	case bytes < least || bytes > most:
		return 0, status.Errorf(codes.OutOfRange, "requested are at most %d bytes; such a volume has at least %d, in "+
			"blocks of %d", most, least, blockBytes)
	}
	return bytes, nil
}

// blocks rounds a size up to whole blocks.
func blocks(bytes int64) int64 { return (bytes + blockBytes - 1) / blockBytes * blockBytes }

func checkRange(want *csi.CapacityRange) error {
	least, most := want.GetRequiredBytes(), want.GetLimitBytes()
	if least < 0 || most < 0 || most > 0 && most < least {
		return status.Errorf(codes.OutOfRange, "no size is at least %d and at most %d bytes", least, most)
	}
	return nil
}

// create makes a volume of the requested size. It may exist. The caller holds its lock.
func (d *driver) create(ctx context.Context, r record, size *csi.CapacityRange) (record, error) {
	if err := checkRange(size); err != nil {
		return record{}, err
	}
	have, err := d.load(r.ID)
	switch {
	case err == nil:
		return have, have.satisfies(r, size)
	case status.Code(err) != codes.NotFound:
		return record{}, err
	case r.Source == r.ID:
		return record{}, status.Error(codes.InvalidArgument, "a volume cannot be made from itself")
	case r.Source != "":
		return d.createFrom(ctx, r, size)
	}
	return d.createEmpty(ctx, r, size)
}

func (d *driver) createEmpty(ctx context.Context, r record, size *csi.CapacityRange) (_ record, err error) {
	r.Backend = d.newVolumes
	if r.Bytes, err = d.sizeOf(size, 0); err != nil {
		return record{}, err
	}
	if err := d.bytesOf(r).supports(); err != nil {
		return record{}, err
	}
	return r, d.make(r.ID, func(dir string) error {
		return d.write(dir, r, func(b backend) error { return b.make(ctx) })
	})
}

// write writes a record into a new directory, has fill write the bytes, and makes the directory durable.
func (d *driver) write(dir string, r record, fill func(backend) error) error {
	err := d.reserve(r.Bytes, func() error { return writeRecord(dir, r) })
	if err == nil {
		err = fill(bytesIn(dir, r))
	}
	if err != nil {
		return err
	}
	return syncDir(dir)
}

// satisfies returns ALREADY_EXISTS if the existing volume is not the requested one.
func (r record) satisfies(want record, size *csi.CapacityRange) error {
	least, most := size.GetRequiredBytes(), size.GetLimitBytes()
	switch {
	case r.Bytes < least || most > 0 && r.Bytes > most:
		return status.Errorf(codes.AlreadyExists, "volume %s exists with %d bytes", r.ID, r.Bytes)
	case !r.Usage.fits(want.Usage):
		return status.Errorf(codes.AlreadyExists, "volume %s exists, made for %s", r.ID, r.Usage)
	case r.Source != want.Source:
		return status.Errorf(codes.AlreadyExists, "volume %s exists, made from another source (%s)", r.ID, r.Source)
	}
	return nil
}

// reserve calls save if that many bytes are free.
func (d *driver) reserve(bytes int64, save func() error) error {
	return d.accounting(func() error {
		free, err := d.free()
		if err != nil {
			return err
		}
		if bytes > free {
			return status.Errorf(codes.ResourceExhausted, "requested are %d bytes; %d of %d are free", bytes, free,
				d.capacity)
		}
		return save()
	})
}

// free returns the bytes that new volumes and snapshots may have.
func (d *driver) free() (int64, error) {
	used, err := d.used()
	return max(d.capacity-used, 0), err
}

// expand enlarges a volume, whose lock the caller holds. It saves the record first: if it is killed after that, the
// next call or the next stage enlarges the bytes.
func (d *driver) expand(r record, size *csi.CapacityRange) (record, error) {
	bytes, err := d.sizeOf(size, r.Bytes)
	if more := bytes - r.Bytes; err == nil && more > 0 {
		r.Bytes = bytes
		err = d.reserve(more, func() error { return d.save(r) })
	}
	if err != nil {
		return r, err
	}
	return r, d.bytesOf(r).grow()
}

// delete removes a volume, a snapshot or a group that is not used, if may returns no error. That it does not exist is
// no error.
func (d *driver) delete(ctx context.Context, k kind, id string, may func(record) error) error {
	return known(d.locked(k, id, func(r record) error {
		if err := may(r); err != nil {
			return err
		}
		staged, err := d.staged(r)
		if staged {
			err = status.Errorf(codes.FailedPrecondition, "volume %s is staged at %s", r.ID, r.Stage.Path)
		}
		if err != nil {
			return err
		}
		for _, id := range r.Members { // of which a call may be making a volume
			unlock, err := d.lock(id)
			if err != nil {
				return err
			}
			defer unlock()
		}
		return d.removeUnused(ctx, r)
	}))
}

// removeUnused removes a volume after the kernel has freed its devices.
func (d *driver) removeUnused(ctx context.Context, r record) error {
	if err := d.checkUnpublished(r); err != nil {
		return err
	}
	user, err := d.awaitRelease(ctx, r)
	if user != "" {
		err = status.Errorf(codes.FailedPrecondition, "%s still uses volume %s", user, r.ID)
	}
	if err != nil {
		return err
	}
	return d.remove(r.ID)
}

// known returns an error, but none that means that a volume or snapshot does not exist.
func known(err error) error {
	if status.Code(err) == codes.NotFound {
		return nil
	}
	return err
}

// awaitRelease waits a second for the kernel to free the devices of a volume that was unmounted a moment ago. A copy of
// the mount in another namespace may keep one longer: then user is its path.
func (d *driver) awaitRelease(ctx context.Context, r record) (user string, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for {
		if user, err = d.bytesOf(r).heldBy(); user == "" || err != nil {
			return user, err
		}
		select {
		case <-ctx.Done():
			return user, nil
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// acquire reads the record of an ID from a request, under its lock. Before, it ends what a killed process has left: a
// freeze, or a directory that is incomplete.
func (d *driver) acquire(k kind, id string) (r record, unlock func(), err error) {
	parsed, err := parseID(k, id)
	if err != nil {
		return record{}, nil, err
	}
	unlock, err = d.lock(parsed)
	if err != nil {
		return record{}, nil, err
	}
	r, err = d.load(parsed)
	if status.Code(err) == codes.NotFound {
		err = errors.Join(err, d.discardIncomplete(string(parsed)))
	}
	if err != nil {
		unlock()
		return record{}, nil, err
	}
	d.thaw(r)
	return r, unlock, nil
}

// locked calls do with the record of an ID from a request, under its lock.
func (d *driver) locked(k kind, id string, do func(r record) error) error {
	r, unlock, err := d.acquire(k, id)
	if err != nil {
		return err
	}
	defer unlock()
	return do(r)
}

// thaw ends a freeze that a kill left: the caller has the lock, so nothing makes a copy. That it is not possible does
// not matter to other calls, and shows in the next freeze.
func (d *driver) thaw(r record) {
	l, ok := d.bytesOf(r).(loop)
	if !ok || r.Usage.Block || r.stagedReadOnly() {
		return
	}
	if staged, err := d.staged(r); err == nil && staged {
		_ = l.thaw(r.Stage.Path)
	}
}

// recover removes what a kill left incomplete, and thaws what it left frozen, except where another process is at it.
func (d *driver) recover(log hclog.Logger) error {
	parts, err := fs.Glob(os.DirFS(d.path), "volumes/*.tmp")
	if err != nil {
		return err
	}
	for _, part := range parts {
		id, _, _ := strings.Cut(path.Base(part), ".")
		unlock, err := d.lock(volumeID(id))
		if err != nil {
			continue
		}
		if err := d.discardIncomplete(id); err != nil {
			log.Warn("cannot remove what a killed process left", "error", err)
		}
		unlock()
	}
	all, err := d.all(volumeKind)
	for _, r := range all {
		if _, unlock, err := d.acquire(volumeKind, string(r.ID)); err == nil {
			unlock()
		}
	}
	return err
}
