package main

import (
	"errors"
	"io"
	"os"
	"reflect"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

// collect reads a stream of ranges. No message has more than most, and none is empty if others follow.
func collect[M interface{ GetBlockMetadata() []*csi.BlockMetadata }](
	t *testing.T, most int, recv func() (M, error),
) (list [][2]int64, err error) {
	for empty := false; ; {
		m, err := recv()
		if errors.Is(err, io.EOF) {
			return list, nil
		}
		if err != nil {
			return list, err
		}
		n := len(m.GetBlockMetadata())
		if most > 0 && n > most || empty {
			t.Errorf("a message of %d ranges, want at most %d; after an empty one: %t", n, most, empty)
		}
		empty = n == 0
		for _, b := range m.GetBlockMetadata() {
			list = append(list, [2]int64{b.ByteOffset, b.SizeBytes})
		}
	}
}

func (p *process) allocated(id string, at int64, most int32) ([][2]int64, error) {
	stream, err := p.GetMetadataAllocated(p.t.Context(), &csi.GetMetadataAllocatedRequest{
		SnapshotId: id, StartingOffset: at, MaxResults: most,
	})
	must(p.t, err)
	return collect(p.t, int(most), stream.Recv)
}

func (p *process) delta(base, id string, at int64, most int32) ([][2]int64, error) {
	stream, err := p.GetMetadataDelta(p.t.Context(), &csi.GetMetadataDeltaRequest{
		BaseSnapshotId: base, TargetSnapshotId: id, StartingOffset: at, MaxResults: most,
	})
	must(p.t, err)
	return collect(p.t, int(most), stream.Recv)
}

func TestChangedBlocks(t *testing.T) {
	m, p := runLoopfs(t, loopBackend)
	raw := blockOf(writer)
	id, s, target := p.create("a", raw).VolumeId, m.staging("s"), m.target("t")
	const page = 64 << 10 // file systems with larger blocks have coarser holes than 4 KiB
	writeAt := func(pages ...int64) {
		t.Helper()
		p.bringUp(id, s, target, raw)
		f, err := os.OpenFile(target, os.O_WRONLY, 0)
		must(t, err)
		for _, n := range pages {
			text := make([]byte, page)
			for i := range text {
				text[i] = byte(i + int(n) + 1)
			}
			_, err := f.WriteAt(text, n*page)
			must(t, err)
		}
		must(t, f.Close())
		p.takeDown(id, s, target)
	}
	snapshot := func(name string) string {
		t.Helper()
		snap, err := p.snapshot(name, id)
		must(t, err)
		return snap.SnapshotId
	}
	writeAt(0, 1, 8, 100)
	one := snapshot("one")
	must(t, p.expand(id, 32<<20, 0))
	writeAt(8, 9, 50, 400) // page 8 with the same content
	two := snapshot("two")
	for what, c := range map[string]struct {
		call func() ([][2]int64, error)
		want [][2]int64
		code codes.Code
	}{
		"allocated": {func() ([][2]int64, error) { return p.allocated(one, 0, 0) },
			[][2]int64{{0, 2 * page}, {8 * page, page}, {100 * page, page}}, codes.OK},
		"allocated, one by one": {func() ([][2]int64, error) { return p.allocated(one, 0, 1) },
			[][2]int64{{0, 2 * page}, {8 * page, page}, {100 * page, page}}, codes.OK},
		"allocated, from the middle": {func() ([][2]int64, error) { return p.allocated(one, 9*page, 0) },
			[][2]int64{{100 * page, page}}, codes.OK},
		"allocated, from the end": {func() ([][2]int64, error) { return p.allocated(one, 16<<20, 0) }, nil, codes.OK},
		"changed": {func() ([][2]int64, error) { return p.delta(one, two, 0, 2) },
			[][2]int64{{9 * page, page}, {50 * page, page}, {400 * page, page}}, codes.OK},
		"changed, from the middle": {func() ([][2]int64, error) { return p.delta(one, two, 10*page, 1) },
			[][2]int64{{50 * page, page}, {400 * page, page}}, codes.OK},
		"nothing changed": {func() ([][2]int64, error) { return p.delta(two, two, 0, 0) }, nil, codes.OK},
		"from behind the end": {func() ([][2]int64, error) { return p.allocated(one, 17<<20, 0) }, nil,
			codes.OutOfRange},
		"in the wrong order": {func() ([][2]int64, error) { return p.delta(two, one, 0, 0) }, nil,
			codes.InvalidArgument},
		"of nothing":  {func() ([][2]int64, error) { return p.allocated("", 0, 0) }, nil, codes.InvalidArgument},
		"of a volume": {func() ([][2]int64, error) { return p.allocated(id, 0, 0) }, nil, codes.NotFound},
	} {
		got, err := c.call()
		step(t, what, err, c.code)
		if !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v, want %v", what, got, c.want)
		}
	}
}
