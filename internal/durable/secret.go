package durable

import (
	"bytes"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// MaxSecret bounds the value of a secret, in bytes.
const MaxSecret = 64 << 10

// ReadSecret reads a small regular file. One line end at its end is not part of the value. A value that is longer than
// MaxSecret is cut to some length above it.
func ReadSecret(path string) ([]byte, error) {
	if !filepath.IsAbs(path) {
		return nil, registry.Invalid("%s is not an absolute path", path)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO must not hold us
	if err != nil {
		return nil, registry.Errorf(registry.ErrUnavailable, "%w", err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, registry.Invalid("%s is not a regular file", path)
	}
	value, err := io.ReadAll(io.LimitReader(f, MaxSecret+2))
	if err != nil {
		return nil, registry.Errorf(registry.ErrUnavailable, "%w", err)
	}
	return bytes.TrimSuffix(value, []byte("\n")), nil
}
