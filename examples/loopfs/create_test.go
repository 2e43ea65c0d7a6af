package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func newDriver(t *testing.T, dir string, capacity int64) *driver {
	t.Helper()
	s, err := openStore(dir)
	must(t, err)
	return &driver{store: s, node: "n1", newVolumes: dirBackend, capacity: capacity}
}

func (d *driver) tryCreate(ctx context.Context, name string, least, most int64) (int64, error) {
	answer, err := d.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: least, LimitBytes: most},
		VolumeCapabilities: []*csi.VolumeCapability{writer}})
	return answer.GetVolume().GetCapacityBytes(), err
}

func TestVolumeSizesAreChecked(t *testing.T) {
	const capacity = 256 << 20
	for _, c := range []struct {
		least, most, bytes int64
		code               codes.Code
	}{
		{0, 0, defaultBytes, codes.OK},
		{1, 0, minBytes, codes.OK},
		{minBytes + 1, 0, minBytes + blockBytes, codes.OK},
		{0, 32 << 20, 32 << 20, codes.OK},
		{20 << 20, 20 << 20, 20 << 20, codes.OK},
		{capacity, 0, capacity, codes.OK},
		{capacity + 1, 0, 0, codes.OutOfRange},
		{0, minBytes - 1, 0, codes.OutOfRange},
		{minBytes + 1, minBytes + 2, 0, codes.OutOfRange},
		{2, 1, 0, codes.OutOfRange},
		{-1, 0, 0, codes.OutOfRange},
		{0, -1, 0, codes.OutOfRange},
	} {
		bytes, err := newDriver(t, t.TempDir(), capacity).tryCreate(t.Context(), "a", c.least, c.most)
		if status.Code(err) != c.code || bytes != c.bytes {
			t.Errorf("at least %d, at most %d: %d bytes, %v", c.least, c.most, bytes, err)
		}
	}
}

func TestCapacityIsSharedByProcesses(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	for i := range 4 {
		d := newDriver(t, dir, 5*defaultBytes)
		wg.Go(func() {
			for j := range 4 {
				_, err := d.tryCreate(t.Context(), strings.Repeat("v", 1+4*i+j), 0, 0)
				if err != nil && status.Code(err) != codes.ResourceExhausted {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	entries, err := os.ReadDir(filepath.Join(dir, "volumes"))
	if err != nil || len(entries) != 5 {
		t.Errorf("%d volumes fit, %v", len(entries), err)
	}
}

func TestFailedMakeLeavesNothing(t *testing.T) {
	d := newDriver(t, t.TempDir(), 1<<30)
	failed := errors.New("no file system")
	err := d.make("vol-x", func(dir string) error {
		must(t, d.reserve(1<<20, func() error { return writeRecord(dir, record{ID: "vol-x", Bytes: 1 << 20}) }))
		if free := d.free(); free != 1<<30-1<<20 {
			t.Errorf("%d bytes are free while a volume is made", free)
		}
		return failed
	})
	if free := d.free(); !errors.Is(err, failed) || free != 1<<30 {
		t.Errorf("%d bytes are free after %v", free, err)
	}
}
