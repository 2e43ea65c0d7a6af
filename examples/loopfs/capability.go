package main

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
)

// modes maps the supported access modes, those of one node.
var modes = map[csi.VolumeCapability_AccessMode_Mode]disk.Mode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:   disk.Reader,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        disk.Writer,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: disk.Writer,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  disk.MultiWriter,
}

// maxMap is the limit of the CSI specification for maps and for all mount flags together, in bytes.
const maxMap = 4096

// access is a parsed volume capability.
type access struct {
	usage disk.Usage
	flags mount.Flags
}

// readAccess parses a volume capability. The error for one that loopfs does not support is disk.ErrInvalid.
func readAccess(c *csi.VolumeCapability) (access, error) {
	if c == nil {
		return access{}, disk.Errorf(disk.ErrInvalid, "the volume capability is missing")
	}
	mode, ok := modes[c.GetAccessMode().GetMode()]
	if !ok {
		return access{}, disk.Errorf(disk.ErrInvalid,
			"access mode %s is not supported: loopfs volumes are used on one node",
			c.GetAccessMode().GetMode())
	}
	switch {
	case c.GetBlock() != nil:
		return access{usage: disk.Usage{Mode: mode, Access: disk.Raw}}, nil
	case c.GetMount() == nil:
		return access{}, disk.Errorf(disk.ErrInvalid,
			"the volume capability has no access type: mount or block")
	}
	return readMount(mode, c.GetMount())
}

func readMount(mode disk.Mode, m *csi.VolumeCapability_MountVolume) (access, error) {
	fs := m.GetFsType()
	if fs != "" && !slices.Contains(disk.FileSystems(), fs) {
		return access{}, disk.Errorf(disk.ErrInvalid, "file system %.16q is not supported, only %q", fs,
			disk.FileSystems())
	}
	group := m.GetVolumeMountGroup()
	if gid, err := strconv.ParseUint(cmp.Or(group, "0"), 10, 31); err != nil || group != "" &&
		strconv.FormatUint(gid, 10) != group {
		return access{}, disk.Errorf(disk.ErrInvalid, "volume_mount_group %.16q is not the number of a group", group)
	}
	list := m.GetMountFlags()
	if n := len(strings.Join(list, ",")); n > maxMap {
		return access{}, disk.Errorf(disk.ErrInvalid, "the mount flags have %d bytes, at most %d are allowed", n,
			maxMap)
	}
	flags, err := mount.ParseFlags(list)
	if err != nil {
		return access{}, disk.Errorf(disk.ErrInvalid, "%w", err)
	}
	if mode == disk.Reader {
		flags = flags.ReadOnly()
	}
	return access{usage: disk.Usage{Mode: mode, FileSystem: fs, Flags: flagsDigest(list), Group: group}, flags: flags},
		nil
}

func flagsDigest(list []string) string {
	if len(list) == 0 {
		return ""
	}
	sum := sha256.Sum256([]byte(strings.Join(list, ",")))
	return hex.EncodeToString(sum[:16])
}

// readAll parses the capabilities of a new volume and returns a usage that serves all of them.
func readAll(list []*csi.VolumeCapability) (disk.Usage, error) {
	if len(list) == 0 {
		return disk.Usage{}, disk.Errorf(disk.ErrInvalid, "the volume capabilities are missing")
	}
	var sum disk.Usage
	for i, c := range list {
		a, err := readAccess(c)
		if err != nil {
			return disk.Usage{}, err
		}
		if i == 0 {
			sum.Mode, sum.Access = a.usage.Mode, a.usage.Access
		}
		if sum, err = widen(sum, a.usage); err != nil {
			return disk.Usage{}, err
		}
	}
	return sum, nil
}

// widen returns a usage that serves both.
func widen(sum, u disk.Usage) (disk.Usage, error) {
	if sum.FileSystem != "" && u.FileSystem != "" && sum.FileSystem != u.FileSystem {
		return sum, disk.Errorf(disk.ErrInvalid, "one volume cannot be both %s and %s", sum.FileSystem, u.FileSystem)
	}
	if u.Mode.Includes(sum.Mode) {
		sum.Mode = u.Mode
	}
	if sum.Access != u.Access {
		sum.Access = disk.Either
	}
	sum.FileSystem = cmp.Or(sum.FileSystem, u.FileSystem)
	return sum, nil
}
