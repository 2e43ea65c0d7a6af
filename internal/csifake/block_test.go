package csifake

import (
	"os"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
)

func blockWriter() *csi.VolumeCapability {
	c := writer()
	c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	return c
}

func (c *client) publishBlock(id, target string) error {
	_, err := c.NodePublishVolume(c.t.Context(), &csi.NodePublishVolumeRequest{VolumeId: id, TargetPath: target,
		VolumeCapability: blockWriter()})
	return err
}

// The target of a block volume is a block device as large as the volume. The device is the same for every target and
// after a restart, and keeps its data. The last unpublish frees it.
func TestBlockVolumeIsALoopDevice(t *testing.T) {
	needMounts(t)
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		t.Skipf("this kernel has no loop devices: %v", err)
	}
	dir := t.TempDir()
	fake, c := start(t, Config{Caps: []string{"CREATE_DELETE", "node/GET_VOLUME_STATS"}, Mounts: true, DataDir: dir,
		Backend: NewBackend(dir + "/state")})
	one, two := newPaths(t), newPaths(t)
	cleanMounts(t, one)
	cleanMounts(t, two)
	made, err := c.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "disk",
		VolumeCapabilities: []*csi.VolumeCapability{blockWriter()},
		CapacityRange:      &csi.CapacityRange{RequiredBytes: 8 << 20}})
	must(t, err)
	id := made.GetVolume().GetVolumeId()
	must(t, c.publishBlock(id, one.target))
	device := deviceAt(t, one.target)
	if size := sizeOf(t, one.target); size != 8<<20 {
		t.Errorf("the device has %d bytes", size)
	}
	must(t, os.WriteFile(one.target, []byte("data"), 0))
	fake.Kill()
	c = dial(t, "unix:"+Start(t, fake.Config()).Socket()).learn()
	must(t, c.publishBlock(id, one.target), c.publishBlock(id, two.target))
	if deviceAt(t, two.target) != device {
		t.Error("another target has another device")
	}
	stats, err := c.NodeGetVolumeStats(t.Context(),
		&csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: two.target})
	must(t, err)
	if u := stats.GetUsage(); len(u) != 1 || u[0].GetTotal() != 8<<20 || u[0].GetUsed() != 0 ||
		u[0].GetAvailable() != 0 {
		t.Errorf("the stats are %v", u)
	}
	must(t, c.unpublish(t.Context(), id, one))
	b := make([]byte, 4)
	f, err := os.Open(two.target)
	must(t, err)
	_, err = f.Read(b)
	must(t, err, f.Close())
	if string(b) != "data" {
		t.Errorf("the device has %q", b)
	}
	name, err := fake.Backend().device(id, "node-1")
	must(t, err)
	must(t, c.unpublish(t.Context(), id, two))
	if loopOf(name, fake.data(id)+".block") {
		t.Errorf("%s is still there", name)
	}
}

func deviceAt(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		t.Fatalf("%s is no block device: %o", path, st.Mode)
	}
	return st.Rdev
}

func sizeOf(t *testing.T, device string) int64 {
	t.Helper()
	f, err := os.Open(device)
	must(t, err)
	defer f.Close()
	n, err := f.Seek(0, 2)
	must(t, err)
	return n
}
