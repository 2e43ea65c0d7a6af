package main

import (
	"cmp"
	"context"
	"math"
	"os"
	"path/filepath"
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

// size sets the size of a new or enlarged volume. It is at least source: the size of the volume or snapshot that is
// copied, or the present size.
func (d *driver) size(r *record, want *csi.CapacityRange, source int64) error {
	required, most := want.GetRequiredBytes(), cmp.Or(want.GetLimitBytes(), math.MaxInt64)
	least := max(minBytes, source)
	r.Bytes = (max(required, least) + blockBytes - 1) / blockBytes * blockBytes
	if required == 0 && source == 0 {
		r.Bytes = min(defaultBytes, most/blockBytes*blockBytes)
	}
	switch {
	case required < 0 || required > d.capacity:
		return status.Errorf(codes.OutOfRange, "%d bytes are requested; the capacity is %d", required, d.capacity)
	case r.Bytes < least || r.Bytes > most:
		return status.Errorf(codes.OutOfRange, "at most %d bytes are requested; such a volume has at least %d, in "+
			"blocks of %d", most, least, blockBytes)
	}
	return r.supported()
}

// ensure returns the record with an ID if there is one, with the error of same if it is not as requested. Otherwise it
// calls make under the lock.
func (d *driver) ensure(id volumeID, same func(have record) error, make func() (record, error)) (record, error) {
	unlock, err := d.lock(id)
	if err != nil {
		return record{}, err
	}
	defer unlock()
	have, err := d.load(id)
	if status.Code(err) == codes.NotFound {
		return make()
	}
	return have, cmp.Or(err, same(have))
}

// create makes a volume of the requested size, or returns the existing one.
func (d *driver) create(ctx context.Context, r record, size *csi.CapacityRange) (record, error) {
	same := func(have record) error { return have.satisfies(r, size) }
	return d.ensure(r.ID, same, func() (record, error) {
		switch r.Source {
		case "":
			return d.createEmpty(ctx, r, size)
		case r.ID:
			return record{}, status.Error(codes.InvalidArgument, "a volume cannot be made from itself")
		}
		return d.createFrom(ctx, r, size)
	})
}

func (d *driver) createEmpty(ctx context.Context, r record, size *csi.CapacityRange) (record, error) {
	r.Backend = d.newVolumes
	if err := d.size(&r, size, 0); err != nil {
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
		if free := d.free(); bytes > free {
			return status.Errorf(codes.ResourceExhausted, "%d bytes are requested; %d of %d are free", bytes, free,
				d.capacity)
		}
		return save()
	})
}

// free returns the bytes that new volumes and snapshots may have.
func (d *driver) free() int64 { return max(d.capacity-d.used(), 0) }

// expand enlarges a volume, whose lock the caller holds. It saves the record first: if loopfs is killed after that, the
// next call or the next stage enlarges the bytes.
func (d *driver) expand(r record, size *csi.CapacityRange) (record, error) {
	before := r.Bytes
	err := d.size(&r, size, before)
	if err == nil && r.Bytes > before {
		err = d.reserve(r.Bytes-before, func() error { return d.save(r) })
	}
	if err != nil {
		return r, err
	}
	return r, d.bytesOf(r).grow()
}

// delete removes a volume, a snapshot or a group that is not used, if may returns no error. It is no error if there is
// none.
func (d *driver) delete(ctx context.Context, k kind, id string, may func(record) error) error {
	return unlessNotFound(d.locked(k, id, func(r record) error {
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
		for _, id := range r.Members { // a call may be making a volume from one
			unlock, err := d.lock(id)
			if err != nil {
				return err
			}
			defer unlock()
		}
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
	}))
}

// unlessNotFound returns err, or nil if err means that a volume or snapshot does not exist.
func unlessNotFound(err error) error {
	if status.Code(err) == codes.NotFound {
		return nil
	}
	return err
}

// awaitRelease waits a second for the kernel to free the devices of a volume that was unmounted a moment ago. A copy of
// the mount in another namespace may keep a device longer: then user is the path of the device.
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

// acquire locks an ID from a request and reads its record. It also ends a freeze of the volume that a killed process
// has left.
func (d *driver) acquire(k kind, id string) (r record, unlock func(), err error) {
	parsed, err := parseID(k, id)
	if err != nil {
		return record{}, nil, err
	}
	unlock, err = d.lock(parsed)
	if err != nil {
		return record{}, nil, err
	}
	if r, err = d.load(parsed); err != nil {
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

// thaw ends a freeze that a kill left: the caller has the lock, so nothing makes a copy. A failure does not matter to
// other calls, and shows at the next freeze.
func (d *driver) thaw(r record) {
	l, ok := d.bytesOf(r).(loop)
	if !ok || r.Usage.Block || r.stagedReadOnly() {
		return
	}
	if staged, err := d.staged(r); err == nil && staged {
		_ = l.thaw()
	}
}

// recover removes what a kill left incomplete, and thaws what it left frozen, unless another process has the lock.
func (d *driver) recover(log hclog.Logger) error {
	entries, err := os.ReadDir(filepath.Join(d.path, "volumes"))
	for _, e := range entries {
		id, _, incomplete := strings.Cut(e.Name(), ".")
		if !incomplete && volumeID(id).kind() != volumeKind {
			continue
		}
		_, unlock, err := d.acquire(volumeID(id).kind(), id)
		if err == nil {
			unlock()
		} else if code := status.Code(err); code != codes.NotFound && code != codes.Aborted {
			log.Warn("cannot recover what a killed process left", "id", id, "error", err)
		}
	}
	return err
}
