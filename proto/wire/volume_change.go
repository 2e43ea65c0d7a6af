package wire

import (
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

func FieldChangeProto(c registry.FieldChange) *pb.FieldChange {
	return &pb.FieldChange{Field: c.Field, From: text(c.From), To: text(c.To), Problem: text(c.Problem)}
}

func FieldChange(m *pb.FieldChange) registry.FieldChange {
	return registry.FieldChange{Field: m.GetField(), From: m.GetFrom(), To: m.GetTo(), Problem: m.GetProblem()}
}

func PluginVolumeProto(v registry.PluginVolume) *pb.PluginVolume {
	out := &pb.PluginVolume{PluginId: string(v.Plugin), ExternalId: string(v.External), Capacity: v.Capacity,
		Accessible: each(v.Accessible, topologyProto),
		NodeIds:    each(v.Nodes, func(id registry.NodeID) string { return text(string(id)) })}
	if v.Condition != nil {
		out.Condition = &pb.VolumeCondition{Abnormal: v.Condition.Abnormal, Reason: text(v.Condition.Reason),
			Message: text(v.Condition.Message)}
	}
	if v.Name != (registry.VolumeName{}) {
		out.Name = VolumeNameProto(v.Name)
	}
	return out
}

func PluginVolume(m *pb.PluginVolume) registry.PluginVolume {
	out := registry.PluginVolume{Plugin: registry.PluginID(m.GetPluginId()),
		External: registry.ExternalID(m.GetExternalId()), Capacity: m.GetCapacity(),
		Accessible: each(m.GetAccessible(), topology),
		Nodes:      each(m.GetNodeIds(), func(id string) registry.NodeID { return registry.NodeID(id) }),
	}
	if m.GetCondition() != nil {
		c := condition(m.GetCondition())
		out.Condition = &c
	}
	if m.GetName() != nil {
		out.Name = VolumeName(m.GetName())
	}
	return out
}
