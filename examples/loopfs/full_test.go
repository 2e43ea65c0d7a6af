package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

// A full data directory refuses what needs room with RESOURCE_EXHAUSTED.
func TestFullDataDirectory(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		fs := filepath.Join(m.base, "fs")
		must(t, os.Mkdir(fs, 0o700))
		must(t, unix.Mount("none", fs, "tmpfs", 0, "size=32m"))
		defer func() { must(t, unix.Unmount(fs, 0)) }()
		m.data = filepath.Join(fs, "data")
		p := m.start("csi", "--backend", backend)
		defer p.kill()
		id, s := p.create("a", writer).VolumeId, m.staging("s")
		step(t, "stage", p.stage(id, s, writer), codes.OK)
		must(t, os.WriteFile(filepath.Join(s, "f"), bytes.Repeat([]byte("x"), 2<<20), 0o600))
		must(t, onFile(s, func(root *os.File) error { return unix.Syncfs(int(root.Fd())) }))

		var free unix.Statfs_t
		must(t, unix.Statfs(fs, &free))
		filler := filepath.Join(fs, "filler")
		must(t, os.WriteFile(filler, make([]byte, int64(free.Bavail)*free.Bsize-1<<20), 0o600))
		_, err := p.snapshot("b", id)
		step(t, "snapshot", err, codes.ResourceExhausted)
		_, err = p.snapshotGroup("c", id)
		step(t, "group", err, codes.ResourceExhausted)

		step(t, "unstage", p.unstage(id, s), codes.OK)
	})
}
