package rpc

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"google.golang.org/grpc"

	"holdfast/hooks"
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
				return !matches(req.GetRole(), req.GetPlugin(), i.Role, i.Plugin)
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

// matches reports whether a role and a plugin pass the filters of a request. An empty filter passes all.
func matches(onlyRole, onlyPlugin string, role registry.Role, plugin registry.PluginID) bool {
	return (onlyRole == "" || onlyRole == string(role)) && (onlyPlugin == "" || onlyPlugin == string(plugin))
}

// fingerprintKey identifies a fingerprint.
type fingerprintKey struct {
	role   registry.Role
	plugin registry.PluginID
}

// Fingerprints sends all fingerprints, and then the differences after each change of an instance or a task.
func (p *plugins) Fingerprints(
	req *pb.FingerprintsRequest, stream grpc.ServerStreamingServer[pb.FingerprintsReply],
) error {
	if err := checkFilters("", "", req.GetRole(), req.GetPlugin()); err != nil {
		return wire.Status(err)
	}
	last := map[fingerprintKey]registry.PluginFingerprint{}
	return p.s.onChange(stream.Context(), req, func(ctx context.Context, a *Active, first bool) error {
		now, at, err := fingerprints(ctx, a, req.GetRole(), req.GetPlugin())
		if err != nil {
			return err
		}
		changed := difference(last, now)
		last = now
		return send(stream, a.answer(at), changed, first)
	})
}

// send sends the changes in parts. The last part of a snapshot is marked complete, and is sent even if it is empty.
func send(
	stream grpc.ServerStreamingServer[pb.FingerprintsReply], at *pb.Answer, changed []registry.PluginFingerprint,
	snapshot bool,
) error {
	for len(changed) > 0 || snapshot {
		part := changed[:min(len(changed), pageSize)]
		changed = changed[len(part):]
		reply := &pb.FingerprintsReply{Answer: at, Complete: snapshot && len(changed) == 0}
		for _, f := range part {
			reply.Plugins = append(reply.Plugins, wire.PluginFingerprintProto(f))
		}
		if err := stream.Send(reply); err != nil {
			return err
		}
		snapshot = snapshot && !reply.Complete
	}
	return nil
}

// fingerprints returns the current fingerprint of each plugin and role that has an instance or an expected task. The
// fingerprint is Gone if there is no instance. An empty role or plugin means all.
func fingerprints(
	ctx context.Context, a *Active, role, plugin string,
) (map[fingerprintKey]registry.PluginFingerprint, registry.Seq, error) {
	tasks, at, err := a.Tasks.Plugins(ctx, registry.PluginID(plugin))
	if err != nil {
		return nil, 0, err
	}
	out := map[fingerprintKey]registry.PluginFingerprint{}
	for _, t := range tasks {
		for _, r := range hooks.PluginType(t.Type).Roles() {
			if matches(role, plugin, r, t.Plugin) {
				f := out[fingerprintKey{r, t.Plugin}]
				f.Role, f.Plugin, f.Gone = r, t.Plugin, true
				f.Expected++
				out[fingerprintKey{r, t.Plugin}] = f
			}
		}
	}
	snap := a.Table.All()
	for _, i := range snap.Instances {
		if !matches(role, plugin, i.Role, i.Plugin) {
			continue
		}
		k := fingerprintKey{i.Role, i.Plugin}
		f := out[k]
		f.Role, f.Plugin, f.Gone = i.Role, i.Plugin, false
		if i.Health.State == registry.Healthy {
			f.Healthy++
		}
		f.Active, _ = a.Table.Find(i.Role, i.Plugin)
		out[k] = f
	}
	return out, min(at, snap.Index), nil // the lower index is true for both reads
}

// difference returns the added, changed and removed fingerprints between last and now, sorted by plugin and role.
func difference(last, now map[fingerprintKey]registry.PluginFingerprint) []registry.PluginFingerprint {
	var out []registry.PluginFingerprint
	for k, f := range now {
		was, known := last[k]
		if !known || was.Gone != f.Gone || was.Healthy != f.Healthy || was.Expected != f.Expected ||
			was.Active.InstanceKey != f.Active.InstanceKey || was.Active.ModifyIndex != f.Active.ModifyIndex {
			out = append(out, f)
		}
	}
	for k := range last {
		if _, still := now[k]; !still {
			out = append(out, registry.PluginFingerprint{Role: k.role, Plugin: k.plugin, Gone: true})
		}
	}
	slices.SortFunc(out, func(x, y registry.PluginFingerprint) int {
		return cmp.Or(cmp.Compare(x.Plugin, y.Plugin), cmp.Compare(x.Role, y.Role))
	})
	return out
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
