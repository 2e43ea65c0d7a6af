package csi

import (
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/registry"
)

// usageCapability returns the capability of a usage, or nil for the zero value.
func usageCapability(u registry.Usage) *csi.VolumeCapability {
	if u == (registry.Usage{}) {
		return nil
	}
	mode := csi.VolumeCapability_AccessMode_Mode_value[strings.ReplaceAll(strings.ToUpper(string(u.Access)), "-", "_")]
	out := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_Mode(mode)},
	}
	if u.Attachment == registry.BlockDevice {
		out.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		return out
	}
	out.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{
		FsType: u.FSType, MountFlags: u.MountFlags.List(), VolumeMountGroup: u.MountGroup,
	}}
	return out
}

func capacityRange(r registry.CapacityRange) *csi.CapacityRange {
	return &csi.CapacityRange{RequiredBytes: r.Required, LimitBytes: r.Limit}
}

func capabilities(list []registry.VolumeCapability, fs string, flags registry.Flags) (out []*csi.VolumeCapability) {
	for _, c := range list {
		out = append(out, usageCapability(registry.Usage{
			Access: c.Access, Attachment: c.Attachment, FSType: fs, MountFlags: flags,
		}))
	}
	return out
}

// knownCapabilities returns the capabilities in a plugin's list. It leaves out entries that are neither file system nor
// block device, and entries with an access mode that this build does not know.
func knownCapabilities(list []*csi.VolumeCapability) (out []registry.VolumeCapability) {
	for _, c := range list {
		mode := registry.AccessMode(strings.ToLower(strings.ReplaceAll(c.GetAccessMode().GetMode().String(), "_", "-")))
		switch {
		case !slices.Contains(registry.AccessModes, mode):
		case c.GetBlock() != nil:
			out = append(out, registry.VolumeCapability{Access: mode, Attachment: registry.BlockDevice})
		case c.GetMount() != nil:
			out = append(out, registry.VolumeCapability{Access: mode, Attachment: registry.FileSystem})
		}
	}
	return out
}

func topologies(list []registry.Topology) (out []*csi.Topology) {
	for _, t := range list {
		out = append(out, &csi.Topology{Segments: t})
	}
	return out
}

// reveal returns the secrets in clear text, for the request to the plugin.
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
