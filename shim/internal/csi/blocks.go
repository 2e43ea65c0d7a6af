package csi

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"holdfast/registry"
)

// BlocksRequest is GetMetadataAllocatedRequest or, with a base, GetMetadataDeltaRequest.
type BlocksRequest struct {
	Snapshot registry.ExternalID // snapshot_id or target_snapshot_id
	Base     registry.ExternalID // base_snapshot_id; empty: none
	Offset   int64               // starting_offset
	Max      int32               // max_results: ranges in one message
	Secrets  map[string]registry.SecretValue
	Private  Private
}

// RPC returns the call that the request is for.
func (r BlocksRequest) RPC() registry.RPC {
	if r.Base != "" {
		return registry.GetMetadataDeltaRPC
	}
	return registry.GetMetadataAllocatedRPC
}

// blocksReply is a message of either stream.
type blocksReply interface {
	proto.Message
	GetBlockMetadataType() csi.BlockMetadataType
	GetVolumeCapacityBytes() int64
	GetBlockMetadata() []*csi.BlockMetadata
}

var blockTypes = map[csi.BlockMetadataType]registry.BlockType{
	csi.BlockMetadataType_FIXED_LENGTH:    registry.FixedLength,
	csi.BlockMetadataType_VARIABLE_LENGTH: registry.VariableLength,
}

// SnapshotBlocks sends GetMetadataAllocated or GetMetadataDelta. It calls page with each message as it arrives,
// unchecked. The error is a *registry.CallError, or the one that page has returned.
func (f *Fleet) SnapshotBlocks(
	ctx context.Context, at registry.InstanceKey, r BlocksRequest, page func(registry.Blocks) error,
) error {
	var req proto.Message = &csi.GetMetadataAllocatedRequest{
		SnapshotId: string(r.Snapshot), StartingOffset: r.Offset, MaxResults: r.Max, Secrets: reveal(r.Secrets),
	}
	if r.Base != "" {
		req = &csi.GetMetadataDeltaRequest{BaseSnapshotId: string(r.Base), TargetSnapshotId: string(r.Snapshot),
			StartingOffset: r.Offset, MaxResults: r.Max, Secrets: reveal(r.Secrets)}
	}
	accept := func(m blocksReply) error {
		out := registry.Blocks{Type: blockTypes[m.GetBlockMetadataType()], Capacity: m.GetVolumeCapacityBytes()}
		for _, b := range m.GetBlockMetadata() {
			out.Ranges = append(out.Ranges, registry.BlockRange{Offset: b.GetByteOffset(), Size: b.GetSizeBytes()})
		}
		return page(out)
	}
	_, err := f.call(ctx, r.RPC(), at, req, r.Private.asFunc,
		func(ctx context.Context, in registry.Instance, l *link, trace *callTrace) error {
			method := "/csi.v1." + serviceOf(in.Role, r.RPC()) + "/" + string(r.RPC())
			if r.Base != "" {
				return stream(ctx, l, trace, method, req,
					func(m *csi.GetMetadataDeltaResponse) error { return accept(m) })
			}
			return stream(ctx, l, trace, method, req,
				func(m *csi.GetMetadataAllocatedResponse) error { return accept(m) })
		})
	return err
}
