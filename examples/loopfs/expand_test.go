package main

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/internal/installed"
)

func bytesAt(t *testing.T, dir string) int64 {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Blocks) * st.Bsize
}

// mayGrow says whether the kernel lets this process enlarge a mounted ext4.
func mayGrow(t *testing.T) bool {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "CapEff:\t")
	line, _, _ := strings.Cut(rest, "\n")
	caps, err := strconv.ParseUint(line, 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return caps&(1<<unix.CAP_SYS_RESOURCE) != 0
}

func TestExpandTable(t *testing.T) {
	m := newMachine(t)
	p := m.start("csi", "--backend", "dir", "--mode", "controller", "--capacity", "64MiB")
	id := p.create("a", writer).VolumeId
	p.create("b", writer)
	step(t, "no range", p.expand(id, 0, 0), codes.InvalidArgument)
	step(t, "negative", p.expand(id, -1, 0), codes.OutOfRange)
	step(t, "inverted", p.expand(id, 20<<20, 18<<20), codes.OutOfRange)
	step(t, "unknown volume", p.expand(string(disk.IDFor(disk.Volume, "none")), 1<<20, 0), codes.NotFound)
	step(t, "smaller than it is", p.expand(id, 1<<20, 0), codes.OK)
	step(t, "to less than it has", p.expand(id, 0, 1<<20), codes.OutOfRange)
	step(t, "more than there is", p.expand(id, 65<<20, 0), codes.OutOfRange)
	step(t, "more than is left", p.expand(id, 49<<20, 0), codes.ResourceExhausted)
	step(t, "no whole block in the range", p.expand(id, 20<<20+1, 20<<20+2), codes.OutOfRange)
	for range 2 {
		answer, err := p.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
			VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 20<<20 + 1}, VolumeCapability: writer,
		})
		if err != nil || answer.CapacityBytes != 20<<20+4096 || answer.NodeExpansionRequired {
			t.Errorf("expand: %v, %v", answer, err)
		}
	}
	_, err := p.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
		VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 24 << 20}, VolumeCapability: multi,
	})
	step(t, "for another usage", err, codes.InvalidArgument)
	free, err := p.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	if want := int64(64-16-20)<<20 - 4096; err != nil || free.AvailableCapacity != want {
		t.Errorf("free are %d, not %d, %v", free.GetAvailableCapacity(), want, err)
	}
	p.kill()
	p = m.start("csi", "--backend", "dir", "--mode", "controller")
	got, err := p.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	if err != nil || got.Volume.CapacityBytes != 20<<20+4096 {
		t.Errorf("after a kill: %v, %v", got, err)
	}
}

// A volume in use grows under its users' hands; the node needs the controller to go first.
func TestExpandOnline(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop", "--capacity", "2GiB")
	for _, c := range []struct {
		name string
		cap  *csi.VolumeCapability
		size int64
	}{{"ext4", writer, 32 << 20}, {"xfs", mountOf(writer, "xfs", ""), 300 << 20}, {"raw", blockOf(writer), 32 << 20}} {
		t.Run(c.name, func(t *testing.T) {
			if kind := c.cap.GetMount().GetFsType(); kind != "" {
				installed.FileSystem(t, kind)
			}
			made, err := p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
				Name: c.name, VolumeCapabilities: []*csi.VolumeCapability{c.cap},
				CapacityRange: &csi.CapacityRange{RequiredBytes: c.size},
			})
			if err != nil {
				t.Fatal(err)
			}
			id, s, target := made.Volume.VolumeId, m.staging(c.name), m.target(c.name+"-t")
			size := func() int64 {
				usage, _, err := p.stats(id, target)
				if err != nil {
					t.Error(err)
				}
				return usage.GetTotal()
			}
			step(t, "stage", p.stage(id, s, c.cap), codes.OK)
			step(t, "publish", p.publish(id, s, target, c.cap, false), codes.OK)
			before := size()
			_, err = p.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
				VolumeId: id, VolumePath: target, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * c.size},
			})
			step(t, "the node before the controller", err, codes.OutOfRange)
			answer, err := p.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
				VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * c.size},
			})
			if err != nil || !answer.NodeExpansionRequired || answer.CapacityBytes != 2*c.size {
				t.Errorf("%s: expand at the controller: %v, %v", c.name, answer, err)
			}
			step(t, "stats elsewhere", p.expandOnNode(id, m.target("nowhere")), codes.NotFound)
			for range 2 {
				err = p.expandOnNode(id, target)
				if c.name == "ext4" && !mayGrow(t) {
					step(t, "expand ext4 without CAP_SYS_RESOURCE", err, codes.FailedPrecondition)
					if !strings.Contains(status.Convert(err).Message(), "stage it again") {
						t.Errorf("the error does not say what to do: %v", err)
					}
					continue
				}
				if after := size(); err != nil || after < before+c.size*3/4 {
					t.Errorf("%s had %d bytes and has %d, %v", c.name, before, after, err)
				}
			}
			step(t, "unpublish", p.unpublish(id, target), codes.OK)
			step(t, "unstage", p.unstage(id, s), codes.OK)
			step(t, "stage", p.stage(id, s, c.cap), codes.OK)
			step(t, "publish", p.publish(id, s, target, c.cap, false), codes.OK)
			if after := size(); after < before+c.size*3/4 {
				t.Errorf("%s had %d bytes and has %d after the next stage", c.name, before, after)
			}
			step(t, "expand on the node", p.expandOnNode(id, s), codes.OK)
			step(t, "unpublish", p.unpublish(id, target), codes.OK)
			step(t, "unstage", p.unstage(id, s), codes.OK)
			step(t, "delete", p.delete(id), codes.OK)
		})
	}
}

