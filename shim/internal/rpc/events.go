package rpc

import (
	"google.golang.org/grpc"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

type events struct {
	pb.UnimplementedEventsServer
	s *Server
}

// Watch sends the events after the cursor, until the caller gives up or the shim ends.
func (e *events) Watch(req *pb.WatchRequest, stream grpc.ServerStreamingServer[pb.WatchReply]) error {
	a, err := e.s.activeFor(req)
	if err != nil {
		return err
	}
	if err := checkFilters("", "", req.GetRole(), req.GetPlugin()); err != nil {
		return wire.Status(err)
	}
	ctx, cancel := a.whileActive(stream.Context())
	defer cancel()
	filter := registry.Filter{Role: registry.Role(req.GetRole()), Plugin: registry.PluginID(req.GetPlugin()),
		Bookmarks: true}
	for _, k := range req.GetKinds() {
		filter.Kinds = append(filter.Kinds, registry.EventKind(k))
	}
	after := registry.Seq(req.GetAfter())
	if req.GetSnapshot() {
		after = registry.FromSnapshot
	}
	return wire.Status(a.Feed.Watch(ctx, after, filter, func(ev registry.Event) error {
		reply := &pb.WatchReply{Answer: a.answer(ev.Seq)}
		if ev.Kind != registry.EventBookmark {
			reply.Event = wire.EventProto(ev)
		}
		return stream.Send(reply)
	}))
}
