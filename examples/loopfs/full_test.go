package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
)

// On a full disk, calls that need space fail with RESOURCE_EXHAUSTED, and calls that free space succeed.
func TestFullDataDirectory(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		fs := m.mountData("size=32m,nr_inodes=100")
		p := m.start("csi", "--backend", backend)
		defer p.kill()
		id, s, target := p.create("a", writer).VolumeId, m.staging("s"), m.target("t")
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

		step(t, "publish", p.publish(id, s, target, writer, false), codes.OK)
		for i := range 100 {
			err = os.WriteFile(fmt.Sprint(filler, i), nil, 0o600)
		}
		if !errors.Is(err, unix.ENOSPC) {
			t.Fatal(err)
		}
		_, err = p.tryCreate("d", "", 0, 0, writer)
		step(t, "create", err, codes.ResourceExhausted)
		p.takeDown(id, s, target)
		step(t, "stage again", p.stage(id, s, writer), codes.ResourceExhausted)
		step(t, "delete", p.delete(id), codes.OK)
		m.expectNoVolumes()
	})
}
