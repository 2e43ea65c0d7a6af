package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"

	"golang.org/x/sys/unix"
)

// allocated calls each with the parts of a snapshot that hold data, in order, from an offset on.
func (l loop) allocated(at int64, each func(at, end int64) error) error {
	image, err := os.Open(l.image())
	if err != nil {
		return fmt.Errorf("open the image: %w", err)
	}
	defer image.Close()
	return extents(image, at, each)
}

// changed calls each with the parts in which a snapshot differs from an earlier one, in order, from an offset on. It
// compares contents, as the images of two snapshots need not share blocks, and skips what is a hole in both.
func (l loop) changed(base loop, at int64, each func(at, end int64) error) error {
	a, err := os.Open(base.image())
	if err != nil {
		return fmt.Errorf("open the image: %w", err)
	}
	defer a.Close()
	b, err := os.Open(l.image())
	if err != nil {
		return fmt.Errorf("open the image: %w", err)
	}
	defer b.Close()
	size, err := b.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("read the size of the image: %w", err)
	}
	before, after := make([]byte, 256*blockBytes), make([]byte, 256*blockBytes)
	for {
		inA, errA := nextData(a, at)
		inB, errB := nextData(b, at)
		if err := errors.Join(errA, errB); err != nil {
			return err
		}
		if at = min(inA, inB) / blockBytes * blockBytes; at >= size {
			return nil
		}
		if err := errors.Join(readFull(a, before, at), readFull(b, after, at)); err != nil {
			return err
		}
		for i := 0; i < len(after); i += blockBytes {
			start, block := at+int64(i), i+blockBytes
			if start < size && !bytes.Equal(before[i:block], after[i:block]) {
				if err := each(start, min(start+blockBytes, size)); err != nil {
					return err
				}
			}
		}
		at += int64(len(after))
	}
}

// nextData returns where the data of a file begin that follow an offset, or MaxInt64 if none do.
func nextData(f *os.File, at int64) (int64, error) {
	next, err := f.Seek(at, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return math.MaxInt64, nil
	}
	if err != nil {
		return 0, fmt.Errorf("find the data of %s: %w", f.Name(), err)
	}
	return next, nil
}

// readFull reads a part of a file. What is behind its end are zeros.
func readFull(f *os.File, buf []byte, at int64) error {
	n, err := f.ReadAt(buf, at)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read %s: %w", f.Name(), err)
	}
	clear(buf[n:])
	return nil
}

// extents calls each with the parts of a file that are no holes, from an offset on.
func extents(f *os.File, at int64, each func(at, end int64) error) error {
	for {
		data, err := nextData(f, at)
		if err != nil || data == math.MaxInt64 {
			return err
		}
		if at, err = f.Seek(data, unix.SEEK_HOLE); err != nil {
			return fmt.Errorf("find the holes of %s: %w", f.Name(), err)
		}
		if err := each(data, at); err != nil {
			return err
		}
	}
}
