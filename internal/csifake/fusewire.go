package csifake

import (
	"bytes"
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// FuseFile is the only file of a FUSE mount, FuseText its content.
const (
	FuseFile = "served"
	FuseText = "alive"
)

// The requests that the kernel sends to a FUSE file system with a single file. Numbers and layouts are those of
// linux/fuse.h, protocol 7.31.
const (
	fuseLookup     = 1
	fuseForget     = 2
	fuseGetattr    = 3
	fuseOpen       = 14
	fuseRead       = 15
	fuseStatfs     = 17
	fuseRelease    = 18
	fuseInit       = 26
	fuseOpendir    = 27
	fuseReaddir    = 28
	fuseReleasedir = 29
	fuseInterrupt  = 36
	fuseForgetMany = 42

	fuseHeader = 40 // bytes before a request

	fuseInode = 2 // inode of FuseFile
)

// fuseRequest is one request.
type fuseRequest struct {
	opcode uint32
	unique uint64
	inode  uint64
	body   []byte
}

func parseFuse(b []byte) (fuseRequest, bool) {
	if len(b) < fuseHeader {
		return fuseRequest{}, false
	}
	return fuseRequest{
		opcode: binary.NativeEndian.Uint32(b[4:]), unique: binary.NativeEndian.Uint64(b[8:]),
		inode: binary.NativeEndian.Uint64(b[16:]), body: b[fuseHeader:],
	}, true
}

// answer returns the answer of a file system whose root directory has only FuseFile, which a listing does not show. It
// returns nil if the kernel does not wait for an answer.
func (q fuseRequest) answer() []byte {
	switch q.opcode {
	case fuseForget, fuseForgetMany, fuseInterrupt:
		return nil
	case fuseInit:
		// version, read-ahead, flags, background, longest write, time grain
		return q.reply(0, fuseWords(64, 7, 31, 0, 0, 0, 4096, 1))
	case fuseGetattr:
		return q.reply(0, append(make([]byte, 16), fuseAttributes(q.inode)...))
	case fuseStatfs:
		return q.reply(0, fuseStatistics())
	case fuseLookup:
		if name, _, _ := bytes.Cut(q.body, []byte{0}); string(name) != FuseFile {
			return q.reply(unix.ENOENT, nil)
		}
		entry := make([]byte, 40)
		binary.NativeEndian.PutUint64(entry, fuseInode)
		return q.reply(0, append(entry, fuseAttributes(fuseInode)...))
	case fuseOpen:
		return q.reply(0, fuseWords(16, 0, 0, 1)) // FOPEN_DIRECT_IO: the kernel sends each read
	case fuseRead:
		if len(q.body) < 16 {
			return q.reply(unix.EINVAL, nil)
		}
		from := min(binary.NativeEndian.Uint64(q.body[8:]), uint64(len(FuseText)))
		return q.reply(0, []byte(FuseText[from:]))
	case fuseOpendir:
		return q.reply(0, make([]byte, 16)) // the handle is 0
	case fuseReaddir, fuseReleasedir, fuseRelease:
		return q.reply(0, nil)
	}
	return q.reply(unix.ENOSYS, nil)
}

// reply returns an answer with its header.
func (q fuseRequest) reply(errno unix.Errno, body []byte) []byte {
	b := make([]byte, 16, 16+len(body))
	binary.NativeEndian.PutUint32(b[0:], uint32(16+len(body)))
	binary.NativeEndian.PutUint32(b[4:], uint32(-int32(errno)))
	binary.NativeEndian.PutUint64(b[8:], q.unique)
	return append(b, body...)
}

// fuseWords returns a structure of size bytes that begins with the given 32-bit words.
func fuseWords(size int, words ...uint32) []byte {
	b := make([]byte, size)
	for i, w := range words {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	return b
}

// fuseAttributes returns the attributes of the root directory or the file. The kernel must not cache them, so every
// stat asks again, and hangs if the plugin does.
func fuseAttributes(inode uint64) []byte {
	b := make([]byte, 88)
	binary.NativeEndian.PutUint64(b, inode)
	at, mode := 6*8+3*4, uint32(unix.S_IFDIR|0o755) // behind numbers and times
	if inode == fuseInode {
		mode = unix.S_IFREG | 0o444
		binary.NativeEndian.PutUint64(b[8:], uint64(len(FuseText)))
	}
	binary.NativeEndian.PutUint32(b[at:], mode)
	binary.NativeEndian.PutUint32(b[at+4:], 2) // links
	return b
}

// fuseStatistics returns statfs values: 4 MiB in 1024 blocks, all free.
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
