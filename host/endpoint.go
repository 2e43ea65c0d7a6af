package host

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/internal/tracing"
	"holdfast/proto/bootstrap"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

// maxCSIMessage is the largest message that a CSI client may send, in bytes.
const maxCSIMessage = 4 << 20

// csiMethods is the prefix of the methods of every CSI service.
const csiMethods = "/csi.v1."

// ServeCSI serves the CSI services of a plugin (CSI spec: Identity, Controller, GroupController, SnapshotMetadata and
// Node) to CSI clients on l. It returns nil when ctx ends, or an error when l fails or the host closes, and closes l.
// A client keeps its connection while instances of the plugin come and go and shims are swapped: calls are held and
// repeated like those of a Host. The host passes messages on undecoded, so RPCs and fields that are newer than it work
// too.
//
// Calls that name the same volume are made one at a time. FAILED_PRECONDITION: the call would change a volume that has
// a record in Holdfast. UNAVAILABLE: no task runs the plugin, or a stream of answers was cut off by the end of a shim.
func (h *Host) ServeCSI(ctx context.Context, plugin PluginID, l net.Listener) error {
	if _, err := registry.ParsePluginID(string(plugin)); err != nil {
		return errors.Join(err, l.Close())
	}
	options := []grpc.ServerOption{grpc.MaxRecvMsgSize(maxCSIMessage), grpc.WaitForHandlers(true),
		grpc.NumStreamWorkers(bootstrap.Workers),
		grpc.InitialWindowSize(bootstrap.Window), grpc.InitialConnWindowSize(bootstrap.Window),
		grpc.UnknownServiceHandler(func(_ any, client grpc.ServerStream) error { return h.passCSI(plugin, client) })}
	if p := h.config.TracerProvider; p != nil {
		options = append(options, grpc.StatsHandler(tracing.NewServerHandler(p)))
	}
	server := grpc.NewServer(options...)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	var ended error
	select {
	case err := <-served:
		server.Stop()
		return fmt.Errorf("serve the CSI endpoint of plugin %s: %w", plugin, err)
	case <-ctx.Done():
	case <-h.closing.Done():
		ended = errClosed
	}
	server.Stop() // ends the calls and waits for their handlers
	<-served
	return ended
}

// passCSI passes one call of a CSI client to the active shim. emptypb.Empty keeps all fields as unknown fields, so a
// message is forwarded unchanged.
func (h *Host) passCSI(plugin PluginID, client grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(client)
	if !strings.HasPrefix(method, csiMethods) { // the shim has other services, which are for this host alone
		return status.Errorf(codes.Unimplemented, "unknown method %s", method)
	}
	request := &emptypb.Empty{}
	if err := client.RecvMsg(request); err != nil {
		return err
	}
	var final error  // the status with which the call ends, if no other shim is to be tried
	replied := false // the client has a message: the call cannot be repeated
	tries := 0
	err := h.do(client.Context(), writes, func(ctx context.Context, sh *shim) error {
		ctx = metadata.AppendToOutgoingContext(ctx, wire.EndpointPlugin, string(plugin))
		if tries++; tries > 1 {
			ctx = metadata.AppendToOutgoingContext(ctx, wire.EndpointRepeated, "true")
		}
		answered, err := passTo(ctx, sh.process.Conn(), method, request, func(reply *emptypb.Empty) error {
			replied = true
			return client.SendMsg(reply)
		})
		if answered || replied || status.Code(err) == codes.Unimplemented { // the last: this shim has no such method
			final = err
			return nil
		}
		return err
	})
	if err != nil {
		return csiStatus(err)
	}
	return final
}

// passTo makes a call at a shim and passes each message of the answer on. answered reports whether the call must not be
// repeated: the shim has answered it, or reply has failed.
func passTo(
	ctx context.Context, conn grpc.ClientConnInterface, method string, request *emptypb.Empty,
	reply func(*emptypb.Empty) error,
) (answered bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err != nil {
		return false, err
	}
	// After an io.EOF of SendMsg the status comes from RecvMsg.
	if err := stream.SendMsg(request); err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	if err := stream.CloseSend(); err != nil {
		return false, err
	}
	// A message is kept until the next message or the status arrives. If the call is cut off before that, it can be
	// repeated.
	var last *emptypb.Empty
	for {
		m := &emptypb.Empty{}
		err := stream.RecvMsg(m)
		succeeded := errors.Is(err, io.EOF)
		if err != nil && !succeeded {
			return len(stream.Trailer().Get(wire.EndpointAnswered)) > 0, err
		}
		if last != nil {
			if sendErr := reply(last); sendErr != nil {
				return true, sendErr
			}
		}
		if succeeded {
			return true, nil
		}
		last = m
	}
}

// csiStatus returns the error that a CSI client gets for a call that no shim has answered.
func csiStatus(err error) error {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return status.Error(codes.DeadlineExceeded, err.Error())
	case errors.Is(err, context.Canceled):
		return status.Error(codes.Canceled, err.Error())
	}
	return status.Error(codes.Unavailable, err.Error())
}

// EndpointQuery selects the uses of one plugin's volumes by clients of CSI endpoints.
type EndpointQuery struct {
	Blocking
	Plugin PluginID
}

// EndpointUses lists how clients of CSI endpoints use volumes of a plugin, and the index for which the list is true.
func (h *Host) EndpointUses(ctx context.Context, q EndpointQuery) ([]EndpointUse, Seq, error) {
	return pages(q.Blocking, func(p *pb.Page) ([]EndpointUse, *pb.Answer, string, error) {
		reply, err := call(ctx, h, reads, pb.NewPluginsClient, pb.PluginsClient.EndpointUses,
			&pb.ListEndpointUsesRequest{Call: &pb.Call{}, Page: p, Plugin: string(q.Plugin)})
		return convert(reply.GetUses(), wire.EndpointUse), reply.GetAnswer(), reply.GetNextToken(), err
	})
}

// ForgetEndpointUses removes the records of how clients of CSI endpoints use a volume, once these clients are gone for
// good. It sends no CSI call. f.Confirm is the ID of the volume at the plugin; ErrDenied says what may be lost without
// it. ErrNotFound: no client uses the volume. f.DryRun has no meaning.
func (h *Host) ForgetEndpointUses(ctx context.Context, plugin PluginID, volume ExternalID, f Force) error {
	_, err := call(ctx, h, writes, pb.NewPluginsClient, pb.PluginsClient.ForgetEndpointUses,
		&pb.ForgetEndpointUsesRequest{Call: mutating(), Plugin: string(plugin), ExternalId: string(volume),
			Force: wire.ForceProto(f)})
	return err
}
