package host

import (
	"context"
	"errors"
	"io"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// SnapshotBlocks calls fn with the allocated blocks of a snapshot (GetMetadataAllocated of CSI). With a base, an
// earlier snapshot of the same volume, it calls fn with the blocks that differ (GetMetadataDelta). The parts come in
// order as the plugin sends them, at most 1000 ranges each, and none twice. They may come from several shims. An error
// of fn ends the list and is returned. To continue a list that has ended early, set Offset to the end of the last
// range.
//
// ErrUnsupported: the plugin lacks SNAPSHOT_METADATA_SERVICE. ErrConflict: a snapshot is not ready, or the plugin does
// not track changed blocks. ErrInvalid: the snapshots cannot be compared, or the offset is not in the volume.
func (h *Host) SnapshotBlocks(ctx context.Context, q BlockQuery, fn func(Blocks) error) error {
	req := &pb.SnapshotBlocksRequest{
		Call: &pb.Call{}, Snapshot: wire.SnapshotNameProto(q.Snapshot), BaseId: string(q.Base),
		StartingOffset: q.Offset,
	}
	var stop error
	err := h.do(ctx, reads, func(ctx context.Context, sh *shim) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		stream, err := pb.NewSnapshotsClient(sh.process.Conn()).Blocks(ctx, req)
		for err == nil {
			var m *pb.SnapshotBlocksReply
			if m, err = stream.Recv(); err != nil {
				break
			}
			req.StartingOffset = m.GetNextOffset() // where the next shim continues
			if stop = fn(blocks(m)); stop != nil {
				return nil
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		return err
	})
	if stop != nil {
		return stop
	}
	return err
}

func blocks(m *pb.SnapshotBlocksReply) Blocks {
	out := Blocks{Type: registry.BlockType(m.GetBlockType()), Capacity: m.GetVolumeCapacityBytes()}
	for _, r := range m.GetRanges() {
		out.Ranges = append(out.Ranges, BlockRange{Offset: r.GetOffset(), Size: r.GetSize()})
	}
	return out
}
