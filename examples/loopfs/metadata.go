package main

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The snapshot metadata service is that of the loop backend, with ranges of variable length.

// maxRanges is the number of ranges in one message, if the caller has no smaller limit.
const maxRanges = 1024

func (d *driver) GetMetadataAllocated(
	req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer,
) error {
	l, err := d.image(req.GetSnapshotId(), req.GetStartingOffset())
	if err != nil {
		return err
	}
	out := newRanges(stream.Context(), req.GetMaxResults(), func(list []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataAllocatedResponse{
			BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: l.Bytes, BlockMetadata: list,
		})
	})
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
		err = status.Errorf(codes.InvalidArgument, "snapshot %s is no earlier snapshot of the same volume as %s", base.ID,
			l.ID)
	}
	if err != nil {
		return err
	}
	out := newRanges(stream.Context(), req.GetMaxResults(), func(list []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataDeltaResponse{
			BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: l.Bytes, BlockMetadata: list,
		})
	})
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
		err = status.Errorf(codes.FailedPrecondition, "snapshot %s is of the dir backend, which does not know its blocks",
			r.ID)
	case offset < 0 || offset > r.Bytes:
		err = status.Errorf(codes.OutOfRange, "starting_offset %d is not in a snapshot of %d bytes", offset, r.Bytes)
	}
	return l, err
}

// ranges joins adjacent ranges and sends them in messages of at most max.
type ranges struct {
	ctx  context.Context
	max  int
	send func(list []*csi.BlockMetadata) error
	list []*csi.BlockMetadata
}

func newRanges(ctx context.Context, most int32, send func(list []*csi.BlockMetadata) error) *ranges {
	if most <= 0 || most > maxRanges {
		most = maxRanges
	}
	return &ranges{ctx: ctx, max: int(most), send: send}
}

func (r *ranges) add(at, end int64) error {
	n := len(r.list)
	if n > 0 && r.list[n-1].ByteOffset+r.list[n-1].SizeBytes == at {
		r.list[n-1].SizeBytes += end - at
		return nil
	}
	if n == r.max {
		if err := r.send(r.list); err != nil {
			return err
		}
		r.list = nil
	}
	r.list = append(r.list, &csi.BlockMetadata{ByteOffset: at, SizeBytes: end - at})
	return r.ctx.Err()
}
