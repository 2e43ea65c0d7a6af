package rpc

import (
	"crypto/rand"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/proto/wire"
	"holdfast/registry"
	"holdfast/shim/internal/endpoint"
)

// PassCSI is a grpc.StreamHandler for methods of no registered service. It passes the calls of a CSI endpoint to the
// plugin that their metadata names. A host repeats a call that this shim cannot answer; CSI allows that for every call.
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
	f, _, err := s.operations.start(call)
	if err != nil {
		return err
	}
	defer s.operations.finish(f)
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
		err = a.Endpoint.Pass(bound, endpoint.Request{Plugin: plugin, Method: method, Message: &request, Operation: call.ID,
			Repeated: len(header.Get(wire.EndpointRepeated)) > 0},
			func(m *emptypb.Empty) error { return stream.SendMsg(m) })
	}
	if err != nil && caller.Err() == nil && a.cannotAnswer(caller, err) {
		return errNotActive
	}
	stream.SetTrailer(metadata.Pairs(wire.EndpointAnswered, "true"))
	return endpoint.Status(err)
}
