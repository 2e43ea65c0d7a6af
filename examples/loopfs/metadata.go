package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The snapshot metadata service is that of the loop backend, with ranges of variable length.

func (d *driver) GetMetadataAllocated(
	req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer,
) error {
	l, err := d.image(req.GetSnapshotId(), req.GetStartingOffset())
	if err != nil {
		return err
	}
	out := ranges{ctx: stream.Context(), most: int(req.GetMaxResults()), send: func(list []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataAllocatedResponse{
			BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: l.Bytes, BlockMetadata: list,
		})
	}}
	if err := l.allocated(req.GetStartingOffset(), out.add); err != nil {
		return err
	}
	return out.send(out.list)
}

func (d *driver) GetMetadataDelta(
	req *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer,
) error {
	l, err := d.image(req.GetTargetSnapshotId(), req.GetStartingOffset())
	if err != nil {
		return err
	}
	base, err := d.image(req.GetBaseSnapshotId(), 0)
	if err == nil && (base.Source != l.Source || base.Created.After(l.Created)) {
		err = status.Errorf(codes.InvalidArgument, "snapshot %s is no earlier snapshot of the same volume as %s",
			base.ID, l.ID)
	}
	if err != nil {
		return err
	}
	out := ranges{ctx: stream.Context(), most: int(req.GetMaxResults()), send: func(list []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataDeltaResponse{
			BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: l.Bytes, BlockMetadata: list,
		})
	}}
	if err := l.changed(base, req.GetStartingOffset(), out.add); err != nil {
		return err
	}
	return out.send(out.list)
}

// image returns the image of a snapshot. It needs no lock: an open image is readable also after its removal.
func (d *driver) image(snapshot string, offset int64) (loop, error) {
	r, err := d.get(snapshotKind, snapshot)
	if err != nil {
		return loop{}, err
	}
	l, ok := d.bytesOf(r).(loop)
	switch {
	case !ok:
		err = status.Errorf(codes.FailedPrecondition,
			"snapshot %s is of the dir backend, which does not know its blocks", r.ID)
	case offset < 0 || offset > r.Bytes:
		err = status.Errorf(codes.OutOfRange, "starting_offset %d is not in a snapshot of %d bytes", offset, r.Bytes)
	}
	return l, err
}

// maxRanges is the number of ranges in one message, if the caller has no smaller limit.
const maxRanges = 1024

// ranges joins adjacent ranges, and sends them in messages of at most r.most ranges.
type ranges struct {
	ctx  context.Context
	most int // 0: maxRanges
	send func(list []*csi.BlockMetadata) error
	list []*csi.BlockMetadata
}

func (r *ranges) add(at, end int64) error {
	n := len(r.list)
	if n > 0 && r.list[n-1].ByteOffset+r.list[n-1].SizeBytes == at {
		r.list[n-1].SizeBytes += end - at
		return nil
	}
	if n > 0 && (n == r.most || n == maxRanges) {
		if err := r.send(r.list); err != nil {
			return err
		}
		r.list = nil
	}
	r.list = append(r.list, &csi.BlockMetadata{ByteOffset: at, SizeBytes: end - at})
	return r.ctx.Err()
}

// allocated calls each with the parts of a snapshot that are no holes, in order, from an offset on.
func (l loop) allocated(at int64, each func(at, end int64) error) error {
	return onFile(l.image(), func(image *os.File) error {
		for {
			data, err := nextData(image, at)
			if err != nil || data == math.MaxInt64 {
				return err
			}
			if at, err = image.Seek(data, unix.SEEK_HOLE); err != nil {
				return fmt.Errorf("find the holes of %s: %w", image.Name(), err)
			}
			if err := each(data, at); err != nil {
				return err
			}
		}
	})
}

// changed calls each for the parts that differ from the earlier snapshot base, in order, beginning at offset at. It
// compares contents, as the images of two snapshots need not share blocks, and skips holes of both.
func (l loop) changed(base loop, at int64, each func(at, end int64) error) error {
	return onFile(base.image(), func(a *os.File) error {
		return onFile(l.image(), func(b *os.File) error {
			before, after := make([]byte, 256*blockBytes), make([]byte, 256*blockBytes)
			for {
				inA, errA := nextData(a, at)
				inB, errB := nextData(b, at)
				if at = min(inA, inB) / blockBytes * blockBytes; errA != nil || errB != nil || at >= l.Bytes {
					return errors.Join(errA, errB)
				}
				if err := errors.Join(readFull(a, before, at), readFull(b, after, at)); err != nil {
					return err
				}
				for end := at + int64(len(after)); at < end; at += blockBytes {
					i := len(after) - int(end-at)
					if at < l.Bytes && !bytes.Equal(before[i:i+blockBytes], after[i:i+blockBytes]) {
						if err := each(at, at+blockBytes); err != nil {
							return err
						}
					}
				}
			}
		})
	})
}

// nextData returns the first offset from at on where a file has data, or MaxInt64 if there is none.
func nextData(f *os.File, at int64) (int64, error) {
	next, err := f.Seek(at, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return math.MaxInt64, nil
	}
	return next, err
}

// readFull reads a part of a file. Bytes after the end of the file are zeros.
func readFull(f *os.File, buf []byte, at int64) error {
	n, err := f.ReadAt(buf, at)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	clear(buf[n:])
	return nil
}
