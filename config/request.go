package config

import (
	"maps"
	"slices"
	"strings"

	"github.com/hashicorp/hcl/v2"

	"holdfast/hooks"
	"holdfast/registry"
)

// requests are the volume blocks of a group.
type requests struct {
	ours    []hooks.VolumeRequest
	carried []block              // volumes of other types
	at      map[string]hcl.Range // where each is declared, ours or not
	other   map[string]bool      // names of those that are carried
}

func newRequests() *requests { return &requests{at: map[string]hcl.Range{}, other: map[string]bool{}} }

func (r *requests) names() []string { return slices.Sorted(maps.Keys(r.at)) }

func (f *file) requests(group *fields, count int, job jobFacts) *requests {
	asked := newRequests()
	for _, b := range group.all("volume") {
		name, ok := f.label(b, func(s string) (registry.TaskName, error) {
			n, err := registry.ParseRequestName(s)
			return registry.TaskName(n), err
		})
		if !ok {
			continue
		}
		if _, exists := asked.at[string(name)]; exists {
			f.errorf(b.head, "give each volume a name of its own", "the group has two volumes named %q", name)
			continue
		}
		asked.at[string(name)] = b.head
		if f.request(asked, b, count, job) {
			asked.carried = append(asked.carried, b)
			asked.other[string(name)] = true
		}
	}
	return asked
}

var volumeShape = shape{
	attrs:  []string{"type", "source", "read_only", "access_mode", "attachment_mode", "per_alloc", "sticky"},
	blocks: []string{"mount_options"},
}

// request reads one volume block. True: it is not ours.
func (f *file) request(asked *requests, b block, count int, job jobFacts) bool {
	kind := &fields{decoder: f.decoder, block: b}
	kind.need("type")
	switch kind := oneOf(kind, "type", []string{"csi", "host"}); kind {
	case "host":
		return true
	case "":
		return false
	}
	at := f.open(b, volumeShape)
	at.need("source", "access_mode", "attachment_mode")
	v := hooks.VolumeRequest{Name: registry.RequestName(b.labels[0]), Type: "csi"}
	v.Source = string(parsed(at, "source", registry.ParseVolumeID))
	v.Usage.Access = oneOf(at, "access_mode", registry.AccessModes)
	v.Usage.Attachment = oneOf(at, "attachment_mode", attachmentModes)
	v.Usage.ReadOnly, _ = at.truth("read_only")
	v.PerAlloc, _ = at.truth("per_alloc")
	if options, ok := at.one("mount_options"); ok {
		v.Usage.FSType, v.Usage.MountFlags = f.mountOptions(options)
		if v.Usage.Attachment == registry.BlockDevice {
			f.errorf(options.head, "remove it", "a block device has no mount options")
		}
	}
	f.checkSharing(at, v, count, job)
	asked.ours = append(asked.ours, v)
	return false
}

var attachmentModes = []registry.AttachmentMode{registry.FileSystem, registry.BlockDevice}

// mountOptions reads a mount_options block, of a job or of a volume file.
func (d *decoder) mountOptions(b block) (string, registry.Flags) {
	at := d.open(b, shape{attrs: []string{"fs_type", "mount_flags"}})
	fs, _ := at.text("fs_type")
	if len(fs) > 128 || strings.ContainsFunc(fs, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		d.errorf(at.at("fs_type"), `use the name of a file system, as in "ext4"`, "fs_type %q is not a name", fs)
	}
	return fs, at.flags("mount_flags")
}

// checkSharing refuses what could never work: more users than the mode allows.
func (f *file) checkSharing(at *fields, v hooks.VolumeRequest, count int, job jobFacts) {
	sticky, _ := at.truth("sticky")
	switch mode := v.Usage.Access; {
	case sticky:
		f.errorf(at.at("sticky"), "remove it", "sticky is for host volumes")
	case v.PerAlloc && perNode(job.kind):
		f.errorf(at.at("per_alloc"), "remove it, or use a job of type service", "per_alloc is not possible in a job of type %s", job.kind)
	case v.PerAlloc && job.canary:
		f.errorf(at.at("per_alloc"), "remove canary from the update block", "per_alloc is not possible with canaries: the old and the new alloc would want one volume")
	case mode.ReaderOnly() && !v.Usage.ReadOnly:
		f.errorf(at.at("access_mode"), "add read_only = true", "the access mode %s never allows a write", mode)
	case count > 1 && !v.PerAlloc && singleNode(mode):
		f.errorf(at.at("access_mode"), "use per_alloc = true, a multi-node access mode, or count = 1", "with the access mode %s %d allocs cannot share a volume", mode, count)
	case count > 1 && !v.PerAlloc && mode == registry.MultiNodeSingleWriter && !v.Usage.ReadOnly:
		f.errorf(at.at("access_mode"), "use read_only = true, per_alloc = true, or count = 1", "with the access mode %s only one of %d allocs could write", mode, count)
	}
}

func singleNode(mode registry.AccessMode) bool {
	switch mode {
	case registry.SingleNodeWriter, registry.SingleNodeReaderOnly, registry.SingleNodeSingleWriter, registry.SingleNodeMultiWriter:
		return true
	}
	return false
}
