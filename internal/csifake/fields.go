package csifake

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sort"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"

	"holdfast/internal/csifake/journal"
)

// fields fills a journal line with what a request says. It goes by the names of fields, so that a request of a later
// version of CSI is told as well.
func fields(l *journal.Line, req proto.Message) {
	m := req.ProtoReflect()
	l.Volume = text(m, "volume_id")
	if l.Volume == "" {
		l.Volume = text(m, "source_volume_id")
	}
	l.Name, l.Snapshot, l.Node = text(m, "name"), text(m, "snapshot_id"), text(m, "node_id")
	l.Staging, l.Target = text(m, "staging_target_path"), text(m, "target_path")
	l.Path = text(m, "volume_path") + text(m, "volume_publish_path")
	l.PublishContext, l.VolumeContext = contextHash(m, "publish_context"), contextHash(m, "volume_context")
	if fd := m.Descriptor().Fields().ByName("readonly"); fd != nil {
		l.ReadOnly = m.Get(fd).Bool()
	}
	l.Hash, l.SecretKeys = requestHash(req)
	l.Usage = usageOf(m)
}

func text(m protoreflect.Message, name protoreflect.Name) string {
	if fd := m.Descriptor().Fields().ByName(name); fd != nil && fd.Kind() == protoreflect.StringKind {
		return m.Get(fd).String()
	}
	return ""
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

// HashMap is how a journal tells of a publish_context or volume_context: a hash, empty for an empty map.
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

// requestHash is the hash of a request without what is marked csi_secret, and the keys of that.
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

// usageOf sums up the volume capability of a request. Mount flags may be secret: they are counted, not told.
func usageOf(m protoreflect.Message) string {
	fd := m.Descriptor().Fields().ByName("volume_capability")
	if fd == nil || !m.Has(fd) {
		return ""
	}
	c, ok := m.Get(fd).Message().Interface().(*csi.VolumeCapability)
	if !ok {
		return ""
	}
	access := "none"
	if c.GetBlock() != nil {
		access = "block"
	} else if v := c.GetMount(); v != nil {
		access = fmt.Sprintf("mount(%s,%d flags)", v.GetFsType(), len(v.GetMountFlags()))
	}
	return access + " " + c.GetAccessMode().GetMode().String()
}

// answered is what a reply tells, as it was sent.
func (p *Plugin) answered(rpc string, reply proto.Message) *journal.Answer {
	switch r := reply.(type) {
	case *csi.GetPluginCapabilitiesResponse:
		return &journal.Answer{Caps: serviceNames(r)}
	case *csi.ControllerGetCapabilitiesResponse:
		return &journal.Answer{Caps: names(r.GetCapabilities(), func(c *csi.ControllerServiceCapability) fmt.Stringer {
			return c.GetRpc().GetType()
		})}
	case *csi.GroupControllerGetCapabilitiesResponse:
		return &journal.Answer{Caps: names(r.GetCapabilities(), func(c *csi.GroupControllerServiceCapability) fmt.Stringer {
			return c.GetRpc().GetType()
		})}
	case *csi.NodeGetCapabilitiesResponse:
		return &journal.Answer{Caps: names(r.GetCapabilities(), func(c *csi.NodeServiceCapability) fmt.Stringer {
			return c.GetRpc().GetType()
		})}
	case *csi.NodeGetInfoResponse:
		return &journal.Answer{Node: r.GetNodeId()}
	case *csi.CreateVolumeResponse:
		return &journal.Answer{Volume: r.GetVolume().GetVolumeId(), VolumeContext: HashMap(r.GetVolume().GetVolumeContext())}
	case *csi.ControllerPublishVolumeResponse:
		return &journal.Answer{PublishContext: HashMap(r.GetPublishContext())}
	case *csi.ControllerExpandVolumeResponse:
		return &journal.Answer{NodeExpand: r.GetNodeExpansionRequired()}
	case *csi.ProbeResponse:
		if r.GetReady() != nil {
			ready := r.GetReady().GetValue()
			return &journal.Answer{Ready: &ready}
		}
	}
	return nil
}

func serviceNames(r *csi.GetPluginCapabilitiesResponse) []string {
	var all []string
	for _, c := range r.GetCapabilities() {
		if s := c.GetService(); s != nil {
			all = append(all, s.GetType().String())
		}
	}
	return all
}

func names[T any](list []T, of func(T) fmt.Stringer) []string {
	var all []string
	for _, c := range list {
		all = append(all, of(c).String())
	}
	return all
}

// look is what lstat says of the paths of a request.
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

func lookAt(path string) string {
	if path == "" {
		return ""
	}
	st, err := os.Lstat(path)
	switch {
	case os.IsNotExist(err):
		return "absent"
	case err != nil:
		return "error"
	case st.IsDir():
		return "dir"
	case st.Mode().IsRegular():
		return "file"
	case st.Mode()&os.ModeSymlink != 0:
		return "link"
	case st.Mode()&os.ModeDevice != 0:
		return "device"
	}
	return "other"
}
