package rpc

import (
	"context"
	"fmt"
	"slices"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

type plugins struct {
	pb.UnimplementedPluginsServer
	s *Server
}

func (p *plugins) List(ctx context.Context, req *pb.ListPluginsRequest) (*pb.ListPluginsReply, error) {
	var table *registry.Registry
	var tasks []registry.PluginTask
	message := func(i registry.Instance) *pb.Instance {
		m := wire.InstanceProto(i)
		active, ok := table.Find(i.Role, i.Plugin)
		m.Active = ok && active.InstanceKey == i.InstanceKey
		return m
	}
	buckets := []registry.Bucket{registry.BucketInstances, registry.BucketTasks}
	part, next, at, err := list(ctx, p.s, req, buckets, instanceSortKey, message,
		func(ctx context.Context, a *Active) (_ []registry.Instance, at registry.Seq, err error) {
			if err := checkFilters("", "", req.GetRole(), req.GetPlugin()); err != nil {
				return nil, 0, err
			}
			if req.GetPage().GetToken() == "" {
				tasks, at, err = a.Tasks.Plugins(ctx, registry.PluginID(req.GetPlugin()))
				if err == nil {
					tasks, err = a.Uses.Of(ctx, tasks)
				}
				if err != nil {
					return nil, 0, err
				}
			}
			table = a.Table
			all := table.All()
			if at == 0 { // a further page has no tasks
				at = all.Index
			}
			return slices.DeleteFunc(slices.Clone(all.Instances), func(i registry.Instance) bool {
				return !(passes(req.GetRole(), i.Role) && passes(req.GetPlugin(), i.Plugin))
			}), min(at, all.Index), err
		})
	reply := &pb.ListPluginsReply{Answer: at, Instances: part, NextToken: next}
	for _, t := range tasks {
		reply.Tasks = append(reply.Tasks, wire.PluginTaskProto(t))
	}
	return reply, err
}

// instanceSortKey returns the key by which instances are sorted: by role, by plugin, and then newest first. The key of
// an instance never changes.
func instanceSortKey(i registry.Instance) string {
	return fmt.Sprintf("%s\x00%s\x00%020d\x00%s\x00%s", i.Role, i.Plugin, ^uint64(i.CreateIndex), i.Alloc, i.Task)
}

// Capacity asks a plugin. It changes nothing, and its answer is true only at that moment.
func (p *plugins) Capacity(ctx context.Context, req *pb.PluginCapacityRequest) (*pb.PluginCapacityReply, error) {
	plugin, err := registry.ParsePluginID(req.GetPlugin())
	if err != nil {
		return nil, wire.Status(err)
	}
	capacity, at, err := query(ctx, p.s, req, func(ctx context.Context, a *Active) (registry.PluginCapacity, error) {
		return a.Volumes.Capacity(ctx, registry.CapacityQuery{Plugin: plugin, Parameters: req.GetParameters(),
			Topology: req.GetTopology()})
	})
	if err != nil {
		return nil, err
	}
	return &pb.PluginCapacityReply{Answer: at, AvailableBytes: capacity.Available, MaximumVolumeBytes: capacity.Maximum,
		MinimumVolumeBytes: capacity.Minimum}, nil
}
