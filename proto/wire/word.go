package wire

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func timeOf(m *timestamppb.Timestamp) time.Time {
	if m == nil {
		return time.Time{}
	}
	return m.AsTime()
}

func strs[T ~string](list []T) []string {
	var out []string
	for _, s := range list {
		out = append(out, string(s))
	}
	return out
}

func words[T ~string](list []string) []T {
	var out []T
	for _, s := range list {
		out = append(out, T(s))
	}
	return out
}

// each returns f of each element; nil for an empty list.
func each[A, B any](list []A, f func(A) B) []B {
	var out []B
	for _, a := range list {
		out = append(out, f(a))
	}
	return out
}

func TaskKeyProto(k registry.TaskKey) *pb.TaskKey {
	return &pb.TaskKey{Alloc: string(k.Alloc), Task: string(k.Task)}
}

func TaskKey(m *pb.TaskKey) registry.TaskKey {
	return registry.TaskKey{Alloc: registry.AllocID(m.GetAlloc()), Task: registry.TaskName(m.GetTask())}
}

func InstanceKeyProto(k registry.InstanceKey) *pb.InstanceKey {
	return &pb.InstanceKey{Role: string(k.Role), Plugin: string(k.Plugin), Alloc: string(k.Alloc), Task: string(k.Task)}
}

func InstanceKey(m *pb.InstanceKey) registry.InstanceKey {
	return registry.InstanceKey{
		Role: registry.Role(m.GetRole()), Plugin: registry.PluginID(m.GetPlugin()),
		Alloc: registry.AllocID(m.GetAlloc()), Task: registry.TaskName(m.GetTask()),
	}
}

func VolumeNameProto(n registry.VolumeName) *pb.VolumeName {
	return &pb.VolumeName{Namespace: string(n.Namespace), Id: string(n.ID)}
}

func VolumeName(m *pb.VolumeName) registry.VolumeName {
	return registry.VolumeName{Namespace: registry.Namespace(m.GetNamespace()), ID: registry.VolumeID(m.GetId())}
}

// volumeKey reads the key of a volume from two fields of a message.
func volumeKey(m interface {
	GetPlugin() string
	GetExternalId() string
}) registry.VolumeKey {
	return registry.VolumeKey{
		Plugin: registry.PluginID(m.GetPlugin()), External: registry.ExternalID(m.GetExternalId()),
	}
}

func treeProto(t registry.Tree) *pb.Tree {
	if t == (registry.Tree{}) {
		return nil
	}
	return &pb.Tree{Host: t.Host, Task: t.Task}
}

func tree(m *pb.Tree) registry.Tree { return registry.Tree{Host: m.GetHost(), Task: m.GetTask()} }

func usageProto(u registry.Usage) *pb.Usage {
	return &pb.Usage{
		AccessMode: string(u.Access), AttachmentMode: string(u.Attachment), ReadOnly: u.ReadOnly, FsType: u.FSType,
		MountFlags: u.MountFlags.Masked().List(), MountGroup: u.MountGroup, Ownership: ownershipProto(u.Ownership),
	}
}

func usage(m *pb.Usage) registry.Usage {
	return registry.Usage{
		Access: registry.AccessMode(m.GetAccessMode()), Attachment: registry.AttachmentMode(m.GetAttachmentMode()),
		ReadOnly: m.GetReadOnly(), FSType: m.GetFsType(), MountFlags: registry.FlagsOf(m.GetMountFlags()),
		MountGroup: m.GetMountGroup(), Ownership: ownership(m.GetOwnership()),
	}
}

func topologyProto(t registry.Topology) *pb.Topology { return &pb.Topology{Segments: t} }
func topology(m *pb.Topology) registry.Topology      { return m.GetSegments() }

func BootTimeProto(t registry.BootTime) *pb.BootTime {
	return &pb.BootTime{BootId: t.Boot, SinceBoot: durationpb.New(t.At)}
}

func BootTime(m *pb.BootTime) registry.BootTime {
	return registry.BootTime{Boot: m.GetBootId(), At: m.GetSinceBoot().AsDuration()}
}

func DiagnosticsProto(ds registry.Diagnostics) []*pb.Diagnostic {
	return each(ds, func(d registry.Diagnostic) *pb.Diagnostic {
		return &pb.Diagnostic{
			Severity: string(d.Severity), Summary: text(d.Summary), Detail: text(d.Detail), File: text(d.File),
			Start: positionProto(d.Start), End: positionProto(d.End), Snippet: text(d.Snippet),
		}
	})
}

func Diagnostics(ms []*pb.Diagnostic) registry.Diagnostics {
	return each(ms, func(m *pb.Diagnostic) registry.Diagnostic {
		return registry.Diagnostic{
			Severity: registry.Severity(m.GetSeverity()), Summary: m.GetSummary(), Detail: m.GetDetail(),
			File: m.GetFile(), Start: position(m.GetStart()), End: position(m.GetEnd()), Snippet: m.GetSnippet(),
		}
	})
}

func positionProto(p registry.Position) *pb.Position {
	return &pb.Position{Line: int32(p.Line), Column: int32(p.Column), Byte: int32(p.Byte)}
}

func position(m *pb.Position) registry.Position {
	return registry.Position{Line: int(m.GetLine()), Column: int(m.GetColumn()), Byte: int(m.GetByte())}
}

func ownershipProto(o registry.Ownership) *pb.Ownership {
	if o == (registry.Ownership{}) {
		return nil
	}
	return &pb.Ownership{Owner: o.Owner, Group: o.Group, Mode: o.Mode, Recursive: o.Recursive}
}

func ownership(m *pb.Ownership) registry.Ownership {
	return registry.Ownership{Owner: m.GetOwner(), Group: m.GetGroup(), Mode: m.GetMode(), Recursive: m.GetRecursive()}
}

// mapped converts the values of a map; nil stays nil.
func mapped[A, B any](list map[string]A, convert func(A) B) map[string]B {
	if list == nil {
		return nil
	}
	out := make(map[string]B, len(list))
	for name, v := range list {
		out[name] = convert(v)
	}
	return out
}
