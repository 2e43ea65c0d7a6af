package disk

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// mkfs has the command that makes a file system in an empty image.
var mkfs = map[string][]string{
	"ext4": {"mkfs.ext4", "-q", "-F", "-m", "0"},
	"xfs":  {"mkfs.xfs", "-q", "-f"},
}

// FileSystems returns the types that the loop backend supports.
func FileSystems() []string { return []string{"ext4", "xfs"} }

// super is what the superblock of an image says.
type super struct {
	fs      string // ext4 (or its forerunners, which ext4 mounts), xfs, or ""
	bytes   int64
	damaged bool // ext4: the kernel found errors
	imaxpc  byte // xfs: how many percent of the space inodes may take
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
	return super{fs: "ext4", bytes: int64(count << (10 + binary.LittleEndian.Uint32(e[24:])&31)),
		damaged: binary.LittleEndian.Uint16(e[58:])&2 != 0}, nil
}

func (l loop) FileSystem(id ID, given string) (string, error) {
	image, err := l.image(id, os.O_RDONLY)
	if err != nil {
		return "", err
	}
	defer image.Close()
	s, err := readSuper(image)
	if s.fs != "" || err != nil {
		return s.fs, err
	}
	blank, err := isBlank(image)
	if err == nil && !blank {
		err = status.Errorf(codes.FailedPrecondition, "volume %s holds data that are neither ext4 nor xfs; loopfs does not "+
			"overwrite them", id)
	}
	return given, err
}

// format makes the file system where no byte was ever written.
func (l loop) format(ctx context.Context, r Record, fs string) error {
	have, err := l.FileSystem(r.ID, "")
	if have == fs || err != nil {
		return err
	}
	if have != "" {
		return status.Errorf(codes.FailedPrecondition, "volume %s holds %s, requested is %s; loopfs never formats a volume "+
			"twice", r.ID, have, fs)
	}
	if user, err := l.HeldBy(r.ID); user != "" || err != nil {
		return errors.Join(err, status.Errorf(codes.FailedPrecondition, "volume %s cannot be formatted: %s still uses it",
			r.ID, user))
	}
	if fs == "xfs" && r.Bytes < minXFSBytes {
		return status.Errorf(codes.FailedPrecondition, "volume %s has %d bytes, xfs needs %d: expand it first, or ask for "+
			"xfs when it is created", r.ID, r.Bytes, minXFSBytes)
	}
	return l.replaceImage(ctx, r.ID, func(part *os.File) error {
		if err := errors.Join(part.Truncate(r.Bytes), tool(ctx, part, 0, mkfs[fs]...)); err != nil {
			return err
		}
		if s, err := readSuper(part); s.fs != fs || err != nil {
			return errors.Join(err, fmt.Errorf("%s made no %s", mkfs[fs][0], fs))
		}
		return nil
	})
}

// tool runs a program with an open image as its argument. Exit codes up to most are success.
func tool(ctx context.Context, image *os.File, most int, command ...string) error {
	path, err := exec.LookPath(command[0])
	if err != nil {
		return status.Errorf(codes.FailedPrecondition, "install %s (e2fsprogs, xfsprogs): %v", command[0], err)
	}
	cmd := exec.CommandContext(ctx, path, append(command[1:], "/proc/self/fd/3")...)
	cmd.ExtraFiles = []*os.File{image}
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", command[0], context.Cause(ctx))
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() && exit.ExitCode() <= most {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", command[0], err, bytes.TrimSpace(out))
	}
	return nil
}

// growExt4 enlarges the file system of an unmounted volume. It works on a copy, as resize2fs must not be killed.
func (l loop) growExt4(ctx context.Context, r Record) error {
	image, err := l.image(r.ID, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer image.Close()
	if s, err := readSuper(image); nearlyFull(r.Bytes, s.bytes) || err != nil {
		return err
	}
	return l.replaceImage(ctx, r.ID, func(part *os.File) error {
		if unix.IoctlFileClone(int(part.Fd()), int(image.Fd())) != nil {
			if err := copySparse(ctx, part, image); err != nil {
				return err
			}
		}
		if err := growFile(part, r.Bytes); err != nil {
			return err
		}
		if err := tool(ctx, part, 1, "e2fsck", "-f", "-p"); err != nil {
			return err
		}
		return tool(ctx, part, 0, "resize2fs", "-f")
	})
}

// nearlyFull reports whether an ext4 may be as large as possible: ext4 omits a last group that has too few blocks for
// its own tables.
func nearlyFull(size, fs int64) bool { return size-fs < min(size/32, 8<<20) }
