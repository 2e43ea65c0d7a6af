package disk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// loop stores a volume as a sparse image, and attaches (device.go) or mounts (mount.go) it.
type loop struct{ *Store }

func imageName(id ID) string { return "images/" + string(id) + ".img" }

func (l loop) Supports(Usage) error { return nil }

func (l loop) Make(ctx context.Context, id ID, size int64) error {
	return l.replaceImage(ctx, id, func(image *os.File) error { return image.Truncate(size) })
}

func (l loop) Copy(ctx context.Context, from, to ID, size int64, live bool) error {
	source, err := l.image(from, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer source.Close()
	if err := l.flush(from); err != nil {
		return err
	}
	return l.replaceImage(ctx, to, func(image *os.File) error {
		err := unix.IoctlFileClone(int(image.Fd()), int(source.Fd()))
		if err != nil && live {
			return status.Errorf(codes.FailedPrecondition, "volume %s is published for writing and cannot be frozen, and "+
				"without reflinks a copy would not be of one moment (%v); unpublish it first", from, err)
		}
		if err != nil {
			err = copySparse(ctx, image, source)
		}
		return errors.Join(err, growFile(image, size))
	})
}

// replaceImage writes a new image, which gets its name when it is complete. It is a new file every time: a mkfs that
// outlives a killed loopfs writes to the old file, which has no name.
func (l loop) replaceImage(ctx context.Context, id ID, fill func(image *os.File) error) error {
	part := imageName(id) + ".part"
	if err := l.erase(part); err != nil {
		return err
	}
	f, err := l.root.OpenFile(part, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return fmt.Errorf("make the image: %w", err)
	}
	defer f.Close()
	if err := errors.Join(fill(f), context.Cause(ctx)); err != nil {
		return errors.Join(fmt.Errorf("write the image: %w", err), l.erase(part))
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync the image: %w", err)
	}
	return l.rename(part, imageName(id))
}

// image opens a volume's image.
func (l loop) image(id ID, flag int) (*os.File, error) {
	f, err := l.root.OpenFile(imageName(id), flag, 0)
	if err != nil {
		return nil, fmt.Errorf("open the image: %w", err)
	}
	return f, nil
}

func (l loop) Grow(id ID, bytes int64) error {
	f, err := l.image(id, os.O_RDWR)
	if err != nil {
		return err
	}
	defer f.Close()
	return growFile(f, bytes)
}

// growFile enlarges a file.
func growFile(f *os.File, bytes int64) error {
	st, err := f.Stat()
	if err == nil && st.Size() < bytes {
		err = errors.Join(f.Truncate(bytes), f.Sync())
	}
	if err != nil {
		return fmt.Errorf("enlarge the image: %w", err)
	}
	return nil
}

func (l loop) Remove(id ID) error { return l.erase(imageName(id)+".part", imageName(id)) }

// copyChunk is the number of bytes to copy between two checks of the context.
const copyChunk = 16 << 20

// copySparse copies a file without its holes.
func copySparse(ctx context.Context, to, from *os.File) error {
	return extents(from, 0, func(at, end int64) error {
		for ; at < end; at += copyChunk {
			part := io.NewSectionReader(from, at, min(copyChunk, end-at))
			if _, err := io.Copy(io.NewOffsetWriter(to, at), part); err != nil {
				return fmt.Errorf("copy the image: %w", err)
			}
			if err := context.Cause(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

// isBlank reports whether a file holds only zeros.
func isBlank(f *os.File) (bool, error) {
	blank := true
	buf := make([]byte, 1<<20)
	err := extents(f, 0, func(at, end int64) error {
		for ; at < end && blank; at += int64(len(buf)) {
			if err := readFull(f, buf, at); err != nil {
				return err
			}
			for _, b := range buf {
				blank = blank && b == 0
			}
		}
		return nil
	})
	return blank, err
}
