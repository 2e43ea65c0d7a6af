package csifake

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// What the kernel asks of a FUSE file system, as far as an empty one is asked. Numbers and layouts are those of
// linux/fuse.h, protocol 7.31.
const (
	fuseLookup     = 1
	fuseForget     = 2
	fuseGetattr    = 3
	fuseStatfs     = 17
	fuseInit       = 26
	fuseOpendir    = 27
	fuseReaddir    = 28
	fuseReleasedir = 29
	fuseInterrupt  = 36
	fuseForgetMany = 42

	fuseHeader = 40 // bytes before a request
)

// fuseRequest is one request.
type fuseRequest struct {
	opcode uint32
	unique uint64
}

func parseFuse(b []byte) (fuseRequest, bool) {
	if len(b) < fuseHeader {
		return fuseRequest{}, false
	}
	return fuseRequest{opcode: binary.NativeEndian.Uint32(b[4:]), unique: binary.NativeEndian.Uint64(b[8:])}, true
}

// answer is that of a file system with a root directory and nothing in it; nil where the kernel waits for none.
func (q fuseRequest) answer() []byte {
	switch q.opcode {
	case fuseForget, fuseForgetMany, fuseInterrupt:
		return nil
	case fuseInit:
		// version, read-ahead, flags, background, longest write, time grain
		return q.reply(0, fuseWords(64, 7, 31, 0, 0, 0, 4096, 1))
	case fuseGetattr:
		return q.reply(0, fuseAttributes())
	case fuseStatfs:
		return q.reply(0, fuseStatistics())
	case fuseLookup:
		return q.reply(unix.ENOENT, nil)
	case fuseOpendir:
		return q.reply(0, make([]byte, 16)) // a handle that is 0
	case fuseReaddir, fuseReleasedir:
		return q.reply(0, nil)
	}
	return q.reply(unix.ENOSYS, nil)
}

// reply puts the header before an answer.
func (q fuseRequest) reply(errno unix.Errno, body []byte) []byte {
	b := make([]byte, 16, 16+len(body))
	binary.NativeEndian.PutUint32(b[0:], uint32(16+len(body)))
	binary.NativeEndian.PutUint32(b[4:], uint32(-int32(errno)))
	binary.NativeEndian.PutUint64(b[8:], q.unique)
	return append(b, body...)
}

// fuseWords is a structure of so many bytes that begins with these words of 32 bits.
func fuseWords(size int, words ...uint32) []byte {
	b := make([]byte, size)
	for i, w := range words {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	return b
}

// fuseAttributes are those of the root directory. They are good for no time at all: every stat asks again, and hangs if
// we do.
func fuseAttributes() []byte {
	b := make([]byte, 16+88)
	binary.NativeEndian.PutUint64(b[16:], 1) // inode
	at := 16 + 6*8 + 3*4                     // behind numbers and times
	binary.NativeEndian.PutUint32(b[at:], unix.S_IFDIR|0o755)
	binary.NativeEndian.PutUint32(b[at+4:], 2) // links
	return b
}

// fuseStatistics are those of 4 MiB in 1024 blocks, all free.
func fuseStatistics() []byte {
	b := make([]byte, 80)
	for i := range 5 {
		binary.NativeEndian.PutUint64(b[8*i:], 1024)
	}
	binary.NativeEndian.PutUint32(b[40:], 4096) // block
	binary.NativeEndian.PutUint32(b[44:], 255)  // longest name
	binary.NativeEndian.PutUint32(b[48:], 4096) // fragment
	return b
}
