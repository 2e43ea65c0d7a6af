package main

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/disk"
)

// metadata implements the snapshot metadata service of the loop backend, with ranges of variable length.
type metadata struct {
	csi.UnimplementedSnapshotMetadataServer
	pool *disk.Pool
}

// maxRanges is the number of ranges in one message, if the caller has no smaller limit.
const maxRanges = 1024

func (m *metadata) GetMetadataAllocated(
	req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer,
) error {
	h, r, b, err := m.acquire(req.GetSnapshotId(), req.GetStartingOffset())
	if err != nil {
		return err
	}
	defer h.Release()
	out := newRanges(stream.Context(), req.GetMaxResults(), func(list []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataAllocatedResponse{
			BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: r.Bytes, BlockMetadata: list,
		})
	})
	if err := b.Allocated(r.ID, req.GetStartingOffset(), out.add); err != nil {
		return err
	}
	return out.send(out.list)
}

func (m *metadata) GetMetadataDelta(
	req *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer,
) error {
	h, r, b, err := m.acquire(req.GetTargetSnapshotId(), req.GetStartingOffset())
	if err != nil {
		return err
	}
	defer h.Release()
	base, err := m.base(req.GetBaseSnapshotId(), r)
	if err != nil {
		return err
	}
	out := newRanges(stream.Context(), req.GetMaxResults(), func(list []*csi.BlockMetadata) error {
		return stream.Send(&csi.GetMetadataDeltaResponse{
			BlockMetadataType: csi.BlockMetadataType_VARIABLE_LENGTH, VolumeCapacityBytes: r.Bytes, BlockMetadata: list,
		})
	})
	if err := b.Changed(base, r.ID, req.GetStartingOffset(), out.add); err != nil {
		return err
	}
	return out.send(out.list)
}

// acquire locks a snapshot, so that it is not removed meanwhile.
func (m *metadata) acquire(snapshot string, offset int64) (*disk.Hold, disk.Record, disk.Devices, error) {
	h, r, err := m.pool.Acquire(disk.Snapshot, snapshot)
	if err != nil {
		return nil, disk.Record{}, nil, err
	}
	b := m.pool.Devices(r)
	switch {
	case b == nil:
		err = status.Errorf(codes.FailedPrecondition, "snapshot %s is of backend %s, which does not know its blocks", r.ID,
			r.Backend)
	case offset < 0 || offset > r.Bytes:
		err = status.Errorf(codes.OutOfRange, "starting_offset %d is not in a snapshot of %d bytes", offset, r.Bytes)
	default:
		return h, r, b, nil
	}
	h.Release()
	return nil, r, nil, err
}

// base returns the ID of the snapshot that target is compared with.
func (m *metadata) base(snapshot string, target disk.Record) (disk.ID, error) {
	r, err := m.pool.Get(disk.Snapshot, snapshot)
	if err == nil && (r.Source != target.Source || r.Created.After(target.Created)) {
		err = status.Errorf(codes.InvalidArgument, "snapshot %s is no earlier snapshot of the same volume as %s", r.ID,
			target.ID)
	}
	return r.ID, err
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
