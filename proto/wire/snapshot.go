package wire

import (
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

func SnapshotNameProto(n registry.SnapshotName) *pb.SnapshotName {
	return &pb.SnapshotName{Namespace: string(n.Namespace), Id: string(n.ID)}
}

func SnapshotName(m *pb.SnapshotName) registry.SnapshotName {
	return registry.SnapshotName{Namespace: registry.Namespace(m.GetNamespace()), ID: registry.SnapshotID(m.GetId())}
}

func SnapshotSpecProto(s registry.SnapshotSpec) *pb.SnapshotSpec {
	return &pb.SnapshotSpec{
		Name: SnapshotNameProto(s.SnapshotName()), CsiName: s.Name, VolumeId: string(s.Volume),
		Parameters: s.Parameters,
		Secrets:    mapped(s.Secrets, secretProto), VolumeIds: strs(s.Volumes),
	}
}

func SnapshotSpec(m *pb.SnapshotSpec) registry.SnapshotSpec {
	n := SnapshotName(m.GetName())
	return registry.SnapshotSpec{
		Namespace: n.Namespace, ID: n.ID, Name: m.GetCsiName(), Volume: registry.VolumeID(m.GetVolumeId()),
		Parameters: m.GetParameters(), Secrets: mapped(m.GetSecrets(), secret),
		Volumes: words[registry.VolumeID](m.GetVolumeIds()),
	}
}

func SnapshotProto(s registry.VolumeSnapshot) *pb.VolumeSnapshot {
	var members []*pb.GroupMember
	for _, m := range s.Members {
		members = append(members, &pb.GroupMember{VolumeId: string(m.Volume), SourceVolumeId: string(m.Source),
			ExternalId: string(m.External), SizeBytes: m.Size, CreationTime: stamp(m.Taken), ReadyToUse: m.Ready})
	}
	return &pb.VolumeSnapshot{
		Spec: SnapshotSpecProto(s.Masked().SnapshotSpec), PluginId: string(s.Plugin), SourceVolumeId: string(s.Source),
		State: string(s.State), ExternalId: string(s.External), SizeBytes: s.Size, CreationTime: stamp(s.Taken),
		GroupSnapshotId: string(s.Group), Failure: failureProto(s.Failure), CreateIndex: uint64(s.CreateIndex),
		ModifyIndex: uint64(s.ModifyIndex), Since: stamp(s.Since), Members: members,
	}
}

func Snapshot(m *pb.VolumeSnapshot) registry.VolumeSnapshot {
	var members []registry.GroupMember
	for _, one := range m.GetMembers() {
		members = append(members, registry.GroupMember{Volume: registry.VolumeID(one.GetVolumeId()),
			Source: registry.ExternalID(one.GetSourceVolumeId()), External: registry.ExternalID(one.GetExternalId()),
			Size: one.GetSizeBytes(), Taken: timeOf(one.GetCreationTime()), Ready: one.GetReadyToUse()})
	}
	return registry.VolumeSnapshot{
		SnapshotSpec: SnapshotSpec(m.GetSpec()), Plugin: registry.PluginID(m.GetPluginId()),
		Source: registry.ExternalID(m.GetSourceVolumeId()), State: registry.SnapshotState(m.GetState()),
		External: registry.ExternalID(m.GetExternalId()), Size: m.GetSizeBytes(), Taken: timeOf(m.GetCreationTime()),
		Group: registry.ExternalID(m.GetGroupSnapshotId()), Failure: failure(m.GetFailure()),
		CreateIndex: registry.Seq(m.GetCreateIndex()), ModifyIndex: registry.Seq(m.GetModifyIndex()),
		Since: timeOf(m.GetSince()), Members: members,
	}
}

func secretProto(s registry.Secret) *pb.Secret {
	return &pb.Secret{Env: s.Env, File: s.File, Callback: s.Callback, Literal: s.Literal.Reveal()}
}

func secret(m *pb.Secret) registry.Secret {
	return registry.Secret{Env: m.GetEnv(), File: m.GetFile(), Callback: m.GetCallback(),
		Literal: registry.SecretValue(m.GetLiteral())}
}
