package csifake

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
)

// needMounts skips the test if the kernel does not let this process mount. For root that is an error.
func needMounts(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	err := unix.Mount("probe", dir, "tmpfs", 0, "")
	if err == nil {
		err = unix.Unmount(dir, 0)
	}
	if err != nil && os.Geteuid() != 0 {
		t.Skipf("this process may not mount: %v", err)
	}
	must(t, err)
}

// cleanMounts removes all mounts, even if the test fails in the middle.
func cleanMounts(t *testing.T, at places) {
	t.Cleanup(func() {
		for _, path := range []string{at.target, at.staging} {
			for range mountsOn(t, path) {
				_ = unix.Unmount(path, unix.MNT_DETACH)
			}
		}
	})
}

// The mount is as requested. A plugin may put a file where a device must be.
func TestReadOnlyAndBlockTargets(t *testing.T) {
	needMounts(t)
	_, c := start(t, Config{Mounts: true, DataDir: t.TempDir(), Block: BlockFile})
	ctx := t.Context()

	at := newPaths(t)
	cleanMounts(t, at)
	_, err := c.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: "v1", TargetPath: at.target,
		VolumeCapability: writer(), Readonly: true})
	must(t, err)
	if err := os.WriteFile(filepath.Join(at.target, "file"), nil, 0o600); err == nil {
		t.Error("a read-only publication can be written")
	}
	must(t, c.unpublish(ctx, "v1", at))

	at = newPaths(t)
	cleanMounts(t, at)
	must(t, c.publishBlock("v2", at.target))
	if st, err := os.Stat(at.target); err != nil || !st.Mode().IsRegular() || st.Size() != 1<<20 {
		t.Errorf("the block target is %v, %v", st, err)
	}
	must(t, c.unpublish(ctx, "v2", at))
}
