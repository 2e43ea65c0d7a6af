package csi

import (
	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/registry"
)

// modes maps access modes to CSI's numbers.
var modes = map[registry.AccessMode]csi.VolumeCapability_AccessMode_Mode{
	registry.SingleNodeWriter:       csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
	registry.SingleNodeReaderOnly:   csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
	registry.MultiNodeReaderOnly:    csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY,
	registry.MultiNodeSingleWriter:  csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER,
	registry.MultiNodeMultiWriter:   csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
	registry.SingleNodeSingleWriter: csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
	registry.SingleNodeMultiWriter:  csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
}

func volumeCapability(c registry.VolumeCapability, fs string, flags registry.Flags) *csi.VolumeCapability {
	out := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: modes[c.Access]}}
	if c.Attachment == registry.BlockDevice {
		out.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		return out
	}
	mount := &csi.VolumeCapability_MountVolume{FsType: fs, MountFlags: flags.List()}
	out.AccessType = &csi.VolumeCapability_Mount{Mount: mount}
	return out
}

// usageCapability returns the capability of a usage, with its mount group.
func usageCapability(u registry.Usage) *csi.VolumeCapability {
	out := volumeCapability(registry.VolumeCapability{Access: u.Access, Attachment: u.Attachment}, u.FSType,
		u.MountFlags)
	if mount := out.GetMount(); mount != nil {
		mount.VolumeMountGroup = u.MountGroup
	}
	return out
}

// maybeCapability returns the capability of a usage, or nil if there is none.
func maybeCapability(u registry.Usage) *csi.VolumeCapability {
	if u == (registry.Usage{}) {
		return nil
	}
	return usageCapability(u)
}

func capacityRange(r registry.CapacityRange) *csi.CapacityRange {
	return &csi.CapacityRange{RequiredBytes: r.Required, LimitBytes: r.Limit}
}

func capabilities(list []registry.VolumeCapability, fs string, flags registry.Flags) (out []*csi.VolumeCapability) {
	for _, c := range list {
		out = append(out, volumeCapability(c, fs, flags))
	}
	return out
}

// confirmed returns the capabilities in a plugin's list. It leaves out entries that are neither file system nor block
// device, and those with an access mode that this build does not know.
func confirmed(list []*csi.VolumeCapability) (out []registry.VolumeCapability) {
	for _, c := range list {
		one := registry.VolumeCapability{Attachment: attachment(c)}
		for mode, number := range modes {
			if c.GetAccessMode().GetMode() == number {
				one.Access = mode
			}
		}
		if one.Access != "" && one.Attachment != "" {
			out = append(out, one)
		}
	}
	return out
}

func attachment(c *csi.VolumeCapability) registry.AttachmentMode {
	switch {
	case c.GetBlock() != nil:
		return registry.BlockDevice
	case c.GetMount() != nil:
		return registry.FileSystem
	}
	return ""
}

func topologies(list []registry.Topology) (out []*csi.Topology) {
	for _, t := range list {
		out = append(out, &csi.Topology{Segments: t})
	}
	return out
}

// reveal returns the secrets as the plugin gets them.
func reveal(secrets map[string]registry.SecretValue) map[string]string {
	if len(secrets) == 0 {
		return nil
	}
	out := make(map[string]string, len(secrets))
	for name, v := range secrets {
		out[name] = v.Reveal()
	}
	return out
}
