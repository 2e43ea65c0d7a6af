package host

import (
	"context"

	"google.golang.org/grpc"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// CreateVolume has the plugin make a volume. The same spec again gives the same volume.
func (h *Host) CreateVolume(ctx context.Context, s VolumeSpec) (VolumeStatus, error) {
	req := &pb.CreateVolumeRequest{Call: &pb.Call{OperationId: newOperation()}, Spec: wire.VolumeSpecProto(s)}
	var reply *pb.CreateVolumeReply
	err := h.call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		reply, err = pb.NewVolumesClient(conn).Create(ctx, req)
		return err
	})
	if err != nil {
		return VolumeStatus{}, err
	}
	return wire.Volume(reply.GetVolume()), nil
}

// RegisterVolume makes a volume known that exists at its plugin.
func (h *Host) RegisterVolume(ctx context.Context, s VolumeSpec) (VolumeStatus, error) {
	req := &pb.RegisterVolumeRequest{Call: &pb.Call{OperationId: newOperation()}, Spec: wire.VolumeSpecProto(s)}
	var reply *pb.RegisterVolumeReply
	err := h.call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		reply, err = pb.NewVolumesClient(conn).Register(ctx, req)
		return err
	})
	if err != nil {
		return VolumeStatus{}, err
	}
	return wire.Volume(reply.GetVolume()), nil
}

// ExpandVolume makes a volume larger: at its controller, and on this node, now if the volume is used here, else when it is used next
// (Volume.Expansion says what is left to do, and what its plugin said to that). One that is large enough stays as it is. ErrConflict: it is
// used, and its plugin expands only volumes that nobody uses. ErrInvalid: it would have to shrink.
func (h *Host) ExpandVolume(ctx context.Context, n VolumeName, want CapacityRange) (VolumeStatus, error) {
	req := &pb.ExpandVolumeRequest{
		Call: &pb.Call{OperationId: newOperation()}, Name: wire.VolumeNameProto(n), RequiredBytes: want.Required, LimitBytes: want.Limit,
	}
	var reply *pb.ExpandVolumeReply
	err := h.call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		reply, err = pb.NewVolumesClient(conn).Expand(ctx, req)
		return err
	})
	if err != nil {
		return VolumeStatus{}, err
	}
	return wire.Volume(reply.GetVolume()), nil
}

// DeleteVolume has the plugin delete the volume, and forgets it. It is refused while the volume is used.
func (h *Host) DeleteVolume(ctx context.Context, n VolumeName) error {
	req := &pb.DeleteVolumeRequest{Call: &pb.Call{OperationId: newOperation()}, Name: wire.VolumeNameProto(n)}
	return h.call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		_, err := pb.NewVolumesClient(conn).Delete(ctx, req)
		return err
	})
}

// DeregisterVolume forgets the volume; the plugin keeps it. It is refused while the volume is used.
func (h *Host) DeregisterVolume(ctx context.Context, n VolumeName) error {
	req := &pb.DeregisterVolumeRequest{Call: &pb.Call{OperationId: newOperation()}, Name: wire.VolumeNameProto(n)}
	return h.call(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) error {
		_, err := pb.NewVolumesClient(conn).Deregister(ctx, req)
		return err
	})
}

// VolumeQuery says which volumes; the zero value all.
type VolumeQuery struct {
	Name   VolumeName
	Plugin PluginID
}

// Volumes lists volumes and how they are used. It is true for the index returned.
func (h *Host) Volumes(ctx context.Context, q VolumeQuery) ([]VolumeStatus, Seq, error) {
	return pages(ctx, h, func(ctx context.Context, conn grpc.ClientConnInterface, p *pb.Page) ([]VolumeStatus, *pb.Answer, string, error) {
		reply, err := pb.NewVolumesClient(conn).List(ctx, &pb.ListVolumesRequest{
			Call: &pb.Call{}, Page: p, Namespace: string(q.Name.Namespace), Id: string(q.Name.ID), Plugin: string(q.Plugin),
		})
		return convert(reply.GetVolumes(), wire.Volume), reply.GetAnswer(), reply.GetNextToken(), err
	})
}

