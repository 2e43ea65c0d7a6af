package host

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
)

// Blocking makes a list call wait for changes. If MinIndex is set, the call returns once a record of a kind that the
// list shows has changed after that index, or after Wait. To follow a list, pass the index of the last answer. The list
// may be the same as before, for example if the query leaves out the changed record. After a swap of the shim, a change
// of any record may end the wait. An index is valid on its node only. The zero value waits for nothing.
type Blocking struct {
	MinIndex Seq
	Wait     time.Duration // at most 10 minutes; 0: 10 minutes
}

// VolumeQuery selects volumes. The zero value selects all.
type VolumeQuery struct {
	Blocking
	Name   VolumeName
	Plugin PluginID
}

// Volumes lists volumes and their use, and the index for which the list is true.
func (h *Host) Volumes(ctx context.Context, q VolumeQuery) ([]VolumeStatus, Seq, error) {
	return pages(q.Blocking, func(p *pb.Page) ([]VolumeStatus, *pb.Answer, string, error) {
		reply, err := call(ctx, h, reads, pb.NewVolumesClient, pb.VolumesClient.List, &pb.ListVolumesRequest{
			Call: &pb.Call{}, Page: p,
			Namespace: string(q.Name.Namespace), Id: string(q.Name.ID), Plugin: string(q.Plugin),
		})
		return convert(reply.GetVolumes(), wire.Volume), reply.GetAnswer(), reply.GetNextToken(), err
	})
}

// AllocQuery selects allocs. The zero value selects all.
type AllocQuery struct {
	Blocking
	ID AllocID
}

// Allocs lists allocs that hold volumes or wait for them, and the index for which the list is true. An alloc that is
// releasing although the host did not ask for that has lost its volumes: see registry.EventVolumesLost.
func (h *Host) Allocs(ctx context.Context, q AllocQuery) ([]AllocStatus, Seq, error) {
	return pages(q.Blocking, func(p *pb.Page) ([]AllocStatus, *pb.Answer, string, error) {
		reply, err := call(ctx, h, reads, pb.NewAllocsClient, pb.AllocsClient.List,
			&pb.ListAllocsRequest{Call: &pb.Call{}, Page: p, Alloc: string(q.ID)})
		return convert(reply.GetAllocs(), wire.Alloc), reply.GetAnswer(), reply.GetNextToken(), err
	})
}

// ClaimQuery selects claims. The zero value selects all.
type ClaimQuery struct {
	Blocking
	Volume VolumeName
	Alloc  AllocID
}

// Claims lists which allocs may use which volumes, and the index for which the list is true.
func (h *Host) Claims(ctx context.Context, q ClaimQuery) ([]Claim, Seq, error) {
	return pages(q.Blocking, func(p *pb.Page) ([]Claim, *pb.Answer, string, error) {
		req := &pb.ListClaimsRequest{Call: &pb.Call{}, Page: p, Alloc: string(q.Alloc)}
		if q.Volume != (VolumeName{}) {
			req.Volume = wire.VolumeNameProto(q.Volume)
		}
		reply, err := call(ctx, h, reads, pb.NewClaimsClient, pb.ClaimsClient.List, req)
		return convert(reply.GetClaims(), wire.Claim), reply.GetAnswer(), reply.GetNextToken(), err
	})
}

// PluginQuery selects plugins. The zero value selects all.
type PluginQuery struct {
	Blocking
	Role   Role
	Plugin PluginID
}

// PluginList is the registered instances of plugins, and the tasks that run them.
type PluginList struct {
	Instances []Instance // by role, plugin, then newest first
	Active    map[InstanceKey]bool
	Tasks     []PluginTask
}

// Plugins lists plugins, and the index for which the list is true. A Blocking query does not wait for changes of
// PluginTask.Calls, Open and Volumes, which have no index.
//
// PluginTask.Restart asks the host to restart the task. The request stands until TaskStarting reports a newer attempt,
// also over restarts of host and shim. Honour it once for each attempt.
//
// To replace an instance, an orchestrator starts another task of the plugin and waits until its PluginTask.Healthy is
// set. It stops the old task once MayStop of the old task reports true. PluginTask.Volumes names the allocs that still
// use mounts of a task's process. If the new task does not become healthy, the orchestrator ends it; nothing else has
// changed. If the new task has to go but serves mounts already, the orchestrator prefers the old task (PreferTask). It
// ends the new task once none of these mounts is left.
func (h *Host) Plugins(ctx context.Context, q PluginQuery) (PluginList, Seq, error) {
	out := PluginList{Active: map[InstanceKey]bool{}}
	list, at, err := pages(q.Blocking, func(p *pb.Page) ([]Instance, *pb.Answer, string, error) {
		reply, err := call(ctx, h, reads, pb.NewPluginsClient, pb.PluginsClient.List,
			&pb.ListPluginsRequest{Call: &pb.Call{}, Page: p, Role: string(q.Role), Plugin: string(q.Plugin)})
		for _, m := range reply.GetInstances() {
			if m.GetActive() {
				out.Active[wire.InstanceKey(m.GetKey())] = true
			}
		}
		if p.GetToken() == "" { // only the first page has tasks
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
func pages[T any](b Blocking, get func(*pb.Page) ([]T, *pb.Answer, string, error)) (all []T, at Seq, err error) {
	token := ""
	for {
		part, answer, next, err := get(b.page(token))
		if err != nil {
			return nil, 0, err
		}
		if token == "" {
			at = Seq(answer.GetIndex())
		}
		all, token = append(all, part...), next
		if token == "" {
			return all, at, nil
		}
	}
}

func (b Blocking) page(token string) *pb.Page {
	p := &pb.Page{Token: token}
	if token == "" && b.MinIndex > 0 {
		if b.Wait <= 0 || b.Wait > wire.MaxWait {
			b.Wait = wire.MaxWait
		}
		p.MinIndex, p.Wait = uint64(b.MinIndex), durationpb.New(b.Wait)
	}
	return p
}

// shortenWait returns a function to call before each try of a request. The function reduces the wait of a Blocking
// query by the time since shortenWait was called. It does nothing to other requests.
func shortenWait(req any) (beforeTry func()) {
	r, paged := req.(interface{ GetPage() *pb.Page })
	if !paged || r.GetPage().GetWait() == nil {
		return func() {}
	}
	ends := time.Now().Add(r.GetPage().GetWait().AsDuration())
	return func() { r.GetPage().Wait = durationpb.New(max(0, time.Until(ends))) }
}

func convert[M, T any](ms []M, f func(M) T) []T {
	out := make([]T, 0, len(ms))
	for _, m := range ms {
		out = append(out, f(m))
	}
	return out
}
