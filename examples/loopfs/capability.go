package main

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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

// Limits of the CSI specification in bytes: for a map, for all mount flags together, and for node IDs.
const (
	maxMap    = 4096
	maxNodeID = 256
)

// access is a parsed volume capability.
type access struct {
	usage disk.Usage
	flags mount.Flags
}

// readAccess parses a volume capability.
func readAccess(c *csi.VolumeCapability) (access, error) {
	mode, ok := modes[c.GetAccessMode().GetMode()]
	m := c.GetMount()
	switch {
	case c == nil:
		return access{}, status.Error(codes.InvalidArgument, "the volume capability is missing")
	case !ok:
		return access{}, status.Errorf(codes.InvalidArgument, "access mode %s is not supported: loopfs volumes are used on "+
			"one node", c.GetAccessMode().GetMode())
	case c.GetBlock() != nil:
		return access{usage: disk.Usage{Mode: mode, Access: disk.Raw}}, nil
	case m == nil:
		return access{}, status.Error(codes.InvalidArgument, "the volume capability has no access type: mount or block")
	case m.GetFsType() != "" && !slices.Contains(disk.FileSystems(), m.GetFsType()):
		return access{}, status.Errorf(codes.InvalidArgument, "file system %.16q is not supported, only %q", m.GetFsType(),
			disk.FileSystems())
	case len(strings.Join(m.GetMountFlags(), ",")) > maxMap:
		return access{}, status.Errorf(codes.InvalidArgument, "the mount flags have more than %d bytes", maxMap)
	}
	gid, err := strconv.ParseUint(cmp.Or(m.GetVolumeMountGroup(), "0"), 10, 31)
	if err != nil {
		return access{}, status.Errorf(codes.InvalidArgument, "volume_mount_group %.16q is not the number of a group",
			m.GetVolumeMountGroup())
	}
	flags, err := mount.ParseFlags(m.GetMountFlags())
	if mode == disk.Reader {
		flags = flags.ReadOnly()
	}
	return access{flags: flags, usage: disk.Usage{
		Mode: mode, FileSystem: m.GetFsType(), Flags: disk.Digest(m.GetMountFlags()), Group: int(gid),
	}}, err
}

// readAll parses the capabilities of a new volume and returns a usage that serves all of them.
func readAll(list []*csi.VolumeCapability) (sum disk.Usage, err error) {
	if len(list) == 0 {
		return sum, status.Error(codes.InvalidArgument, "the volume capabilities are missing")
	}
	for i, c := range list {
		a, err := readAccess(c)
		if err != nil {
			return sum, err
		}
		u := a.usage
		if i == 0 {
			sum.Mode, sum.Access = u.Mode, u.Access
		}
		if sum.FileSystem != "" && u.FileSystem != "" && sum.FileSystem != u.FileSystem {
			return sum, status.Errorf(codes.InvalidArgument, "one volume cannot be both %s and %s", sum.FileSystem,
				u.FileSystem)
		}
		if u.Mode.Includes(sum.Mode) {
			sum.Mode = u.Mode
		}
		if sum.Access != u.Access {
			sum.Access = disk.Either
		}
		sum.FileSystem = cmp.Or(sum.FileSystem, u.FileSystem)
	}
	return sum, nil
}

// checkCapability checks that the volume has a capability; nil is no capability to check.
func checkCapability(r disk.Record, c *csi.VolumeCapability) error {
	if c == nil {
		return nil
	}
	a, err := readAccess(c)
	if err == nil && !r.Usage.Fits(a.usage) {
		err = status.Errorf(codes.InvalidArgument, "volume %s was created for %s, not for %s", r.ID, r.Usage, a.usage)
	}
	return err
}

// mapDigest returns a digest of a map that is not larger than the specification allows.
func mapDigest(what string, m map[string]string) (string, error) {
	bytes := 0
	for key, value := range m {
		bytes += len(key) + len(value)
	}
	if bytes > maxMap {
		return "", status.Errorf(codes.InvalidArgument, "the %s have %d bytes, at most %d are allowed", what, bytes, maxMap)
	}
	return disk.Digest(m), nil
}
