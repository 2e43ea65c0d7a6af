package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

func TestModifyChangesTheReadAheadOfDevices(t *testing.T) {
	m, p := runLoopfs(t, loopBackend)
	expect := func(id, want string) {
		t.Helper()
		files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
		must(t, err)
		for _, f := range files {
			if name, err := os.ReadFile(f); err != nil || !strings.Contains(string(name), m.base+"/data/volumes/"+id) {
				continue
			}
			got, err := os.ReadFile(filepath.Join(filepath.Dir(f), "../queue/read_ahead_kb"))
			if err != nil || strings.TrimSpace(string(got)) != want {
				t.Errorf("%s has read-ahead %s, %v; want %s", f, got, err, want)
			}
			return
		}
		t.Errorf("volume %s has no device", id)
	}
	answer, err := p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "a", VolumeCapabilities: []*csi.VolumeCapability{writer},
		MutableParameters: map[string]string{readAheadKey: "64"},
	})
	must(t, err)
	id, s, target := answer.Volume.VolumeId, m.staging("s"), m.target("t")
	p.bringUp(id, s, target, writer)
	expect(id, "64")
	step(t, "modify in use", p.modify(id, readAheadKey, "256"), codes.OK)
	expect(id, "256")
	p.takeDown(id, s, target)
	step(t, "modify", p.modify(id, readAheadKey, "512"), codes.OK)
	p.bringUp(id, s, target, writer)
	expect(id, "512")
	for value, want := range map[string]codes.Code{
		"3": codes.InvalidArgument, "": codes.InvalidArgument, "1000000": codes.InvalidArgument, "512": codes.OK,
	} {
		step(t, "modify to "+value, p.modify(id, readAheadKey, value), want)
	}
	step(t, "unknown parameter", p.modify(id, "iops", "512"), codes.InvalidArgument)
	step(t, "unknown volume", p.modify(string(idFor(volumeKind, "none")), readAheadKey, "64"), codes.NotFound)
	expect(id, "512")
	p.takeDown(id, s, target)

	raw := p.create("raw", blockOf(writer)).VolumeId
	step(t, "modify", p.modify(raw, readAheadKey, "64"), codes.OK)
	s, target = m.staging("raw-s"), m.target("raw-t")
	p.bringUp(raw, s, target, blockOf(writer))
	expect(raw, "64")
	p.takeDown(raw, s, target)
}