// VolumeStats asks a volume's node plugin how full it is, one answer per unit ("bytes", "inodes"). ErrConflict: it is not mounted on this
// node, or something is happening to it. ErrUnsupported: its plugin cannot say. The index is that of the shim after the plugin has answered.
func (h *Host) VolumeStats(ctx context.Context, n VolumeName) ([]VolumeUsage, Seq, error) {
	req := &pb.VolumeStatsRequest{Call: &pb.Call{}, Name: wire.VolumeNameProto(n)}
	var reply *pb.VolumeStatsReply
	err := h.read(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
		reply, err = pb.NewVolumesClient(conn).Stats(ctx, req)
		return err
	})
	if err != nil {
		return nil, 0, err
	}
	return convert(reply.GetUsage(), wire.VolumeUsage), Seq(reply.GetAnswer().GetIndex()), nil
}

// Allocs lists allocs that hold or wait for volumes; only says which one, empty all.
func (h *Host) Allocs(ctx context.Context, only AllocID) ([]AllocStatus, Seq, error) {
	return pages(ctx, h, func(ctx context.Context, conn grpc.ClientConnInterface, p *pb.Page) ([]AllocStatus, *pb.Answer, string, error) {
		reply, err := pb.NewAllocsClient(conn).List(ctx, &pb.ListAllocsRequest{Call: &pb.Call{}, Page: p, Alloc: string(only)})
		return convert(reply.GetAllocs(), wire.Alloc), reply.GetAnswer(), reply.GetNextToken(), err
	})
}

// Claims lists who may use which volume.
func (h *Host) Claims(ctx context.Context) ([]Claim, Seq, error) {
	return pages(ctx, h, func(ctx context.Context, conn grpc.ClientConnInterface, p *pb.Page) ([]Claim, *pb.Answer, string, error) {
		reply, err := pb.NewClaimsClient(conn).List(ctx, &pb.ListClaimsRequest{Call: &pb.Call{}, Page: p})
		return convert(reply.GetClaims(), wire.Claim), reply.GetAnswer(), reply.GetNextToken(), err
	})
}

// PluginQuery says which plugins; the zero value all.
type PluginQuery struct {
	Role   Role
	Plugin PluginID
}

// PluginList is what is known of plugins: the instances that are there, and the tasks that are expected to serve one.
type PluginList struct {
	Instances []Instance // by role, plugin, then newest first
	Active    map[registry.InstanceKey]bool
	Tasks     []PluginTask
}

// Plugins lists the instances of plugins and the tasks that run them. It is true for the index returned.
func (h *Host) Plugins(ctx context.Context, q PluginQuery) (PluginList, Seq, error) {
	out := PluginList{Active: map[registry.InstanceKey]bool{}}
	list, at, err := pages(ctx, h, func(ctx context.Context, conn grpc.ClientConnInterface, p *pb.Page) ([]Instance, *pb.Answer, string, error) {
		reply, err := pb.NewPluginsClient(conn).List(ctx, &pb.ListPluginsRequest{Call: &pb.Call{}, Page: p, Role: string(q.Role), Plugin: string(q.Plugin)})
		if err != nil {
			return nil, nil, "", err
		}
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

// pages reads a list to its end. The index is that of the first page; what is there all the time is in the list once, though other records
// come and go meanwhile.
func pages[T any](ctx context.Context, h *Host, get func(context.Context, grpc.ClientConnInterface, *pb.Page) ([]T, *pb.Answer, string, error)) ([]T, Seq, error) {
	var all []T
	var at Seq
	token := ""
	for {
		var part []T
		var answer *pb.Answer
		var next string
		err := h.read(ctx, func(ctx context.Context, conn grpc.ClientConnInterface) (err error) {
			part, answer, next, err = get(ctx, conn, &pb.Page{Token: token})
			return err
		})
		if err != nil {
			return nil, 0, err
		}
		if token == "" {
			at = Seq(answer.GetIndex())
		}
		all = append(all, part...)
		if next == "" {
			return all, at, nil
		}
		token = next
	}
}

func convert[M, T any](ms []M, f func(M) T) []T {
	out := make([]T, 0, len(ms))
	for _, m := range ms {
		out = append(out, f(m))
	}
	return out
}
