package rpc

import (
	"context"
	"errors"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/cluster"
)

// services are the registered services, by name.
type services map[string]service

type service struct {
	desc *grpc.ServiceDesc
	impl any
}

// recorder registers services, and keeps them for Serve.
type recorder struct {
	grpc.ServiceRegistrar
	services *services
}

func (r recorder) RegisterService(desc *grpc.ServiceDesc, impl any) {
	if *r.services == nil {
		*r.services = services{}
	}
	(*r.services)[desc.ServiceName] = service{desc, impl}
	r.ServiceRegistrar.RegisterService(desc, impl)
}

// executed are the methods that a plugin's executor carries out, because they make controller calls.
var executed = map[string]bool{
	pb.Volumes_Create_FullMethodName: true, pb.Volumes_Register_FullMethodName: true, pb.Volumes_Delete_FullMethodName: true,
	pb.Volumes_Deregister_FullMethodName: true, pb.Volumes_Expand_FullMethodName: true, pb.Volumes_Detach_FullMethodName: true,
	pb.VolumeChanges_Modify_FullMethodName: true, pb.VolumeChanges_Update_FullMethodName: true,
	pb.VolumeChanges_Adopt_FullMethodName: true, pb.Snapshots_Create_FullMethodName: true,
	pb.Snapshots_Delete_FullMethodName: true, pb.Snapshots_Deregister_FullMethodName: true,
	pb.Snapshots_CreateGroup_FullMethodName: true, pb.Snapshots_DeleteGroup_FullMethodName: true,
	pb.Snapshots_DeregisterGroup_FullMethodName: true,
}

// PassToExecutor is an interceptor that has the executor of a plugin carry out the call, if that is another node.
func (s *Server) PassToExecutor(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	a := s.active.Load()
	call, mutates := req.(request)
	if a == nil || a.Cluster == nil || !mutates || !executed[info.FullMethod] {
		return handle(ctx, req)
	}
	if err := a.Cluster.Ready(ctx); err != nil {
		return nil, wire.Status(err)
	}
	remote, err := a.remoteCall(ctx, info.FullMethod, call)
	if err != nil {
		return nil, wire.Status(err)
	}
	if remote.Plugin == "" {
		return handle(ctx, req)
	}
	bound, cancel := a.whileActive(ctx)
	defer cancel()
	encoded, err := a.Cluster.Remote.Call(bound, remote, false)
	switch {
	case errors.Is(err, cluster.ErrHere):
		return handle(ctx, req)
	case err != nil && a.Context.Err() != nil:
		return nil, errNotActive
	case err != nil:
		return nil, wire.Status(err)
	}
	return a.reply(ctx, info.FullMethod, encoded)
}

// remoteCall returns the call for the executor of its plugin. Its Plugin is empty if no node executes it: then this node
// carries out the call.
func (a *Active) remoteCall(ctx context.Context, method string, req request) (c registry.RemoteCall, err error) {
	c.Method, c.ID = method, registry.OperationID(req.GetCall().GetOperationId())
	err = a.State.View(ctx, func(v registry.View) error {
		if plugin := pluginOf(v, req); controlled(v, plugin) {
			c.Plugin = plugin
		}
		return nil
	})
	if err != nil {
		return c, err
	}
	elsewhere := proto.Clone(req).(request)
	elsewhere.GetCall().Node = ""
	c.Request, err = proto.MarshalOptions{Deterministic: true}.Marshal(elsewhere)
	return c, err
}

// pluginOf returns the plugin of the volume or snapshot of the request; empty: it is not known.
func pluginOf(v registry.View, req request) registry.PluginID {
	switch r := req.(type) {
	case interface{ GetSpec() *pb.VolumeSpec }:
		return registry.PluginID(r.GetSpec().GetPluginId())
	case interface{ GetName() *pb.VolumeName }:
		volume, _ := v.Volume(wire.VolumeName(r.GetName()))
		return volume.Plugin
	case *pb.CreateSnapshotRequest:
		spec := r.GetSpec()
		for _, id := range append(spec.GetVolumeIds(), spec.GetVolumeId()) {
			name := registry.VolumeName{Namespace: registry.Namespace(spec.GetName().GetNamespace()), ID: registry.VolumeID(id)}
			if volume, found := v.Volume(name); found {
				return volume.Plugin
			}
		}
	case interface{ GetName() *pb.SnapshotName }:
		name := wire.SnapshotName(r.GetName())
		if snap, found := v.Snapshot(name); found {
			return snap.Plugin
		}
		group, _ := v.GroupSnapshot(name)
		return group.Plugin
	}
	return ""
}

// controlled reports whether the plugin has, or has had, a controller on a node of the cluster.
func controlled(v registry.View, plugin registry.PluginID) bool {
	if _, found := v.Executor(plugin); found || plugin == "" {
		return found
	}
	for _, node := range v.Nodes() {
		for _, p := range node.Plugins {
			if p.Plugin == plugin && p.Controller {
				return true
			}
		}
	}
	return false
}

// reply decodes the reply of another node. Its answer is that of this node, whose copy has the records by now.
func (a *Active) reply(ctx context.Context, method string, encoded []byte) (proto.Message, error) {
	d, err := methodOf(method)
	if err != nil {
		return nil, wire.Status(err)
	}
	kind, err := protoregistry.GlobalTypes.FindMessageByName(d.Output().FullName())
	if err != nil {
		return nil, wire.Status(registry.Errorf(registry.ErrInternal, "reply of %s: %w", method, err))
	}
	reply := kind.New()
	if err := proto.Unmarshal(encoded, reply.Interface()); err != nil {
		return nil, wire.Status(registry.Errorf(registry.ErrInternal, "reply of %s: %w", method, err))
	}
	if answer := d.Output().Fields().ByName("answer"); answer != nil {
		reply.Set(answer, protoreflect.ValueOfMessage(a.latest(ctx).ProtoReflect()))
	}
	return reply.Interface(), nil
}

func methodOf(full string) (protoreflect.MethodDescriptor, error) {
	name := protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(full, "/"), "/", "."))
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if m, is := d.(protoreflect.MethodDescriptor); is && err == nil {
		return m, nil
	}
	return nil, registry.Errorf(registry.ErrUnsupported, "unknown method %s", full)
}

// Serve carries out a call of another node.
func (s *Server) Serve(ctx context.Context, method string, request []byte) ([]byte, error) {
	name, call, _ := strings.Cut(strings.TrimPrefix(method, "/"), "/")
	service := s.services[name]
	if service.desc == nil {
		return nil, wire.Status(registry.Errorf(registry.ErrUnsupported, "unknown method %s", method))
	}
	for _, m := range service.desc.Methods {
		if m.MethodName != call {
			continue
		}
		reply, err := m.Handler(service.impl, ctx, func(into any) error {
			return proto.Unmarshal(request, into.(proto.Message))
		}, nil)
		if err != nil {
			return nil, err
		}
		return proto.Marshal(reply.(proto.Message))
	}
	return nil, wire.Status(registry.Errorf(registry.ErrUnsupported, "unknown method %s", method))
}
