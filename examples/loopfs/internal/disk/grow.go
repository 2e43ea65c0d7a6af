package disk

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests to ioctl(2), for an open directory of a mounted file system.
const (
	fiFreeze = 0xC0045877 // FIFREEZE
	fiThaw   = 0xC0045878 // FITHAW
	extGrow  = 0x40086610 // EXT4_IOC_RESIZE_FS: the number of blocks
	xfsGrow  = 0x4010586E // XFS_IOC_FSGROWFSDATA: xfsGrowth
)

type xfsGrowth struct {
	blocks uint64
	imaxpc uint32 // as it was
	_      uint32
}

// growFS enlarges a mounted file system. The kernel does it in transactions, so a kill does no harm.
func growFS(root *os.File, s super, bytes int64) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(root.Fd()), &st); err != nil {
		return fmt.Errorf("statfs: %w", err)
	}
	count := uint64(bytes / st.Bsize)
	request, argument := uintptr(extGrow), unsafe.Pointer(&count)
	if s.fs == "xfs" {
		request, argument = xfsGrow, unsafe.Pointer(&xfsGrowth{blocks: count, imaxpc: uint32(s.imaxpc)})
	}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, root.Fd(), request, uintptr(argument)); errno != 0 {
		return fmt.Errorf("enlarge %s to %d blocks: %w", s.fs, count, errno)
	}
	return nil
}
