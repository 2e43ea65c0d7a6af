package csifake

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sort"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	"holdfast/internal/csifake/journal"
)

// fields fills a journal line from a request. It finds fields by their names, so that it also works for requests of a
// later version of CSI.
func fields(l *journal.Line, req proto.Message) {
	m := req.ProtoReflect()
	l.Volume = text(m, "volume_id")
	if l.Volume == "" {
		l.Volume = text(m, "source_volume_id")
	}
	l.Name, l.Node, l.Group = text(m, "name"), text(m, "node_id"), text(m, "group_snapshot_id")
	l.Snapshot = text(m, "snapshot_id") + text(m, "target_snapshot_id")
	l.Base = text(m, "base_snapshot_id")
	l.Volumes, l.Snapshots = texts(m, "source_volume_ids"), texts(m, "snapshot_ids")
	l.Staging, l.Target = text(m, "staging_target_path"), text(m, "target_path")
	l.Path = text(m, "volume_path") + text(m, "volume_publish_path")
	l.PublishContext, l.VolumeContext = contextHash(m, "publish_context"), contextHash(m, "volume_context")
	if fd := m.Descriptor().Fields().ByName("readonly"); fd != nil {
		l.ReadOnly = m.Get(fd).Bool()
	}
	l.Hash, l.SecretKeys = requestHash(req)
	l.Token, l.Over = text(m, "starting_token"), tooLong(req)
	capabilities(l, req)
	details(l, req)
}

func text(m protoreflect.Message, name protoreflect.Name) string {
	if fd := m.Descriptor().Fields().ByName(name); fd != nil && fd.Kind() == protoreflect.StringKind {
		return m.Get(fd).String()
	}
	return ""
}

func texts(m protoreflect.Message, name protoreflect.Name) (list []string) {
	fd := m.Descriptor().Fields().ByName(name)
	if fd == nil || !fd.IsList() || fd.Kind() != protoreflect.StringKind {
		return nil
	}
	for i := range m.Get(fd).List().Len() {
		list = append(list, m.Get(fd).List().Get(i).String())
	}
	return list
}

func contextHash(m protoreflect.Message, name protoreflect.Name) string {
	fd := m.Descriptor().Fields().ByName(name)
	if fd == nil || !fd.IsMap() {
		return ""
	}
	entries := map[string]string{}
	m.Get(fd).Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		entries[k.String()] = v.String()
		return true
	})
	return HashMap(entries)
}

// HashMap returns the form in which a journal has a publish_context or volume_context: a hash. It is empty for an empty
// map.
func HashMap(m map[string]string) string {
	if len(m) == 0 {
		return ""
	}
	h := sha256.New()
	for _, k := range slices.Sorted(maps.Keys(m)) {
		fmt.Fprintf(h, "%d:%s%d:%s", len(k), k, len(m[k]), m[k])
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// requestHash returns the hash of a request without the fields that are marked csi_secret, and the keys of those
// fields.
func requestHash(req proto.Message) (hash string, secretKeys []string) {
	clean := proto.Clone(req)
	m := clean.ProtoReflect()
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		options, _ := fd.Options().(*descriptorpb.FieldOptions)
		if secret, _ := proto.GetExtension(options, csi.E_CsiSecret).(bool); !secret {
			return true
		}
		if fd.IsMap() {
			v.Map().Range(func(k protoreflect.MapKey, _ protoreflect.Value) bool {
				secretKeys = append(secretKeys, k.String())
				return true
			})
		}
		m.Clear(fd)
		return true
	})
	sort.Strings(secretKeys)
	return hashMessage(clean), secretKeys
}

func hashMessage(m proto.Message) string {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		return "unhashable"
	}
	sum := sha256.Sum256(append([]byte(m.ProtoReflect().Descriptor().FullName()+"\n"), b...))
	return hex.EncodeToString(sum[:8])
}

// usageOf summarizes a volume capability. Of mount flags it shows only the number, because they may be secret.
func usageOf(c *csi.VolumeCapability) string {
	access := "none"
	if c.GetBlock() != nil {
		access = "block"
	} else if v := c.GetMount(); v != nil {
		access = fmt.Sprintf("mount(%s,%d flags)", v.GetFsType(), len(v.GetMountFlags()))
	}
	return access + " " + c.GetAccessMode().GetMode().String()
}

// capabilities fills a line with the volume capabilities of a request.
func capabilities(l *journal.Line, req proto.Message) {
	if one, ok := req.(interface{ GetVolumeCapability() *csi.VolumeCapability }); ok &&
		one.GetVolumeCapability() != nil {
		l.Usage = usageOf(one.GetVolumeCapability())
		l.MountGroup = one.GetVolumeCapability().GetMount().GetVolumeMountGroup() != ""
	}
	if many, ok := req.(interface {
		GetVolumeCapabilities() []*csi.VolumeCapability
	}); ok {
		for _, c := range many.GetVolumeCapabilities() {
			l.Usages = append(l.Usages, usageOf(c))
			l.MountGroup = l.MountGroup || c.GetMount().GetVolumeMountGroup() != ""
		}
	}
}

// details fills a line with fields that only some requests have.
func details(l *journal.Line, req proto.Message) {
	if r, has := req.(interface{ GetMutableParameters() map[string]string }); has {
		l.Mutable = slices.Sorted(maps.Keys(r.GetMutableParameters()))
	}
	switch r := req.(type) {
	case *csi.CreateVolumeRequest:
		l.Topology = r.GetAccessibilityRequirements() != nil
		if id := r.GetVolumeContentSource().GetSnapshot().GetSnapshotId(); id != "" {
			l.Source = "snapshot " + id
		}
		if id := r.GetVolumeContentSource().GetVolume().GetVolumeId(); id != "" {
			l.Source = "volume " + id
		}
	case *csi.GetCapacityRequest:
		l.Topology = r.GetAccessibleTopology() != nil
	case *csi.ControllerExpandVolumeRequest:
		l.Bytes = r.GetCapacityRange().GetRequiredBytes()
	case *csi.NodeExpandVolumeRequest:
		l.Bytes = r.GetCapacityRange().GetRequiredBytes()
	case *csi.NodePublishVolumeRequest:
		l.Ephemeral = r.GetVolumeContext()[inline] == "true"
	}
}

// look returns the file types of the paths of a request.
func look(l journal.Line) *journal.Look {
	if l.Staging == "" && l.Target == "" {
		return nil
	}
	seen := &journal.Look{Staging: lookAt(l.Staging), Target: lookAt(l.Target)}
	if l.Target != "" {
		seen.Parent = lookAt(filepath.Dir(l.Target))
	}
	return seen
}

// lookAt never waits for a file system. If the file system hangs or is dead, the kernel returns its cached status.
func lookAt(path string) string {
	if path == "" {
		return ""
	}
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC,
		unix.STATX_TYPE, &st)
	switch {
	case errors.Is(err, unix.ENOENT):
		return "absent"
	case err != nil:
		return "error"
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return "dir"
	case unix.S_IFREG:
		return "file"
	case unix.S_IFLNK:
		return "link"
	case unix.S_IFBLK, unix.S_IFCHR:
		return "device"
	}
	return "other"
}
