package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// loop keeps a volume as a sparse image, and attaches it to loop devices (device.go) or mounts it (loopmount.go).
type loop struct {
	record
	dir string
}

func (l loop) image() string { return filepath.Join(l.dir, "image") }

func (l loop) supports() error { return nil }

// make makes the image, with a file system unless the volume is a block device.
func (l loop) make(ctx context.Context) error {
	if err := os.WriteFile(l.image(), nil, 0o600); err != nil {
		return err
	}
	if err := l.grow(); err != nil || l.Usage.Block {
		return err
	}
	return errors.Join(tool(ctx, 0, "mkfs.ext4", "-q", "-F", "-m", "0", l.image()), l.sync())
}

func (l loop) copyFrom(ctx context.Context, source backend) error {
	if err := cp(ctx, source.(loop).image(), l.image()); err != nil {
		return err
	}
	return errors.Join(l.grow(), l.sync())
}

// cp copies a file or a directory: by reflink where the file system has them, else without holes.
func cp(ctx context.Context, from, to string) error {
	return tool(ctx, 0, "cp", "-a", "-x", "--reflink=auto", "--sparse=always", "-T", from, to)
}

// grow enlarges the image, if it is smaller than the volume.
func (l loop) grow() error {
	st, err := os.Stat(l.image())
	if err == nil && st.Size() < l.Bytes {
		err = errors.Join(os.Truncate(l.image(), l.Bytes), l.sync())
	}
	return err
}

func (l loop) sync() error { return onFile(l.image(), (*os.File).Sync) }

// onFile calls do with an open file or directory.
func onFile(name string, do func(f *os.File) error) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return do(f)
}

// growUnmounted enlarges the file system in an image that is not in use. It works on a copy, as resize2fs must not be
// killed.
func (l loop) growUnmounted(ctx context.Context, s store) error {
	if super, err := l.readSuper(); err != nil || nearlyFull(l.Bytes, super.bytes) {
		return err
	}
	if user, err := l.heldBy(); err != nil || user != "" {
		return err // another namespace has it mounted: the copy would lose what is written there
	}
	return s.temporary(l.ID, func(dir string) error {
		part := loop{record: l.record, dir: dir}
		if err := part.copyFrom(ctx, l); err != nil {
			return err
		}
		if err := tool(ctx, 1, "e2fsck", "-f", "-p", part.image()); err != nil {
			return err
		}
		if err := tool(ctx, 0, "resize2fs", "-f", part.image()); err != nil {
			return err
		}
		return errors.Join(part.sync(), rename(part.image(), l.image()))
	})
}

// nearlyFull reports whether an ext4 may be as large as possible: ext4 omits a last group that has too few blocks for
// its own tables.
func nearlyFull(size, fs int64) bool { return size-fs < min(size/32, 8<<20) }

// tool runs a program. Exit codes up to most are success. One that outlives a killed loopfs works in a directory that
// is never used again, see store.temporary.
func tool(ctx context.Context, most int, command ...string) error {
	path, err := exec.LookPath(command[0])
	if err != nil {
		return status.Errorf(codes.FailedPrecondition, "install %s (e2fsprogs, coreutils): %v", command[0], err)
	}
	out, err := exec.CommandContext(ctx, path, command[1:]...).CombinedOutput()
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

// super is what the superblock of an ext4 says.
type super struct {
	bytes   int64 // 0: there is no superblock
	damaged bool  // the kernel found errors
}

// readSuper reads the superblock of an ext4 (kernel documentation, filesystems/ext4/super).
func (l loop) readSuper() (super, error) {
	b := make([]byte, 1024)
	err := onFile(l.image(), func(image *os.File) error {
		_, err := image.ReadAt(b, 1024)
		return err
	})
	if err != nil && !errors.Is(err, io.EOF) {
		return super{}, fmt.Errorf("read the superblock: %w", err)
	}
	if binary.LittleEndian.Uint16(b[56:]) != 0xEF53 {
		return super{}, nil
	}
	count := uint64(binary.LittleEndian.Uint32(b[4:]))
	if binary.LittleEndian.Uint32(b[96:])&0x80 != 0 { // 64bit
		count |= uint64(binary.LittleEndian.Uint32(b[336:])) << 32
	}
	return super{bytes: int64(count << (10 + binary.LittleEndian.Uint32(b[24:])&31)),
		damaged: binary.LittleEndian.Uint16(b[58:])&2 != 0}, nil
}