func TestExpandReadOnly(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop")
	id, s := p.create("a", writer).VolumeId, m.staging("s")
	step(t, "stage", p.stage(id, s, writer), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
	step(t, "stage", p.stage(id, s, reader), codes.OK)
	step(t, "expand", p.expand(id, 32<<20, 0), codes.OK)
	step(t, "expand on the node", p.expandOnNode(id, s), codes.FailedPrecondition)
	step(t, "unstage", p.unstage(id, s), codes.OK)
	step(t, "stage", p.stage(id, s, reader), codes.OK)
	if size := bytesAt(t, s); size < 24<<20 {
		t.Errorf("staged again it has %d bytes", size)
	}
	expectReadOnly(t, s)
	step(t, "unstage", p.unstage(id, s), codes.OK)
}

func TestStats(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		p := m.start("csi", "--backend", backend)
		id, s, target := p.create("a", writer).VolumeId, m.staging("s"), m.target("t")
		at := func(id, path string, want codes.Code) {
			t.Helper()
			_, _, err := p.stats(id, path)
			step(t, "stats at "+path, err, want)
		}
		at(id, s, codes.NotFound)
		step(t, "stage", p.stage(id, s, writer), codes.OK)
		step(t, "publish", p.publish(id, s, target, writer, false), codes.OK)
		before, nodes, err := p.stats(id, target)
		if err != nil || before.Total > 16<<20 || before.Total < 8<<20 || nodes.Total <= nodes.Used {
			t.Errorf("stats: %v, %v, %v", before, nodes, err)
		}
		if err := os.WriteFile(target+"/big", make([]byte, 2<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		unix.Sync()
		after, more, err := p.stats(id, s)
		if err != nil || after.Used < before.Used+2<<20 || after.Available > before.Available-2<<20 ||
			more.Used != nodes.Used+1 {
			t.Errorf("stats were %v, %v; are %v, %v, %v", before, nodes, after, more, err)
		}
		at("", target, codes.InvalidArgument)
		at(id, "", codes.InvalidArgument)
		at(id, "some/path", codes.NotFound)
		at(id, m.work, codes.NotFound)
		at(id, m.target("none"), codes.NotFound)
		at(p.create("b", writer).VolumeId, target, codes.NotFound)
		at(string(disk.IDFor(disk.Volume, "none")), target, codes.NotFound)
		at("somebody-elses", target, codes.NotFound)
		// what is there now is not the volume
		if err := unix.Mount("none", target, "tmpfs", 0, "size=64k"); err != nil {
			t.Fatal(err)
		}
		at(id, target, codes.NotFound)
		if err := unix.Unmount(target, 0); err != nil {
			t.Fatal(err)
		}
		step(t, "unpublish", p.unpublish(id, target), codes.OK)
		at(id, target, codes.NotFound)
		step(t, "unstage", p.unstage(id, s), codes.OK)
	})
}
