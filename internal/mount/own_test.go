package mount

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// ownedBy checks the owner, group and mode of a path, without following a link.
func ownedBy(t *testing.T, path string, uid, gid uint32, mode uint32) {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Lstat(path, &st))
	if st.Uid != uid || st.Gid != gid || st.Mode&0o7777 != mode {
		t.Errorf("%s has owner %d, group %d and mode %o; want %d, %d and %o", path, st.Uid, st.Gid, st.Mode&0o7777, uid,
			gid, mode)
	}
}

// The owner, group and mode of the root directory of an empty volume are set. Recursively, they are set for everything
// in the volume, but not for the targets of links and mounts in it.
func TestOwnershipOfAVolume(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root gives files away")
	}
	root := t.TempDir()
	volume, outside := filepath.Join(root, "volume"), filepath.Join(root, "outside")
	must(t, os.Mkdir(volume, 0o755))
	must(t, os.WriteFile(outside, nil, 0o644))
	mountTmpfs(t, volume)
	defer func() { must(t, unix.Unmount(volume, unix.MNT_DETACH)) }()
	h := newHelper()
	set := func(o Ownership) error {
		o.Root, o.Volume = root, "volume"
		return h.SetOwnership(deadline(t, time.Minute), o)
	}
	must(t, os.Mkdir(filepath.Join(volume, "lost+found"), 0o700))
	err := set(Ownership{UID: 1, GID: -1, Mode: 0o2770})
	if err != nil && strings.Contains(err.Error(), "user namespace") {
		t.Skip("a user namespace has no other user")
	}
	must(t, err)
	ownedBy(t, volume, 1, 0, 0o2770)
	ownedBy(t, filepath.Join(volume, "lost+found"), 0, 0, 0o700)

	must(t, os.MkdirAll(filepath.Join(volume, "a/b"), 0o755))
	must(t, os.WriteFile(filepath.Join(volume, "a/f"), nil, 0o640))
	must(t, os.Symlink("../../outside", filepath.Join(volume, "a/link")))
	inner := filepath.Join(volume, "a/inner")
	must(t, os.Mkdir(inner, 0o755))
	mountTmpfs(t, inner)
	must(t, os.WriteFile(filepath.Join(inner, "f"), nil, 0o644))
	bound := filepath.Join(volume, "a/bound") // a file of another file system
	must(t, os.WriteFile(bound, nil, 0o644))
	must(t, unix.Mount(outside, bound, "", unix.MS_BIND, ""))
	wantErr(t, set(Ownership{UID: 2, GID: 2, Mode: -1}), ErrNotEmpty, "")
	ownedBy(t, volume, 1, 0, 0o2770)
	must(t, set(Ownership{UID: 2, GID: 3, Mode: -1, Recursive: true}))
	ownedBy(t, volume, 2, 3, 0o2770)
	ownedBy(t, filepath.Join(volume, "a/b"), 2, 3, 0o2755)
	ownedBy(t, filepath.Join(volume, "a/f"), 2, 3, 0o640)
	ownedBy(t, filepath.Join(volume, "a/link"), 2, 3, 0o777)
	ownedBy(t, filepath.Join(inner, "f"), 0, 0, 0o644)
	ownedBy(t, outside, 0, 0, 0o644)

	must(t, unix.Mount("", volume, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	wantErr(t, set(Ownership{UID: 4, GID: 4, Mode: -1, Recursive: true}), unix.EROFS, "")
}
