package wire

import (
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

func InstanceProto(i registry.Instance) *pb.Instance {
	f := i.Fingerprint
	return &pb.Instance{
		Key: InstanceKeyProto(i.InstanceKey), Attempt: i.Attempt,
		Endpoint: &pb.Tree{Host: i.Endpoint.Host, Task: i.Endpoint.Task}, Volumes: treeProto(i.Volumes),
		Fingerprint: &pb.Fingerprint{
			Provider: f.Provider, Version: f.Version, NodeId: string(f.NodeID), MaxVolumes: f.MaxVolumes,
			Topology: topologyProto(f.Topology), Capabilities: strs(f.Capabilities),
		},
		Health: &pb.Health{
			State: string(i.Health.State), Cause: string(i.Health.Cause), Detail: text(i.Health.Detail),
			Since: stamp(i.Health.Since),
		},
		Storage: conditionProto(i.Storage), Options: i.Options, CreateIndex: uint64(i.CreateIndex),
		ModifyIndex: uint64(i.ModifyIndex), Preferred: uint64(i.Preferred), Since: stamp(i.Since),
	}
}

func Instance(m *pb.Instance) registry.Instance {
	f, h := m.GetFingerprint(), m.GetHealth()
	return registry.Instance{
		InstanceKey: InstanceKey(m.GetKey()), Attempt: m.GetAttempt(),
		Endpoint: registry.Endpoint{Host: m.GetEndpoint().GetHost(), Task: m.GetEndpoint().GetTask()},
		Volumes:  tree(m.GetVolumes()),
		Fingerprint: registry.Fingerprint{
			Provider: f.GetProvider(), Version: f.GetVersion(), NodeID: registry.NodeID(f.GetNodeId()),
			MaxVolumes: f.GetMaxVolumes(),
			Topology:   topology(f.GetTopology()), Capabilities: words[registry.Capability](f.GetCapabilities()),
		},
		Health: registry.Health{
			State: registry.HealthState(h.GetState()), Cause: registry.Cause(h.GetCause()), Detail: h.GetDetail(),
			Since: timeOf(h.GetSince()),
		},
		Storage: condition(m.GetStorage()), Options: m.GetOptions(), CreateIndex: registry.Seq(m.GetCreateIndex()),
		ModifyIndex: registry.Seq(m.GetModifyIndex()), Preferred: registry.Seq(m.GetPreferred()),
		Since: timeOf(m.GetSince()),
	}
}

func PluginTaskProto(t registry.PluginTask) *pb.PluginTask {
	out := &pb.PluginTask{
		Task: TaskKeyProto(t.TaskKey), Plugin: string(t.Plugin), Type: t.Type, Job: t.Job, Phase: string(t.Phase),
		Attempt: t.Attempt, Healthy: t.Healthy, Active: t.Active, Calls: uint32(t.Calls),
		Problem: text(t.Problem),
	}
	for _, c := range t.Open {
		out.Open = append(out.Open, &pb.OpenCall{Rpc: string(c.RPC), Volume: VolumeNameProto(c.Volume),
			Alloc: string(c.Alloc), Since: stamp(c.Since)})
	}
	for _, s := range t.Volumes {
		out.Volumes = append(out.Volumes, &pb.ServedVolume{Volume: VolumeNameProto(s.Volume),
			ExternalId: string(s.External), Allocs: strs(s.Allocs), Mount: s.Mount})
	}
	if t.Restart != nil {
		out.Restart = &pb.RestartRequest{Attempt: t.Restart.Attempt, Cause: string(t.Restart.Cause),
			Detail: text(t.Restart.Detail), Since: stamp(t.Restart.Since)}
	}
	return out
}

func PluginTask(m *pb.PluginTask) registry.PluginTask {
	out := registry.PluginTask{
		TaskKey: TaskKey(m.GetTask()), Plugin: registry.PluginID(m.GetPlugin()), Type: m.GetType(), Job: m.GetJob(),
		Phase: registry.TaskPhase(m.GetPhase()), Attempt: m.GetAttempt(), Healthy: m.GetHealthy(),
		Active: m.GetActive(), Calls: int(m.GetCalls()), Problem: m.GetProblem(),
	}
	for _, c := range m.GetOpen() {
		out.Open = append(out.Open, registry.OpenCall{RPC: registry.RPC(c.GetRpc()), Volume: VolumeName(c.GetVolume()),
			Alloc: registry.AllocID(c.GetAlloc()), Since: timeOf(c.GetSince())})
	}
	for _, s := range m.GetVolumes() {
		out.Volumes = append(out.Volumes, registry.ServedVolume{Volume: VolumeName(s.GetVolume()),
			External: registry.ExternalID(s.GetExternalId()), Allocs: words[registry.AllocID](s.GetAllocs()),
			Mount: s.GetMount()})
	}
	if r := m.GetRestart(); r != nil {
		out.Restart = &registry.RestartRequest{Attempt: r.GetAttempt(), Cause: registry.Cause(r.GetCause()),
			Detail: r.GetDetail(), Since: timeOf(r.GetSince())}
	}
	return out
}

func EventProto(e registry.Event) *pb.Event {
	out := &pb.Event{
		Seq: uint64(e.Seq), Generation: uint64(e.Generation), Kind: string(e.Kind), Role: string(e.Role),
		Plugin: string(e.Plugin), Alloc: string(e.Alloc), Node: string(e.Node), Task: string(e.Task),
		Volume:     VolumeNameProto(e.Volume),
		ExternalId: string(e.External), Request: string(e.Request), Cause: string(e.Cause), Detail: text(e.Detail),
		At: stamp(e.At),
	}
	if e.Instance != nil {
		out.Instance = InstanceProto(*e.Instance)
	}
	if e.Snapshot != nil {
		out.Snapshot, out.SnapshotIndex = each(e.Snapshot.Instances, InstanceProto), uint64(e.Snapshot.Index)
	}
	return out
}

func Event(m *pb.Event) registry.Event {
	out := registry.Event{
		Seq: registry.Seq(m.GetSeq()), Generation: registry.Generation(m.GetGeneration()),
		Kind: registry.EventKind(m.GetKind()),
		Role: registry.Role(m.GetRole()), Plugin: registry.PluginID(m.GetPlugin()),
		Alloc: registry.AllocID(m.GetAlloc()), Node: registry.NodeName(m.GetNode()),
		Task: registry.TaskName(m.GetTask()), Volume: VolumeName(m.GetVolume()),
		External: registry.ExternalID(m.GetExternalId()),
		Request:  registry.RequestName(m.GetRequest()), Cause: registry.Cause(m.GetCause()), Detail: m.GetDetail(),
		At: timeOf(m.GetAt()),
	}
	if m.GetInstance() != nil {
		i := Instance(m.GetInstance())
		out.Instance = &i
	}
	if out.Kind == registry.EventResync {
		out.Snapshot = &registry.Snapshot{Index: registry.Seq(m.GetSnapshotIndex()),
			Instances: each(m.GetSnapshot(), Instance)}
	}
	return out
}
