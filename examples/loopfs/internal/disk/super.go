package disk

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// super is what the superblock of an image says.
type super struct {
	fs      string // ext4 (or its forerunners, which ext4 mounts), xfs, or ""
	bytes   int64
	damaged bool  // ext4: the kernel found errors
	imaxpc  uint8 // xfs: how many percent of the space inodes may take
}

// readSuper reads the superblock of ext4 (kernel documentation, filesystems/ext4/super) or xfs
// (fs/xfs/libxfs/xfs_format.h).
func readSuper(image io.ReaderAt) (super, error) {
	b := make([]byte, 4096)
	if n, err := image.ReadAt(b, 0); err != nil && !(errors.Is(err, io.EOF) && n == 0) {
		return super{}, fmt.Errorf("read the superblock: %w", err)
	}
	if bytes.HasPrefix(b, []byte("XFSB")) {
		block, count := binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint64(b[8:])
		return super{fs: "xfs", bytes: int64(count) * int64(block), imaxpc: b[127]}, nil
	}
	e := b[1024:]
	if binary.LittleEndian.Uint16(e[56:]) != 0xEF53 {
		return super{}, nil
	}
	count := uint64(binary.LittleEndian.Uint32(e[4:]))
	if binary.LittleEndian.Uint32(e[96:])&0x80 != 0 { // 64bit
		count |= uint64(binary.LittleEndian.Uint32(e[336:])) << 32
	}
	damaged := binary.LittleEndian.Uint16(e[58:])&2 != 0
	return super{fs: "ext4", damaged: damaged, bytes: int64(count << (10 + binary.LittleEndian.Uint32(e[24:])&31))}, nil
}
