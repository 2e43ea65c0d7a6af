package main

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
)

// modes are the access modes that a volume of one machine can have.
var modes = map[csi.VolumeCapability_AccessMode_Mode]disk.Mode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:   disk.Reader,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        disk.Writer,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: disk.Writer,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  disk.MultiWriter,
}

// maxMap is the limit of the CSI specification for maps and for mount flags as a whole, in bytes.
const maxMap = 4096

// access is a volume capability as loopfs understands it.
type access struct {
	usage disk.Usage
	flags mount.Flags
}

// readAccess takes a capability from a caller; what loopfs cannot do is disk.ErrInvalid, with the reason.
func readAccess(c *csi.VolumeCapability) (access, error) {
	if c == nil {
		return access{}, disk.Errorf(disk.ErrInvalid, "the volume capability is missing")
	}
	if c.GetBlock() != nil {
		return access{}, disk.Errorf(disk.ErrInvalid, "raw block volumes are not supported yet: ask for access type mount")
	}
	m := c.GetMount()
	if m == nil {
		return access{}, disk.Errorf(disk.ErrInvalid, "the volume capability has no access type: ask for mount")
	}
	mode, ok := modes[c.GetAccessMode().GetMode()]
	if !ok {
		return access{}, disk.Errorf(disk.ErrInvalid, "access mode %s is not supported: loopfs volumes belong to one node",
			c.GetAccessMode().GetMode())
	}
	if fs := m.GetFsType(); fs != "" && fs != "ext4" {
		return access{}, disk.Errorf(disk.ErrInvalid, "file system %.16q is not supported: loopfs makes ext4", fs)
	}
	if m.GetVolumeMountGroup() != "" {
		return access{}, disk.Errorf(disk.ErrInvalid, "volume_mount_group is not supported")
	}
	return readFlags(mode, m.GetMountFlags())
}

func readFlags(mode disk.Mode, list []string) (access, error) {
	if n := len(strings.Join(list, ",")); n > maxMap {
		return access{}, disk.Errorf(disk.ErrInvalid, "the mount flags have %d bytes, at most %d are allowed", n, maxMap)
	}
	flags, err := mount.ParseFlags(list)
	if err != nil {
		return access{}, disk.Errorf(disk.ErrInvalid, "%w", err)
	}
	if mode == disk.Reader {
		flags = flags.ReadOnly()
	}
	return access{usage: disk.Usage{Mode: mode, FileSystem: "ext4", Flags: flagsDigest(list)}, flags: flags}, nil
}

func flagsDigest(list []string) string {
	if len(list) == 0 {
		return ""
	}
	sum := sha256.Sum256([]byte(strings.Join(list, ",")))
	return hex.EncodeToString(sum[:16])
}

// readAll takes the capabilities that a volume shall have, and sums them up as the widest of them.
func readAll(list []*csi.VolumeCapability) (disk.Usage, error) {
	if len(list) == 0 {
		return disk.Usage{}, disk.Errorf(disk.ErrInvalid, "the volume capabilities are missing")
	}
	sum := disk.Usage{Mode: disk.Reader, FileSystem: "ext4"}
	for _, c := range list {
		a, err := readAccess(c)
		if err != nil {
			return disk.Usage{}, err
		}
		if a.usage.Mode.Includes(sum.Mode) {
			sum.Mode = a.usage.Mode
		}
	}
	return sum, nil
}

// fits says whether a volume or stage made for one usage serves another that is asked for.
func fits(have, asked disk.Usage) bool {
	return have.Mode.Includes(asked.Mode) && have.FileSystem == asked.FileSystem
}
