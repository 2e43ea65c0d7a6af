package csi

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/registry"
)

// Passed is a call that another client makes of a plugin.
type Passed struct {
	Method  string         // full gRPC method, such as /csi.v1.Node/NodeStageVolume
	RPC     registry.RPC   // its last part
	Message *emptypb.Empty // the request as it came: its fields are unknown to the type and are sent as they are
	Decoded proto.Message  // the request, for the secrets in it; nil: its type is unknown
}

// Pass makes the call at the instance and calls reply with each message of the answer, which need not be of a known
// type. answered reports whether the plugin's status has come, or a message before it. The error is a
// *registry.CallError, whose text has no secret of the request and none that the plugin was ever sent, or the error of
// reply.
func (f *Fleet) Pass(
	ctx context.Context, at registry.InstanceKey, call Passed, reply func(*emptypb.Empty) error,
) (answered bool, err error) {
	known, more := call.Decoded, PrivateFunc(nil)
	if known == nil { // any of its fields may be secret
		known, more = call.Message, func(context.Context) Private { return Private{Unknown: true} }
	}
	trace, err := f.call(ctx, call.RPC, at, known, more,
		func(ctx context.Context, _ registry.Instance, l *link, trace *callTrace) error {
			return stream(ctx, l, trace, call.Method, call.Message, func(m *emptypb.Empty) error {
				answered = true
				return reply(m)
			})
		})
	return answered || trace.answered.Load(), err
}

// stream makes a call with one request and any number of messages in its answer. A unary call is one with one message.
// An error of reply is returned as a refusal.
func stream[M any, P interface {
	*M
	proto.Message
}](ctx context.Context, l *link, trace *callTrace, method string, req proto.Message, reply func(P) error) error {
	ctx, cancel := context.WithCancel(withTrace(ctx, trace))
	defer cancel()
	stream, err := l.cc.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err != nil {
		return err
	}
	// After an io.EOF of SendMsg the status comes from RecvMsg.
	if err := stream.SendMsg(req); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	// A message is kept until the next one or the status: a call that is cut off before may be repeated.
	var last P
	for {
		m := P(new(M))
		err := stream.RecvMsg(&answer{into: m})
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if last != nil {
			if err := reply(last); err != nil {
				return refusal{err}
			}
		}
		if err != nil {
			return nil
		}
		last = m
	}
}
