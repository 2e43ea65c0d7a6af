package csifake

import (
	"context"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// BlockSize is the size in bytes of the blocks of Backend.Write.
const BlockSize = 4096

// blocksInMessage is the number of ranges in one message of a stream.
const blocksInMessage = 3

// Write records writes to blocks of a volume, by their numbers. Before the first Write, the whole volume counts as
// allocated.
func (b *Backend) Write(id string, blocks ...int64) error {
	return b.volume(id, func(v *volume) {
		if v.Blocks == nil {
			v.Blocks = map[int64]int64{}
		}
		v.Writes++
		for _, n := range blocks {
			v.Blocks[n] = v.Writes
		}
	})
}

// metadata implements the snapshot metadata service.
type metadata struct {
	csi.UnimplementedSnapshotMetadataServer
	p *Plugin
}

func (s metadata) GetMetadataAllocated(r *csi.GetMetadataAllocatedRequest,
	out csi.SnapshotMetadata_GetMetadataAllocatedServer,
) error {
	_, err := s.p.handle(out.Context(), csi.SnapshotMetadata_GetMetadataAllocated_FullMethodName, r,
		func(ctx context.Context) (proto.Message, error) {
			x, err := s.snapshot(r.GetSnapshotId())
			if err != nil {
				return nil, err
			}
			list := slices.Sorted(maps.Keys(x.Blocks))
			return nil, s.send(ctx, x, list, r.GetStartingOffset(), r.GetMaxResults(),
				func(m *csi.GetMetadataAllocatedResponse) error { return out.Send(m) })
		})
	return err
}

func (s metadata) GetMetadataDelta(r *csi.GetMetadataDeltaRequest,
	out csi.SnapshotMetadata_GetMetadataDeltaServer,
) error {
	_, err := s.p.handle(out.Context(), csi.SnapshotMetadata_GetMetadataDelta_FullMethodName, r,
		func(ctx context.Context) (proto.Message, error) {
			base, err := s.snapshot(r.GetBaseSnapshotId())
			if err != nil {
				return nil, err
			}
			x, err := s.snapshot(r.GetTargetSnapshotId())
			if err != nil {
				return nil, err
			}
			if x.Blocks == nil { // nothing was written; for send, nil would mean that everything is allocated
				x.Blocks = map[int64]int64{}
			}
			list := slices.DeleteFunc(slices.Sorted(maps.Keys(x.Blocks)),
				func(n int64) bool { return x.Blocks[n] == base.Blocks[n] })
			return nil, s.send(ctx, x, list, r.GetStartingOffset(), r.GetMaxResults(),
				func(m *csi.GetMetadataAllocatedResponse) error {
					return out.Send(&csi.GetMetadataDeltaResponse{BlockMetadataType: m.BlockMetadataType,
						VolumeCapacityBytes: m.VolumeCapacityBytes, BlockMetadata: m.BlockMetadata})
				})
		})
	return err
}

// send streams those blocks of a snapshot that end after an offset. A rule for the middle acts before each message but
// the first.
func (s metadata) send(
	ctx context.Context, x snapshot, blocks []int64, offset int64, most int32,
	send func(*csi.GetMetadataAllocatedResponse) error,
) error {
	if offset < 0 || offset > x.Size {
		return status.Errorf(codes.OutOfRange, "the offset %d is not in the %d bytes", offset, x.Size)
	}
	all := []*csi.BlockMetadata{{SizeBytes: x.Size}}
	kind := csi.BlockMetadataType_VARIABLE_LENGTH
	if x.Blocks != nil {
		all, kind = nil, csi.BlockMetadataType_FIXED_LENGTH
	}
	for _, n := range blocks {
		all = append(all, &csi.BlockMetadata{ByteOffset: n * BlockSize, SizeBytes: BlockSize})
	}
	all = slices.DeleteFunc(all, func(b *csi.BlockMetadata) bool { return b.ByteOffset+b.SizeBytes <= offset })
	if most <= 0 || most > blocksInMessage {
		most = blocksInMessage
	}
	first := true
	for part := range slices.Chunk(all, int(most)) {
		if !first {
			if err := s.p.runMiddleRule(callOf(ctx)); err != nil {
				return err
			}
		}
		err := send(&csi.GetMetadataAllocatedResponse{BlockMetadataType: kind, VolumeCapacityBytes: x.Size,
			BlockMetadata: part})
		if err != nil {
			return err
		}
		first = false
	}
	if first {
		return send(&csi.GetMetadataAllocatedResponse{BlockMetadataType: kind, VolumeCapacityBytes: x.Size})
	}
	return nil
}

func (s metadata) snapshot(id string) (x snapshot, err error) {
	err = s.p.cfg.Backend.change(func(c *contents) error {
		if c.Snapshots[id] == nil {
			return status.Errorf(codes.NotFound, "snapshot %q does not exist", id)
		}
		x = *c.Snapshots[id]
		x.Blocks = maps.Clone(x.Blocks)
		return nil
	})
	return x, err
}
