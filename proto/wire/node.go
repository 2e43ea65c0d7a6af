package wire

import (
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

func NodeProto(n registry.NodeStatus) *pb.Node {
	return &pb.Node{
		Name: string(n.Name), Version: n.Version, State: string(n.State), Reason: text(n.Reason), By: n.By,
		Epoch: n.Epoch,
		Since: stamp(n.Since), Alive: n.Alive, AliveSince: stamp(n.AliveSince), SuspectSince: stamp(n.SuspectSince),
		Deadline: stamp(n.Deadline), Drain: drainProto(n.Drain), Stale: text(n.Stale), Unformed: n.Unformed,
		CreateIndex: uint64(n.CreateIndex), ModifyIndex: uint64(n.ModifyIndex),
		Plugins: each(n.Plugins, func(p registry.NodePluginStatus) *pb.NodePlugin {
			return &pb.NodePlugin{Plugin: string(p.Plugin), NodeHealth: string(p.Health(registry.RoleNode)),
				ControllerHealth: string(p.Health(registry.RoleController)), NodeId: string(p.NodeID),
				Topology: topologyProto(p.Topology), MaxVolumes: p.MaxVolumes, Capabilities: strs(p.Capabilities),
				Executor: p.Executor, Local: p.Local, Claims: uint32(p.Claims), Attachments: uint32(p.Attachments)}
		}),
	}
}

func drainProto(d registry.Drain) *pb.Drain {
	if d.By == "" {
		return nil
	}
	return &pb.Drain{By: d.By, Reason: text(d.Reason), Deadline: stamp(d.Deadline)}
}

func Node(m *pb.Node) registry.NodeStatus {
	is := func(health string, state registry.HealthState) bool { return health == string(state) }
	return registry.NodeStatus{
		Node: registry.Node{Name: registry.NodeName(m.GetName()), Version: m.GetVersion(),
			State: registry.NodeState(m.GetState()), Reason: m.GetReason(), By: m.GetBy(), Epoch: m.GetEpoch(),
			Since: timeOf(m.GetSince()), Deadline: timeOf(m.GetDeadline()),
			Drain: registry.Drain{By: m.GetDrain().GetBy(), Reason: m.GetDrain().GetReason(),
				Deadline: timeOf(m.GetDrain().GetDeadline())},
			CreateIndex: registry.Seq(m.GetCreateIndex()), ModifyIndex: registry.Seq(m.GetModifyIndex())},
		Alive: m.GetAlive(), AliveSince: timeOf(m.GetAliveSince()), SuspectSince: timeOf(m.GetSuspectSince()),
		Stale: m.GetStale(), Unformed: m.GetUnformed(),
		Plugins: each(m.GetPlugins(), func(p *pb.NodePlugin) registry.NodePluginStatus {
			return registry.NodePluginStatus{Executor: p.GetExecutor(), Claims: int(p.GetClaims()),
				Attachments: int(p.GetAttachments()), NodePlugin: registry.NodePlugin{
					Plugin: registry.PluginID(p.GetPlugin()), Local: p.GetLocal(),
					Node:                is(p.GetNodeHealth(), registry.Healthy),
					NodeUnhealthy:       is(p.GetNodeHealth(), registry.Unhealthy),
					Controller:          is(p.GetControllerHealth(), registry.Healthy),
					ControllerUnhealthy: is(p.GetControllerHealth(), registry.Unhealthy),
					NodeID:              registry.NodeID(p.GetNodeId()), Topology: topology(p.GetTopology()),
					MaxVolumes: p.GetMaxVolumes(), Capabilities: words[registry.Capability](p.GetCapabilities()),
				}}
		}),
	}
}

func NodeFeasibleProto(n registry.NodeFeasible) *pb.NodeFeasible {
	return &pb.NodeFeasible{Node: string(n.Node), Reasons: each(n.Reasons, InfeasibleProto)}
}

func NodeFeasible(m *pb.NodeFeasible) registry.NodeFeasible {
	return registry.NodeFeasible{Node: registry.NodeName(m.GetNode()), Reasons: each(m.GetReasons(), Infeasible)}
}
