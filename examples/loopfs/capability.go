package main

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/mount"
)

// modes maps the supported access modes, those of one node.
var modes = map[csi.VolumeCapability_AccessMode_Mode]mode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:   readerMode,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        writerMode,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: writerMode,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  multiWriterMode,
}

// Limits of the CSI specification in bytes: for all mount flags together, and for node IDs.
const (
	maxFlags  = 4096
	maxNodeID = 256
)

// access is a parsed volume capability.
type access struct {
	usage usage
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
		return access{usage: usage{Mode: mode, Block: true}}, nil
	case m == nil:
		return access{}, status.Error(codes.InvalidArgument, "the volume capability has no access type: mount or block")
	case !slices.Contains([]string{"", "ext4"}, m.GetFsType()):
		return access{}, status.Errorf(codes.InvalidArgument, "file system %.16q is not supported, only ext4", m.GetFsType())
	case len(strings.Join(m.GetMountFlags(), ",")) > maxFlags:
		return access{}, status.Errorf(codes.InvalidArgument, "the mount flags have more than %d bytes", maxFlags)
	}
	gid, err := strconv.ParseUint(cmp.Or(m.GetVolumeMountGroup(), "0"), 10, 31)
	if err != nil {
		return access{}, status.Errorf(codes.InvalidArgument, "volume_mount_group %.16q is not the number of a group",
			m.GetVolumeMountGroup())
	}
	flags, err := mount.ParseFlags(m.GetMountFlags())
	return access{flags: flags, usage: usage{Mode: mode, Flags: digestOf(m.GetMountFlags()), Group: int(gid)}}, err
}

// readAll parses the capabilities of a new volume and returns a usage that serves all of them.
func readAll(list []*csi.VolumeCapability) (sum usage, err error) {
	if len(list) == 0 {
		return sum, status.Error(codes.InvalidArgument, "the volume capabilities are missing")
	}
	for i, c := range list {
		a, err := readAccess(c)
		switch {
		case err != nil:
			return sum, err
		case i > 0 && a.usage.Block != sum.Block:
			return sum, status.Error(codes.InvalidArgument, "one volume cannot have both access types, mount and block")
		case i == 0 || a.usage.Mode.includes(sum.Mode):
			sum = usage{Mode: a.usage.Mode, Block: a.usage.Block}
		}
	}
	return sum, nil
}

// checkCapability checks that the volume has a capability; nil is no capability to check.
func checkCapability(r record, c *csi.VolumeCapability) error {
	if c == nil {
		return nil
	}
	a, err := readAccess(c)
	if err == nil && !r.Usage.fits(a.usage) {
		err = status.Errorf(codes.InvalidArgument, "volume %s was created for %s, not for %s", r.ID, r.Usage, a.usage)
	}
	return err
}

// noParameters refuses parameters: loopfs has none.
func noParameters(parameters map[string]string) error {
	if len(parameters) > 0 {
		return status.Error(codes.InvalidArgument, "loopfs has no parameters; remove them")
	}
	return nil
}
