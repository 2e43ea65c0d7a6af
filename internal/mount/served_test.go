package mount

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// Mounts of nbd and ublk devices are recognised by sysfs: of the device, a partition, a device on top, or its node.
func TestDevicesOfProcessesAreRecognised(t *testing.T) {
	sys := t.TempDir()
	devices := filepath.Join(sys, "devices/virtual/block")
	for _, dir := range []string{"nbd0/nbd0p1", "ublkb1", "vda", "dm-0/slaves", "dm-1/slaves", "dm-2/slaves"} {
		must(t, os.MkdirAll(filepath.Join(devices, dir), 0o700))
	}
	for _, dir := range []string{"dev/block", "class", "block"} {
		must(t, os.MkdirAll(filepath.Join(sys, dir), 0o700))
	}
	must(t, os.WriteFile(filepath.Join(devices, "nbd0/pid"), []byte("77\n"), 0o600))
	for link, to := range map[string]string{
		"dev/block/43:0": "nbd0", "dev/block/43:1": "nbd0/nbd0p1", "dev/block/259:0": "ublkb1",
		"dev/block/254:0": "vda",
		"dev/block/253:1": "dm-1", "dev/block/253:2": "dm-2", "class/block": ".", "block/nbd0": "nbd0",
		"devices/virtual/block/dm-0/slaves/nbd0": "nbd0", "devices/virtual/block/dm-1/slaves/dm-0": "dm-0",
		"devices/virtual/block/dm-2/slaves/vda": "vda",
	} {
		must(t, os.Symlink(filepath.Join(devices, to), filepath.Join(sys, link)))
	}
	for name, c := range map[string]struct {
		mount Mount
		want  bool
	}{
		"nbd":                 {Mount{Major: 43, Minor: 0, Root: "/", FSType: "ext4"}, true},
		"partition":           {Mount{Major: 43, Minor: 1, Root: "/", FSType: "ext4"}, true},
		"ublk":                {Mount{Major: 259, Minor: 0, Root: "/", FSType: "xfs"}, true},
		"LUKS and LVM on nbd": {Mount{Major: 253, Minor: 1, Root: "/", FSType: "ext4"}, true},
		"LVM on a disk":       {Mount{Major: 253, Minor: 2, Root: "/", FSType: "ext4"}, false},
		"disk":                {Mount{Major: 254, Minor: 0, Root: "/", FSType: "ext4"}, false},
		"unknown device":      {Mount{Major: 8, Minor: 9, Root: "/", FSType: "ext4"}, false},
		"btrfs on nbd":        {Mount{Minor: 50, Root: "/", FSType: "btrfs", Source: "/dev/nbd0"}, true},
		"node of nbd":         {Mount{Minor: 5, Root: "/nbd0", FSType: "devtmpfs"}, true},
		"node in a container": {Mount{Minor: 60, Root: "/ublkb1", FSType: "tmpfs"}, true},
		"node of a disk":      {Mount{Minor: 5, Root: "/vda", FSType: "devtmpfs"}, false},
		"tmpfs":               {Mount{Minor: 61, Root: "/", FSType: "tmpfs", Source: "tmpfs"}, false},
		"nfs":                 {Mount{Minor: 62, Root: "/", FSType: "nfs4", Source: "server:/export"}, false},
	} {
		if got := c.mount.onServedDevice(sys); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	if pids := nbdServers(sys); !slices.Equal(pids, []int{77}) {
		t.Errorf("nbd devices are served by %v", pids)
	}
}
