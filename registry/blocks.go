package registry

// BlockQuery selects blocks of a snapshot of a volume.
type BlockQuery struct {
	Snapshot SnapshotName
	Base     SnapshotID // an earlier snapshot of the volume: select the blocks that differ; empty: all allocated ones
	Offset   int64      // in bytes; blocks before it are left out
}

// BlockType says what the ranges of Blocks are (BlockMetadataType of CSI).
type BlockType string

const (
	FixedLength    BlockType = "fixed-length"    // all ranges have the same size
	VariableLength BlockType = "variable-length" // ranges are extents
)

// Blocks is a part of the answer to a BlockQuery. Its ranges are in order, and after those of earlier parts.
type Blocks struct {
	Type     BlockType    `json:"block_type"`
	Capacity int64        `json:"volume_capacity_bytes"`
	Ranges   []BlockRange `json:"ranges"`
}

// BlockRange is a range of a volume, in bytes.
type BlockRange struct {
	Offset int64 `json:"offset_bytes"`
	Size   int64 `json:"size_bytes"`
}

// End returns the offset after the range.
func (r BlockRange) End() int64 { return r.Offset + r.Size }
