package csi

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/registry"
)

// Passed is a call that another client makes of a plugin.
type Passed struct {
	Method  string         // full gRPC method, such as /csi.v1.Node/NodeStageVolume
	RPC     registry.RPC   // its last part
	Message *emptypb.Empty // the request as received: the type does not know its fields, so they are sent unchanged
	Decoded proto.Message  // the decoded request, to find its secrets; nil: its type is unknown
}

// Texts returns the value of a text field of a request, or all values of a list of texts. It returns nil if the request
// is nil or has no such field.
func Texts(request proto.Message, name protoreflect.Name) (values []string) {
	if request == nil {
		return nil
	}
	m := request.ProtoReflect()
	field := m.Descriptor().Fields().ByName(name)
	switch {
	case field == nil || field.Kind() != protoreflect.StringKind:
		return nil
	case !field.IsList():
		return []string{m.Get(field).String()}
	}
	for i := range m.Get(field).List().Len() {
		values = append(values, m.Get(field).List().Get(i).String())
	}
	return values
}

// Pass makes the call at the instance and calls reply with each message of the answer, whose type may be unknown.
// answered reports whether the plugin has sent a message or the status. The error is the one that reply has returned,
// or a *registry.CallError, whose text is masked: it has no secret of this request or of earlier ones to the plugin.
func (f *Fleet) Pass(
	ctx context.Context, at registry.InstanceKey, call Passed, reply func(*emptypb.Empty) error,
) (answered bool, err error) {
	decoded, private := call.Decoded, PrivateFunc(nil)
	if decoded == nil { // any field of the request may be secret
		decoded, private = call.Message, func(context.Context) Private { return Private{Unknown: true} }
	}
	trace, err := f.call(ctx, call.RPC, at, decoded, private,
		func(ctx context.Context, _ registry.Instance, l *link, trace *callTrace) error {
			return stream(ctx, l, trace, call.Method, call.Message, func(m *emptypb.Empty) error {
				answered = true
				return reply(m)
			})
		})
	return answered || trace.answered.Load(), err
}

// stream makes a call with one request and any number of messages in its answer. A unary call is the case of one
// message. stream returns an error of reply as a replyError.
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
	// If SendMsg returns io.EOF, RecvMsg returns the status.
	if err := stream.SendMsg(req); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	// Pass a message on only when the next message or the status has come, because a call that is cut off earlier may
	// be repeated.
	var last P
	for {
		m := P(new(M))
		err := stream.RecvMsg(&answer{into: m})
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if last != nil {
			if err := reply(last); err != nil {
				return replyError{err}
			}
		}
		if err != nil {
			return nil
		}
		last = m
	}
}
