package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/installed"
)

func TestExpandAtTheController(t *testing.T) {
	m, p := runLoopfs(t, dirBackend, "--capacity", "64MiB")
	id := p.create("a", writer).VolumeId
	p.create("b", writer)
	for what, c := range map[string]struct {
		least, most int64
		want        codes.Code
	}{
		"no range":                    {0, 0, codes.InvalidArgument},
		"negative":                    {-1, 0, codes.OutOfRange},
		"inverted":                    {20 << 20, 18 << 20, codes.OutOfRange},
		"smaller than it is":          {1 << 20, 0, codes.OK},
		"to less than it has":         {0, 1 << 20, codes.OutOfRange},
		"more than the capacity":      {65 << 20, 0, codes.OutOfRange},
		"more than what is left":      {49 << 20, 0, codes.ResourceExhausted},
		"no whole block in the range": {20<<20 + 1, 20<<20 + 2, codes.OutOfRange},
	} {
		step(t, what, p.expand(id, c.least, c.most), c.want)
	}
	for c, want := range map[*csi.VolumeCapability]codes.Code{writer: codes.OK, multi: codes.InvalidArgument} {
		answer, err := p.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
			VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 20<<20 + 1}, VolumeCapability: c,
		})
		step(t, "expand", err, want)
		if want == codes.OK && (answer.GetCapacityBytes() != 20<<20+4096 || answer.GetNodeExpansionRequired()) {
			t.Errorf("expanded: %v", answer)
		}
	}
	p.kill()
	p = m.start("csi", "--backend", "dir")
	got, err := p.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	if err != nil || got.Volume.CapacityBytes != 20<<20+4096 {
		t.Errorf("after a kill: %v, %v", got, err)
	}
}

// A volume in use grows, once the controller has enlarged its bytes. Where the kernel refuses, the next stage does it.
func TestExpandOnline(t *testing.T) {
	m, p := runLoopfs(t, loopBackend, "--capacity", "2GiB")
	for _, c := range []struct {
		name string
		cap  *csi.VolumeCapability
		size int64
	}{
		{"ext4", writer, 32 << 20}, {"ext4-reader", reader, 32 << 20},
		{"raw", blockOf(writer), 32 << 20},
	} {
		t.Run(c.name, func(t *testing.T) {
			if kind := c.cap.GetMount().GetFsType(); kind != "" {
				installed.FileSystem(t, kind)
			}
			made, err := p.tryCreate(c.name, "", c.size, 0, c.cap)
			must(t, err)
			id, s, target := made.VolumeId, m.staging(c.name), m.target(c.name+"-t")
			size := func() int64 {
				usage, _, err := p.stats(id, target)
				must(t, err)
				return usage.GetTotal()
			}
			p.bringUp(id, s, target, c.cap)
			before := size()
			_, err = p.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
				VolumeId: id, VolumePath: target, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * c.size},
			})
			step(t, "expand at the node first", err, codes.OutOfRange)
			answer, err := p.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
				VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2 * c.size},
			})
			if err != nil || !answer.NodeExpansionRequired || answer.CapacityBytes != 2*c.size {
				t.Errorf("expand at the controller: %v, %v", answer, err)
			}
			step(t, "expand elsewhere", p.expandOnNode(id, m.target("nowhere")), codes.NotFound)
			for range 2 {
				err = p.expandOnNode(id, target)
				if c.cap == reader || c.name == "ext4" && status.Code(err) != codes.OK {
					step(t, "expand what the kernel does not expand", err, codes.FailedPrecondition)
					if !strings.Contains(status.Convert(err).Message(), "stage") {
						t.Errorf("the error does not say what to do: %v", err)
					}
				} else if after := size(); err != nil || after < before+c.size*3/4 {
					t.Errorf("%d bytes, were %d, %v", after, before, err)
				}
			}
			p.takeDown(id, s, target)
			p.bringUp(id, s, target, c.cap)
			if after := size(); after < before+c.size*3/4 {
				t.Errorf("%d bytes after the next stage, were %d", after, before)
			}
			p.takeDown(id, s, target)
			step(t, "delete", p.delete(id), codes.OK)
		})
	}
}

// A file system may be smaller than its volume by some blocks. However little a volume grows, its data stay.
func TestUnmountedVolumeGrowsByAnySize(t *testing.T) {
	m, p := runLoopfs(t, loopBackend)
	id, s := p.create("a", writer).VolumeId, m.staging("s")
	step(t, "stage", p.stage(id, s, writer), codes.OK)
	write(t, s, "kept")
	step(t, "unstage", p.unstage(id, s), codes.OK)
	for _, more := range []int64{4096, 8192, 1<<20 + 4096, 48 << 20} {
		step(t, "expand", p.expand(id, 16<<20+more, 0), codes.OK)
		step(t, "stage", p.stage(id, s, writer), codes.OK)
		expectText(t, s, "kept")
		step(t, "unstage", p.unstage(id, s), codes.OK)
	}
	image := filepath.Join(m.data, "volumes", id, "image")
	if out, err := exec.Command("e2fsck", "-f", "-n", image).CombinedOutput(); err != nil {
		t.Errorf("the file system needs repair: %v\n%s", err, out)
	}
	var st unix.Stat_t
	if err := unix.Stat(image, &st); err != nil || st.Size != 64<<20 || st.Blocks*512 > 16<<20 {
		t.Errorf("the image of 64 MiB has %d bytes, uses %d, %v", st.Size, st.Blocks*512, err)
	}
}

func TestStats(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m, p := runLoopfs(t, backend)
		id, s, target := p.create("a", writer).VolumeId, m.staging("s"), m.target("t")
		expectNone := func(id, path string, want codes.Code) {
			t.Helper()
			_, _, err := p.stats(id, path)
			step(t, "stats at "+path, err, want)
		}
		expectNone(id, s, codes.NotFound)
		p.bringUp(id, s, target, writer)
		before, nodes, err := p.stats(id, target)
		if err != nil || before.Total > 16<<20 || before.Total < 8<<20 || nodes.Total <= nodes.Used {
			t.Errorf("stats: %v, %v, %v", before, nodes, err)
		}
		must(t, os.WriteFile(target+"/big", make([]byte, 2<<20), 0o600))
		unix.Sync()
		after, more, err := p.stats(id, s)
		if err != nil || after.Used < before.Used+2<<20 || after.Available > before.Available-2<<20 ||
			more.Used != nodes.Used+1 {
			t.Errorf("stats were %v, %v; are %v, %v, %v", before, nodes, after, more, err)
		}
		expectNone("", target, codes.InvalidArgument)
		expectNone(id, "", codes.InvalidArgument)
		expectNone(id, "some/path", codes.NotFound)
		expectNone(id, m.work, codes.NotFound)
		expectNone(p.create("b", writer).VolumeId, target, codes.NotFound)
		expectNone("somebody-elses", target, codes.NotFound)
		must(t, unix.Mount("none", target, "tmpfs", 0, "size=64k")) // what is there now is not the volume
		expectNone(id, target, codes.NotFound)
		must(t, unix.Unmount(target, 0))
		p.takeDown(id, s, target)
		expectNone(id, target, codes.NotFound)
	})
}
