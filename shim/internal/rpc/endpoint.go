package rpc

import (
	"cmp"
	"context"
	"crypto/rand"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/endpoint"
)

// PassCSI handles streams of methods without a registered service. It passes calls of a CSI endpoint to the plugin that
// their metadata names. If this shim cannot answer a call, the host repeats it; CSI allows that for every call.
func (s *Server) PassCSI(_ any, stream grpc.ServerStream) error {
	ctx := stream.Context()
	method, _ := grpc.MethodFromServerStream(stream)
	header, _ := metadata.FromIncomingContext(ctx)
	plugins := header.Get(wire.EndpointPlugin)
	if len(plugins) != 1 {
		return status.Errorf(codes.Unimplemented, "unknown method %s", method)
	}
	a := s.active.Load()
	if a == nil {
		return errNotActive
	}
	call := registry.Call{ID: registry.OperationID("csi-" + rand.Text()), Method: method}
	running, _, err := s.operations.start(call)
	if err != nil {
		return err
	}
	defer s.operations.finish(running)
	caller, end := withDeadline(ctx, endpoint.Limit(method))
	defer end()
	bound, cancel := a.whileActive(caller)
	defer cancel()
	var request emptypb.Empty
	if err := stream.RecvMsg(&request); err != nil {
		return err
	}
	plugin, err := registry.ParsePluginID(plugins[0])
	if err == nil {
		err = a.Endpoint.Pass(bound, endpoint.Request{Plugin: plugin, Method: method, Message: &request,
			Repeated: len(header.Get(wire.EndpointRepeated)) > 0},
			func(m *emptypb.Empty) error { return stream.SendMsg(m) })
	}
	if err != nil && caller.Err() == nil && a.cannotAnswer(caller, err) {
		return errNotActive
	}
	stream.SetTrailer(metadata.Pairs(wire.EndpointAnswered, "true"))
	return endpoint.Status(err)
}

func (p *plugins) EndpointUses(
	ctx context.Context, req *pb.ListEndpointUsesRequest,
) (*pb.ListEndpointUsesReply, error) {
	key := func(u registry.EndpointUse) string { return u.Key().Path }
	part, next, at, err := list(ctx, p.s, req, []registry.Bucket{registry.BucketEndpointUses}, key,
		wire.EndpointUseProto,
		func(ctx context.Context, a *Active) (all []registry.EndpointUse, at registry.Seq, err error) {
			plugin, err := registry.ParsePluginID(req.GetPlugin())
			if err != nil {
				return nil, 0, err
			}
			err = a.State.View(ctx, func(v registry.View) error {
				all, at = v.EndpointUsesAt(plugin), v.Index()
				return nil
			})
			return all, at, err
		})
	return &pb.ListEndpointUsesReply{Answer: at, Uses: part, NextToken: next}, err
}

func (p *plugins) ForgetEndpointUses(
	ctx context.Context, req *pb.ForgetEndpointUsesRequest,
) (*pb.ForgetEndpointUsesReply, error) {
	plugin, err := registry.ParsePluginID(req.GetPlugin())
	external, badID := registry.ParseExternalID(req.GetExternalId())
	f := wire.Force(req.GetForce())
	if err := cmp.Or(err, badID, checkOperator(f.By)); err != nil {
		return nil, wire.Status(err)
	}
	key := registry.VolumeKey{Plugin: plugin, External: external}
	indexOf := func(v registry.View) (last registry.Seq) {
		for _, use := range v.EndpointUses(key) {
			last = max(last, use.CreateIndex)
		}
		return last
	}
	at, err := do(ctx, p.s, "Plugins.ForgetEndpointUses", req,
		func(ctx context.Context, a *Active, call registry.Call) error {
			return runRemoval(ctx, a, call, indexOf, func() error { return a.Endpoint.Forget(ctx, key, f) })
		})
	return &pb.ForgetEndpointUsesReply{Answer: at}, err
}
