package host

import (
	"context"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// VolumeQuery selects volumes. The zero value selects all.
type VolumeQuery struct {
	Name   VolumeName
	Plugin PluginID
}

// Volumes lists volumes and their use, and the index for which the list is true.
func (h *Host) Volumes(ctx context.Context, q VolumeQuery) ([]VolumeStatus, Seq, error) {
	return pages(func(p *pb.Page) ([]VolumeStatus, *pb.Answer, string, error) {
		reply, err := call(ctx, h, reads, pb.NewVolumesClient, pb.VolumesClient.List, &pb.ListVolumesRequest{
			Call: &pb.Call{}, Page: p,
			Namespace: string(q.Name.Namespace), Id: string(q.Name.ID), Plugin: string(q.Plugin),
		})
		return convert(reply.GetVolumes(), wire.Volume), reply.GetAnswer(), reply.GetNextToken(), err
	})
}

// Allocs lists allocs that hold volumes or wait for them: the given one, or all if it is empty.
func (h *Host) Allocs(ctx context.Context, only AllocID) ([]AllocStatus, Seq, error) {
	return pages(func(p *pb.Page) ([]AllocStatus, *pb.Answer, string, error) {
		reply, err := call(ctx, h, reads, pb.NewAllocsClient, pb.AllocsClient.List,
			&pb.ListAllocsRequest{Call: &pb.Call{}, Page: p, Alloc: string(only)})
		return convert(reply.GetAllocs(), wire.Alloc), reply.GetAnswer(), reply.GetNextToken(), err
	})
}

// Claims lists which allocs may use which volumes.
func (h *Host) Claims(ctx context.Context) ([]Claim, Seq, error) {
	return pages(func(p *pb.Page) ([]Claim, *pb.Answer, string, error) {
		reply, err := call(ctx, h, reads, pb.NewClaimsClient, pb.ClaimsClient.List,
			&pb.ListClaimsRequest{Call: &pb.Call{}, Page: p})
		return convert(reply.GetClaims(), wire.Claim), reply.GetAnswer(), reply.GetNextToken(), err
	})
}

// PluginQuery selects plugins. The zero value selects all.
type PluginQuery struct {
	Role   Role
	Plugin PluginID
}

// PluginList is the registered instances of plugins, and the tasks that run them.
type PluginList struct {
	Instances []Instance // by role, plugin, then newest first
	Active    map[InstanceKey]bool
	Tasks     []PluginTask
}

// Plugins lists plugins, and the index for which the list is true.
//
// An orchestrator replaces an instance with it: it starts another task of the plugin, waits until PluginTask.Healthy is
// set for that, and stops the old task once its MayStop reports true. PluginTask.Volumes names the allocs that still
// use mounts of its process. If the new task does not become healthy, it ends that one; nothing else has changed. If
// the new one has to go, but serves mounts already, it prefers the old one (PreferTask), and ends the new one after the
// last of these mounts.
func (h *Host) Plugins(ctx context.Context, q PluginQuery) (PluginList, Seq, error) {
	out := PluginList{Active: map[InstanceKey]bool{}}
	list, at, err := pages(func(p *pb.Page) ([]Instance, *pb.Answer, string, error) {
		reply, err := call(ctx, h, reads, pb.NewPluginsClient, pb.PluginsClient.List,
			&pb.ListPluginsRequest{Call: &pb.Call{}, Page: p, Role: string(q.Role), Plugin: string(q.Plugin)})
		for _, m := range reply.GetInstances() {
			if m.GetActive() {
				out.Active[wire.InstanceKey(m.GetKey())] = true
			}
		}
		if p.GetToken() == "" {
			out.Tasks = convert(reply.GetTasks(), wire.PluginTask)
		}
		return convert(reply.GetInstances(), wire.Instance), reply.GetAnswer(), reply.GetNextToken(), err
	})
	out.Instances = list
	return out, at, err
}

// PluginCapacity asks a plugin's controller for its free space (GetCapacity of CSI). ErrUnsupported: the plugin lacks
// GET_CAPACITY.
func (h *Host) PluginCapacity(ctx context.Context, q CapacityQuery) (PluginCapacity, error) {
	reply, err := call(ctx, h, reads, pb.NewPluginsClient, pb.PluginsClient.Capacity, &pb.PluginCapacityRequest{
		Call: &pb.Call{}, Plugin: string(q.Plugin), Parameters: q.Parameters, Topology: q.Topology})
	if err != nil {
		return PluginCapacity{}, err
	}
	return PluginCapacity{Available: reply.GetAvailableBytes(), Maximum: reply.MaximumVolumeBytes,
		Minimum: reply.MinimumVolumeBytes}, nil
}

// pages reads a list to its end. The index is that of the first page. A record that exists all the time is in the list
// once, though others come and go meanwhile.
func pages[T any](get func(*pb.Page) ([]T, *pb.Answer, string, error)) (all []T, at Seq, err error) {
	for token, first := "", true; first || token != ""; first = false {
		part, answer, next, err := get(&pb.Page{Token: token})
		if err != nil {
			return nil, 0, err
		}
		if first {
			at = Seq(answer.GetIndex())
		}
		all, token = append(all, part...), next
	}
	return all, at, nil
}

func convert[M, T any](ms []M, f func(M) T) []T {
	out := make([]T, 0, len(ms))
	for _, m := range ms {
		out = append(out, f(m))
	}
	return out
}
